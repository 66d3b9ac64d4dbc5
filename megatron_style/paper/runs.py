"""The runs of the tables: specified in the paper's numbers, and as run files at some scale."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig
from megatron_style.config.shipped import shipped_file
from megatron_style.config.yaml_file import read_yaml
from megatron_style.paper.scale import ExperimentScale, ModelSize

Model = Literal[
    "baseline",
    "pia_cache",
    "ablation_pia_no_cache",
    "ablation_pia_no_cache_unshuffled",
    "ablation_cache_no_pia",
    "sandwich",
    "sandwich_shortformer",
    "transformer_xl",
    "transformer_xl_staged",
    "compressive",
    "compressive_shortformer",
    "routing",
]
_OWN_STAGES: frozenset[Model] = frozenset({"transformer_xl", "transformer_xl_staged", "compressive", "routing"})
Text = Literal["wikitext103", "tbc"]


@dataclass(frozen=True)
class RunSpec:
    """One row of a table, trained. Lengths and epochs are the paper's."""

    model: Model
    length: int  # of the last stage
    first_length: int | None = None
    first_epochs: int = 0
    text: Text = "wikitext103"
    seed: int = 1

    def with_seed(self, seed: int) -> RunSpec:
        return replace(self, seed=seed)

    def is_in(self, scale: ExperimentScale) -> bool:
        lengths = {self.length, self.first_length or self.length}
        return lengths <= set(scale.lengths) and (not self.first_length or self.first_epochs in scale.first_epochs)


@dataclass(frozen=True)
class PreparedText:
    """A prepared corpus as the runs read it."""

    train: Path  # prefixes of token stores
    valid: Path
    vocab_size: int | None  # None: not prepared yet


def run_name(spec: RunSpec, scale: ExperimentScale) -> str:
    """Return a name made from the run's settings, so that tables which need the same run share its folder."""
    stages = _stages(spec, scale)
    parts = "-".join(f"L{stage['segment_length']}x{_extent(stage)}" for stage in stages)
    recipe = _recipe(spec, scale)
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
    return f"{spec.model}-{parts}-seed{spec.seed}-{digest}"


def run_config(spec: RunSpec, scale: ExperimentScale, corpus: PreparedText, folder: Path) -> RunConfig:
    """Return the paper's run file of this model with the changes of the scale."""
    data = _recipe(spec, scale)
    data["data"] |= {"train": str(corpus.train), "valid": str(corpus.valid)}
    data["output"] = {
        "path": str(folder),
        "log_every": min(scale.save_every, 100 if scale.is_paper else 10),
        "evaluate_every": scale.evaluate_every,
        "evaluate_tokens": scale.watched_tokens,
        "sample_tokens": 40 if scale.is_paper else 0,
        "save_every": scale.save_every,
        "keep_every": scale.keep_every,
        "keep_last": 1,
    }
    if not scale.is_paper:
        assert corpus.vocab_size is not None
        data["model"]["vocabulary"]["cutoffs"] = _cutoffs(corpus.vocab_size)
    return RunConfig.parse(data, source=str(RunFolder(folder).run_file))


def _recipe(spec: RunSpec, scale: ExperimentScale) -> dict[str, Any]:
    """Return the run file without the corpus, which all runs of a folder share, and without the output."""
    data = _paper_file(spec, scale)
    paper_layers = data["model"]["layers"]
    data["stages"] = _stages(spec, scale)
    data["seed"] = spec.seed
    del data["output"]
    if scale.model is not None:
        # In a narrow model, rare words with a 16th of the width would learn next to nothing.
        vocabulary = {"kind": "adaptive", "factor": scale.band_factor}
        data["model"] |= _sizes(scale.model) | {"dropout": {}, "vocabulary": vocabulary}
        if sandwich := data["model"].get("sandwich"):
            data["model"]["sandwich"] = max(1, round(sandwich * scale.model.layers / paper_layers))
        if memory := data["model"].get("memory"):
            memory["compressed"] = scale.length(memory["compressed"])
        if routing := data["model"].get("routing"):
            spans = {key: scale.length(routing[key]) for key in ("window", "local")}
            data["model"]["routing"] = routing | spans | {"heads": scale.model.heads // 2}
        data["data"]["tokens_per_batch"] = scale.tokens_per_batch
        rate = {"peak": scale.peak_rate, "floor": scale.peak_rate / 50, "warmup_steps": scale.steps // 20}
        data["optimizer"] = {"name": "adamw", "learning_rate": rate, "clip_norm": 1.0}
        del data["deepspeed"]
    return data


def _paper_file(spec: RunSpec, scale: ExperimentScale) -> dict[str, Any]:
    """Return the paper's run file. At other scales all tables use one corpus, so that they share runs."""
    if scale.is_paper and spec.text == "tbc":
        return read_yaml(shipped_file(f"run_configs/tbc_{_books_name(spec)}.yaml"))
    return read_yaml(shipped_file(f"run_configs/wikitext103_{spec.model}.yaml"))


def _books_name(spec: RunSpec) -> str:
    staged = {"baseline": "staged", "pia_cache": "shortformer"}
    return staged[spec.model] if spec.first_length else spec.model


def _stages(spec: RunSpec, scale: ExperimentScale) -> list[dict[str, Any]]:
    if scale.is_paper and spec.model in _OWN_STAGES:  # those of its authors
        return list(_paper_file(spec, scale)["stages"])
    if scale.is_paper and spec.text == "tbc":  # extents as in its run files: in tokens and epochs
        stages: list[dict[str, Any]] = _paper_file(spec, scale)["stages"]
        stages[-1] |= _stage(spec.length, scale)
        return stages
    first = scale.first_steps(spec.first_epochs)
    last = _stage(spec.length, scale) | {"steps": scale.steps - first}
    if spec.first_length is None:
        return [last]
    return [_stage(spec.first_length, scale) | {"steps": first}, last]


def _stage(paper_length: int, scale: ExperimentScale) -> dict[str, Any]:
    long = {"micro_rows": 1} if scale.is_paper and paper_length == 3072 else {}  # one row at a time fits 32 GB
    return {"segment_length": scale.length(paper_length)} | long


def _extent(stage: dict[str, Any]) -> str:
    return next(
        f"{stage[key]}{unit}" for key, unit in (("steps", ""), ("epochs", "e"), ("tokens", "t")) if key in stage
    )


def _sizes(size: ModelSize) -> dict[str, int]:
    return {"layers": size.layers, "hidden_size": size.hidden_size, "heads": size.heads, "ffn_size": size.ffn_size}


def _cutoffs(vocab_size: int) -> list[int]:
    """Return cutoffs in about the paper's proportions (20,000 and 60,000 of 267,744), for words and for subwords."""
    return [max(1, vocab_size // 16), max(2, vocab_size // 4)]
