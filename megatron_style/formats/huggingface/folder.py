"""A form of model: a folder for the transformers library, with weights, settings, tokenizer and the model's code.
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` needs nothing from this project.

`generate` does not stop at a line end, since a text has many: `generation_config.json` names no end token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.model_files import SHARD_BYTES
from megatron_style.config.model import ModelConfig, ModelFolderConfig
from megatron_style.data.tokenizer import PAD
from megatron_style.formats.certificate import Certificate, Nll, certify, segment_of
from megatron_style.formats.huggingface.tokenizer import read_tokenizer, write_tokenizer
from megatron_style.formats.model_folder import CONFIG_FILE, model_type, open_weights, read_settings, write_weights
from megatron_style.formats.source import ANY, Holds, ModelSource

NAME = "a folder for transformers"
MODEL_TYPE = "shortformer"
CODE_FILE = "modeling_shortformer.py"
GENERATION_FILE = "generation_config.json"
FILES = frozenset({CODE_FILE, GENERATION_FILE, "tokenizer_config.json"})
HOLDS: Holds = {
    "positions": {"added", "infused"},
    "cache": ANY,
    "sandwich": ANY,
    "vocabulary.kind": ANY,
    "vocabulary.cutoffs": ANY,
    "vocabulary.factor": ANY,
    "dropout": ANY,
}
_SHARED_KEYS = frozenset({"format_version", "vocab_size", "segment_length", "cache_length", "step"})  # same name here
_LATER_KEYS = frozenset(
    {"norm", "sandwich", "memory", "routing", "document_end"}
)  # folders of older versions have only the default
_SCORED_AT_ONCE = 32  # tokens; each has a float64 for every token of the vocabulary


def recognises(path: Path) -> bool:
    return model_type(path) == MODEL_TYPE


def read(folder: Path) -> ModelSource:
    path = folder / CONFIG_FILE
    settings = read_settings(folder)
    for key in sorted(_SHARED_KEYS | ModelConfig.model_fields.keys() - _LATER_KEYS | {"eos_token_id"}):
        if key not in settings:
            raise UserError(f"{path}: lacks '{key}', so it is not a complete export of `convert export-hf`")
    model = {key: settings[key] for key in ModelConfig.model_fields if key in settings}
    data = {key: settings[key] for key in _SHARED_KEYS} | {"model": model, "eos": settings["eos_token_id"]}
    config = ModelFolderConfig.parse(data, source=str(path))
    return ModelSource(folder, config, open_weights(folder, config), partial(read_tokenizer, folder))


def write(folder: Path, source: ModelSource, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model without optimizer state, for which the library has no place."""
    folder.mkdir(exist_ok=True)
    write_weights(folder, source, shard_bytes=shard_bytes)
    tokens = {"bos_token_id": source.config.eos}  # a text begins as if a line had just ended
    if (tokenizer := source.tokenizer()) is not None:
        write_tokenizer(folder, tokenizer)
        tokens["pad_token_id"] = tokenizer.eos if tokenizer.kind == "pretrained" else PAD
    _write_json(folder / GENERATION_FILE, tokens)
    _write_json(folder / CONFIG_FILE, _settings(source.config) | tokens)
    shutil.copyfile(Path(__file__).with_name(CODE_FILE), folder / CODE_FILE)


def _settings(config: ModelFolderConfig) -> dict[str, Any]:
    module = CODE_FILE.removesuffix(".py")
    code = {"AutoConfig": "ShortformerConfig", "AutoModelForCausalLM": "ShortformerForCausalLM"}
    data = config.as_data()
    return {
        "model_type": MODEL_TYPE,
        "architectures": [code["AutoModelForCausalLM"]],
        "auto_map": {kind: f"{module}.{name}" for kind, name in code.items()},
        "dtype": "float32",
        "eos_token_id": config.eos,
        **data["model"],
        **{key: data[key] for key in sorted(_SHARED_KEYS)},
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def certify_export(source: ModelSource, output: ModelSource) -> Certificate:
    """Certify the folder with its own code, if the library is installed."""
    try:
        from megatron_style.formats.huggingface.modeling_shortformer import ShortformerForCausalLM
    except ImportError:
        how = "megatron_style; transformers cannot be imported, so the folder's own code was not run"
        return certify(source, output, computed_by=how)
    scorer = _scorer(ShortformerForCausalLM, output)
    return certify(source, output, scorer=scorer, computed_by=f"transformers {version('transformers')}")


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Switch off the library's progress bar of weights, which are read in a moment."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _scorer(code: Any, output: ModelSource) -> Callable[[Tensor], Nll]:
    """Return a function that scores the fixed text with the exported code, in the same segments as ours."""
    segment = segment_of(output.config)
    cut = {"segment_length": segment, "cache_length": min(output.config.cache_length, segment)}
    with _quiet_loading():
        model = code.from_pretrained(output.path, dtype=torch.float64, **cut)

    @torch.no_grad()
    def score(text: Tensor) -> Nll:
        nll = []
        past = None
        for ids, wanted in zip(text[:-1].split(_SCORED_AT_ONCE), text[1:].split(_SCORED_AT_ONCE), strict=True):
            out = model(ids[None], past_key_values=past)
            past = out.past_key_values
            nll.append(-out.logits[0].log_softmax(-1).gather(1, wanted[:, None])[:, 0])
        return torch.cat(nll).numpy()

    return score
