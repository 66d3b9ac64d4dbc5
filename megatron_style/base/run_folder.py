"""The names of the files in a run's folder, which no other module spells, and what people do with a finished run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

RUN_FILE = "run.yaml"
LATEST = "latest"
_CHECKPOINT = re.compile(r"global_step(0|[1-9][0-9]*)")


def checkpoint_name(step: int) -> str:
    """Return the name that DeepSpeed gives the checkpoint of a step."""
    return f"global_step{step}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint by its name; None if it is not the name of a checkpoint."""
    found = _CHECKPOINT.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def run_file(self) -> Path:
        return self.path / RUN_FILE

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def launches(self) -> Path:
        return self.path / "launches.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def tensorboard_by_tokens(self) -> Path:
        return self.path / "tensorboard_by_tokens"

    @property
    def profile(self) -> Path:
        """Return the folder of `train --profile`."""
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def latest(self) -> Path:
        """Return the file that names the newest complete checkpoint."""
        return self.checkpoints / LATEST

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    def steps(self) -> list[int]:
        """Return the steps of the folders that are named like a checkpoint, in order; other files are ignored."""
        found = (step_of(path.name) for path in self.checkpoints.glob("global_step*"))
        return sorted(step for step in found if step is not None)

    @property
    def model(self) -> Path:
        """Return the folder of the exported model."""
        return self.path / "model"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    def host_records(self, first_rank: int) -> Path:
        """Return the file with the records of a host's ranks, named after the first of them."""
        return self.ranks / f"host_{first_rank:05d}.jsonl"

    def all_host_records(self) -> list[Path]:
        return sorted(self.ranks.glob("host_*.jsonl"))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank:05d}.log"

    @property
    def lock(self) -> Path:
        """Return the lock that a run holds while it trains."""
        return self.path / "lock.json"

    @property
    def supervisor(self) -> Path:
        """Return the lock that a supervisor holds."""
        return self.path / "supervisor.json"

    @property
    def status(self) -> Path:
        """Return the file that says how the last launch ended."""
        return self.path / "status.json"


def next_steps(folder: Path, held_out: Path) -> str:
    """Say where the model of a finished run is, and name the three commands that people need next."""
    run = quote(str(folder))
    model = quote(str(RunFolder(folder).model))
    return (
        f"the model is in {RunFolder(folder).model}; next:\n"
        f"  python -m megatron_style.evaluate {model} --data {quote(str(held_out))}\n"
        f"  python -m megatron_style.generate {model} --interactive\n"
        f"  python -m megatron_style.report {run}"
    )
