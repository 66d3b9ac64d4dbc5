"""A first stage that is trained once for several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.paper.work.jobs import waves
from megatron_style.paper.work.records import forget_records
from megatron_style.paper.work.sharing import TAKEN, begins_like, take_over
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_corpus

pytestmark = pytest.mark.slow

DROPOUT = {"hidden": 0.2, "attention": 0.1, "activation": 0.1, "softmax": 0.1}


def make_run(folder: Path, name: str, *stages: tuple[int, int], cache: bool = False, **sections: Any) -> RunConfig:
    """Stages are (segment length, steps). The corpus of 1200 tokens is not a whole number of updates."""
    output = {"path": str(folder / name), "log_every": 1, "save_every": 5, "keep_every": 5, "keep_last": 1}
    output |= {"evaluate_every": 4, "evaluate_tokens": 100, "sample_tokens": 0}
    return tiny_run(
        stages=[{"segment_length": length, "steps": steps} for length, steps in stages],
        tokens_per_batch=192,
        cache=cache,
        model={"dropout": DROPOUT},
        data={"train": str(folder / "train"), "valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        output=output,
        **sections,
    )


def losses(run: RunConfig) -> dict[int, float]:
    events = map(json.loads, (run.output.path / "metrics.jsonl").read_text().splitlines())
    return {event["step"]: event["loss"] for event in events if event["kind"] == "train"}


@pytest.mark.parametrize("cache", [False, True])
def test_a_run_that_takes_over_equals_one_that_trained_it_all(tmp_path: Path, cache: bool) -> None:
    """Bit for bit: losses of every step, and the weights at the end."""
    write_corpus(tmp_path)
    donor = make_run(tmp_path, "donor", (8, 20), cache=cache)
    whole, taker = (make_run(tmp_path, name, (8, 10), (24, 10), cache=cache) for name in ("whole", "taker"))
    run_ranks(1, train, donor)
    run_ranks(1, train, whole)
    assert take_over(taker, [donor]) is not None
    run_ranks(1, train, taker)
    assert len(losses(whole)) == 20
    assert losses(taker) == losses(whole)
    weights = [(run.output.path / "model" / "model.safetensors").read_bytes() for run in (taker, whole, donor)]
    assert weights[0] == weights[1] != weights[2]
    assert json.loads((taker.output.path / TAKEN).read_text()) == {"run": "donor", "step": 10}
    kinds = [json.loads(line)["kind"] for line in (taker.output.path / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("stage") == 2


def test_a_run_that_has_begun_goes_its_own_way(tmp_path: Path) -> None:
    donor, taker = make_run(tmp_path, "donor", (8, 20)), make_run(tmp_path, "taker", (8, 10), (24, 10))
    saved = donor.output.path / "checkpoints" / "global_step10"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    lines = [{"kind": "train", "step": 10}, {"kind": "valid", "step": 10}, {"kind": "train", "step": 11}]
    (donor.output.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert take_over(taker, [donor]) == saved
    copy = taker.output.path / "checkpoints" / "global_step10" / "manifest.json"
    assert copy.stat().st_ino == (saved / "manifest.json").stat().st_ino  # one copy on the disk
    assert json.loads((taker.output.path / "metrics.jsonl").read_text()) == lines[0]
    assert take_over(taker, [donor]) is None


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"optimizer": {"learning_rate": {"peak": 0.2}}},
        {"parallel": {"micro_tokens": 96}},
        {"stages": ((8, 5), (24, 15))},  # its first stage is over too soon
        {"stages": ((12, 20),)},
        {"stages": ((8, 21),)},  # the learning rate is a function of all steps
        {"cache": True},
    ],
)
def test_only_what_is_equal_is_shared(tmp_path: Path, other: dict[str, Any]) -> None:
    taker = make_run(tmp_path, "taker", (8, 10), (24, 10))
    assert begins_like(taker, make_run(tmp_path, "donor", (8, 20)))
    assert not begins_like(taker, make_run(tmp_path, "donor", *other.pop("stages", [(8, 20)]), **other))


def test_a_first_stage_that_ends_where_nothing_is_kept_is_not_shared(tmp_path: Path) -> None:
    taker = make_run(tmp_path, "taker", (8, 12), (24, 8))
    assert not begins_like(taker, make_run(tmp_path, "donor", (8, 20)))


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_run_that_is_trained_anew_is_evaluated_anew(tmp_path: Path, has_begun: bool) -> None:
    run = make_run(tmp_path, "run", (8, 20)).output.path
    (run / "evaluations").mkdir(parents=True)
    (run / TAKEN).touch()
    if has_begun:
        (run / "checkpoints").mkdir()
    forget_records(run)
    assert [(run / name).exists() for name in ("evaluations", TAKEN)] == [has_begun] * 2


def test_runs_wait_for_the_one_they_can_begin_with(tmp_path: Path) -> None:
    short, long = make_run(tmp_path, "short", (8, 5), (24, 15)), make_run(tmp_path, "long", (8, 15), (24, 5))
    other = make_run(tmp_path, "other", (12, 5), (24, 15))
    assert waves([short, other, long], [short, other, long]) == ([other, long], [short])
    assert waves([short, other], [short, other]) == ([short, other], [])
