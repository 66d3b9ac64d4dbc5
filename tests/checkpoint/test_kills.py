"""A run that is killed again and again, and whose checkpoints are damaged in between, equals an undisturbed one."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from megatron_style.config.run import RunConfig
from tests.support.killing import DAMAGES, complete_steps, damage_newest, run_and_kill
from tests.support.resuming import expect_bitwise, make_run, on_ranks

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    world: int
    zero: int
    precision: str
    damaged: bool  # between the kills; then three checkpoints are kept, else one
    kills: int = 6
    save_async: bool = False

    def __str__(self) -> str:
        kept = "damaged" if self.damaged else "one-kept"
        how = "-async" if self.save_async else ""
        return f"{self.world}-ranks-zero{self.zero}-{self.precision}-{kept}{how}"

    def run(self, folder: Path, name: str) -> RunConfig:
        settings: dict[str, Any] = {"data": self.world, "zero": self.zero, "half": self.precision == "bf16"}
        output: dict[str, Any] = {"save_every": 1, "save_async": self.save_async, "heartbeat_timeout": 5.0}
        output["keep_last"] = 3 if self.damaged else 1
        return make_run(folder, name, steps=12, dropout=True, output=output, **settings)


SUITE = [
    Case(2, 3, "fp32", damaged=True, kills=2),
    Case(1, 2, "bf16", damaged=True, kills=2),
]
SWEEP = [
    Case(world, zero, precision, damaged)
    for world, zero, precision in (
        (1, 0, "fp32"), (1, 1, "fp32"), (2, 1, "fp32"), (2, 2, "fp32"), (2, 3, "fp32"),
        (1, 1, "bf16"), (2, 1, "bf16"), (2, 2, "bf16"), (2, 3, "bf16"),
    )
    for damaged in (False, True)
]  # fmt: skip
SWEEP += [
    Case(2, 2, "fp32", damaged=False, kills=2, save_async=True),
    Case(2, 1, "fp32", damaged=False, kills=25, save_async=True),
    Case(2, 3, "bf16", damaged=True, kills=25, save_async=True),
]


@pytest.mark.parametrize("case", [*SUITE, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEEP)], ids=str)
def test_kill_9_at_any_moment_loses_nothing(folder: Path, case: Case, record_property: pytest.RecordProperty) -> None:
    """Each start resumes at the newest checkpoint that is complete. A run that was quicker than its kill is compared
    and begun again, so the kills that count have landed."""
    expected, run = case.run(folder, "undisturbed"), case.run(folder, "killed")
    begin = time.monotonic()
    on_ranks(expected, case.world)
    seconds = time.monotonic() - begin
    checkpoints = run.output.path / "checkpoints"
    rng = random.Random(str(case))
    damages = cycle(rng.sample(sorted(DAMAGES), len(DAMAGES)))
    landed = 0
    while landed < case.kills:
        newest = max(complete_steps(checkpoints), default=None)
        killed = run_and_kill(run, case.world, folder / "kill", rng, seconds)
        assert killed.resumed_at in (newest, None), killed.log
        if not killed.landed:
            expect_bitwise(run, expected)
            shutil.rmtree(run.output.path)
            continue
        landed += 1
        left = complete_steps(checkpoints)
        assert newest is None or max(left) >= newest
        if case.damaged:
            possible = (how for how in islice(damages, len(DAMAGES)) if damage_newest(how, checkpoints, rng))
            record_property("damage", next(possible, "none"))
        elif (checkpoints / "latest").exists():
            assert (checkpoints / "latest").read_text() in {f"global_step{step}" for step in left}
    record_property("kills that landed", landed)
    on_ranks(run, case.world)
    expect_bitwise(run, expected)
