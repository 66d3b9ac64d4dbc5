"""A folder of runs: one scale, one corpus, the runs of any tables, and what was measured of them.

OUTPUT/reproduction.json       the scale and the corpus, which may not change
OUTPUT/corpus/  held_out/      the text, where it was not given prepared, and the parts of it that are scored
OUTPUT/runs/NAME/              an ordinary run: run.yaml, metrics.jsonl, checkpoints/, model/
OUTPUT/runs/NAME/evaluations/  what `evaluate --json` said, with what it was said of
OUTPUT/results.md  results/    tables, charts, claims, and the records they can be traced to
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.base.files import write_atomic
from megatron_style.config.run import RunConfig
from megatron_style.paper.corpus import Source, corpus_of, held_out
from megatron_style.paper.grid import Table
from megatron_style.paper.measures import Evaluation
from megatron_style.paper.runs import PreparedText, RunSpec, run_config, run_name
from megatron_style.paper.scale import Scale
from megatron_style.paper.tables import all_tables

RECORD = "reproduction.json"


@dataclass(frozen=True)
class Experiment:
    scale: Scale
    source: Source
    output: Path
    seeds: int

    @cached_property
    def corpus(self) -> PreparedText:
        """To be looked at when it is prepared; at the paper's scale also before."""
        return corpus_of(self.source, self.scale, self.output)

    def folder(self, spec: RunSpec) -> Path:
        return self.output / "runs" / run_name(spec, self.scale)

    def config(self, spec: RunSpec) -> RunConfig:
        return run_config(spec, self.scale, self.corpus, self.folder(spec))

    def is_finished(self, spec: RunSpec) -> bool:
        return (self.folder(spec) / "model" / "model.safetensors").is_file()

    def evaluation_file(self, spec: RunSpec, evaluation: Evaluation) -> Path:
        return self.folder(spec) / "evaluations" / f"{evaluation.name}.json"

    def scored(self, evaluation: Evaluation) -> Path:
        return held_out(self.source, self.scale, self.output, evaluation.split)

    def tables(self) -> tuple[Table, ...]:
        return tuple(table.at(self.scale) for table in all_tables())

    def seeded(self, specs: Sequence[RunSpec]) -> Iterator[RunSpec]:
        """Each run once, though specs of two texts may be one run here."""
        seen = set()
        for seed in range(1, self.seeds + 1):
            for spec in specs:
                if (folder := self.folder(spec.with_seed(seed))) not in seen:
                    seen.add(folder)
                    yield spec.with_seed(seed)


def check_record(experiment: Experiment) -> None:
    """A folder of runs is of one scale and one corpus; figures of two cannot stand in one table."""
    found = _read_record(experiment.output / RECORD)
    if found is None:
        return
    if found["scale"] != experiment.scale.name:
        raise UserError(
            f"--output {experiment.output}: holds runs at scale {found['scale']}, not {experiment.scale.name}; "
            f"name another folder, or use --scale {found['scale']}"
        )
    if found["corpus"] != experiment.source.identity:
        raise UserError(
            f"--output {experiment.output}: holds runs on another corpus; "
            f"name another folder, or give --corpus as it was begun with"
        )


def write_record(experiment: Experiment) -> None:
    record = {"scale": experiment.scale.name, "corpus": experiment.source.identity}
    experiment.output.mkdir(parents=True, exist_ok=True)
    write_atomic(experiment.output / RECORD, json.dumps(record) + "\n")


def _read_record(path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"scale": found["scale"], "corpus": found["corpus"]}
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{path}: is not the record of an experiment; name another folder, or remove it") from None
