"""An update whose loss spikes is skipped, or ends the run: the same on every rank, and after every resumption."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_style.base.command import EXIT_DIVERGED, run_command
from megatron_style.base.errors import UserError
from megatron_style.checkpoint.logical import LogicalReader
from megatron_style.checkpoint.manifest import read_manifest
from megatron_style.config.run import RunConfig, SpikeConfig
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.session import distributed_session
from megatron_style.engine.spikes import extend_window, find_spike, loss_of_all_ranks
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.topology import Topology
from megatron_style.train import train
from tests.support.resuming import expect_bitwise, make_run, metrics, on_ranks
from tests.support.training import write_corpus

pytestmark = pytest.mark.slow
SPIKE = {"factor": 2.0, "action": "skip", "window": 4}
STEPS = (6, 9)  # whose loss is ten times what it should be; the first is judged by steps 3 to 6


@contextmanager
def spiked(steps: tuple[int, ...] = STEPS, *, ranks: tuple[int, ...] = (0, 1)) -> Iterator[None]:
    """Some ranks' losses, and so their gradients, are ten times what they should be in these steps (from 1)."""
    forward = TrainingEngine.forward
    now = 0

    def of_step(engine: TrainingEngine, corpus: Any, plan: Any, *others: Any) -> Any:
        nonlocal now
        now = plan.step + 1
        return accumulate_gradients(engine, corpus, plan, *others)

    def multiplied(engine: TrainingEngine, *inputs: Any) -> Any:
        output = forward(engine, *inputs)
        here = int(os.environ["RANK"]) in ranks
        return output._replace(nll=output.nll * (10.0 if now in steps and here else 1.0))

    with (
        patch("megatron_style.train.accumulate_gradients", of_step),
        patch.object(TrainingEngine, "forward", multiplied),
    ):
        yield


def state_at(run: RunConfig, step: int) -> dict[str, dict[str, torch.Tensor]]:
    folder = run.output.path / "checkpoints" / f"global_step{step}"
    manifest = read_manifest(folder)
    reader = LogicalReader(folder, manifest)
    return {name: reader.read(name) for name in manifest.parameters}


def same(run: RunConfig, step: int, later: int) -> bool:
    before, after = state_at(run, step), state_at(run, later)
    assert before.keys() == after.keys()
    return all(
        torch.equal(value, after[name][key]) for name, tensors in before.items() for key, value in tensors.items()
    )


def spiking_run(folder: Path, name: str = "run", *, action: str = "skip", **more: Any) -> RunConfig:
    optimizer = {"spike": SPIKE | {"action": action}} | more.pop("optimizer", {})
    return make_run(folder, name, steps=12, optimizer=optimizer, **more)


@pytest.mark.parametrize(
    ("zero", "half", "name", "world"),
    [
        (0, False, "nag", 1),
        (1, True, "adamw", 2),
        (2, False, "adamw", 2),
        (3, True, "nag", 2),
        pytest.param(0, False, "adamw", 2, marks=pytest.mark.sweep),
        pytest.param(1, False, "nag", 2, marks=pytest.mark.sweep),
        pytest.param(2, True, "nag", 2, marks=pytest.mark.sweep),
        pytest.param(3, False, "adamw", 2, marks=pytest.mark.sweep),
    ],
)
def test_a_skipped_update_changes_no_bit(folder: Path, zero: int, half: bool, name: str, world: int) -> None:
    """Neither of the weights nor of the optimizer's state; the updates around it do."""
    output = {"save_every": 1, "keep_last": 20}
    optimizer = {"name": name, "learning_rate": {"peak": 0.3 if name == "nag" else 0.003, "warmup_steps": 3}}
    run = spiking_run(folder, zero=zero, half=half, data=world, output=output, optimizer=optimizer)
    with spiked():
        on_ranks(run, world)
    still = [step for step in range(1, 12) if same(run, step, step + 1)]
    assert still == [step - 1 for step in STEPS]
    assert [event["step"] for event in metrics(run, "spike")] == list(STEPS)
    assert [event["skipped"] for event in metrics(run)] == [sum(step <= n for step in STEPS) for n in range(1, 13)]


def test_a_spike_is_an_event(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also in a step that is not shown otherwise, and in TensorBoard."""
    run = spiking_run(folder, output={"log_every": 5, "save_every": 12, "evaluate_every": 12})
    with spiked((9,)):
        on_ranks(run, 1)
    (event,) = metrics(run, "spike")
    shown = next(line for line in metrics(run) if line["step"] == 9)
    assert event == {"kind": "spike", "step": 9, "tokens": shown["tokens"], "loss": shown["loss"],
                     "median": event["median"], "action": "skip"}  # fmt: skip
    assert event["loss"] == pytest.approx(10 * event["median"], rel=0.3)
    assert f"skipped: the loss {event['loss']:.4f} is " in capfd.readouterr().err
    board = EventAccumulator(str(run.output.path / "tensorboard" / run.output.path.name)).Reload()
    (point,) = board.Scalars("spike/loss")
    assert (point.step, point.value) == (9, pytest.approx(event["loss"]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run with spikes that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    write_corpus(folder)
    run = spiking_run(folder)
    with spiked():
        on_ranks(run, 1)
    return run


@pytest.mark.parametrize("halt_after", [5, pytest.param(6, marks=pytest.mark.sweep), 8])
def test_a_resumed_run_finds_the_same_spikes(folder: Path, whole: RunConfig, halt_after: int) -> None:
    """The window is saved: right after a resumption there are losses enough to judge by."""
    with spiked():
        run = spiking_run(folder)
        on_ranks(run, 1, halt_after=halt_after)
        on_ranks(run, 1)
    expect_bitwise(run, whole)
    assert metrics(run, "spike") == metrics(whole, "spike")
    assert len(metrics(run, "spike")) == len(STEPS)


def test_all_grids_find_the_same_spikes(folder: Path, whole: RunConfig) -> None:
    """The loss of one rank is enough, and all skip the same updates: they would differ, or wait for ever."""
    losses = [[event["loss"] for event in metrics(whole)]]
    for tensor, data in ((1, 2), (2, 1)):
        run = spiking_run(folder, f"run{tensor}{data}", tensor=tensor, data=data)
        with spiked(ranks=(0, 1)):
            on_ranks(run, tensor * data)
        assert [event["step"] for event in metrics(run, "spike")] == list(STEPS)
        losses.append([event["loss"] for event in metrics(run)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)

    one_rank = spiking_run(folder, "one_rank", data=2)
    with spiked(ranks=(1,)):
        on_ranks(one_rank, 2)
    assert [event["step"] for event in metrics(one_rank, "spike")] == list(STEPS)


def losses_of_ranks(tensor: int) -> float:
    with distributed_session(tensor=tensor) as topology:
        share = torch.tensor(1.0 + 0.001 * topology.tensor.rank + 0.25 * topology.data.rank)
        return loss_of_all_ranks(share, topology)


def test_the_first_shard_decides_where_shards_round_differently() -> None:
    assert run_ranks(4, losses_of_ranks, 2) == [2.25] * 4


def stop_at_a_spike(run: RunConfig) -> None:
    with spiked((9,)), pytest.raises(SystemExit) as left:
        run_command(lambda: train(run))
    assert left.value.code == EXIT_DIVERGED


def test_stop_ends_the_run_as_diverged(folder: Path) -> None:
    run = spiking_run(folder, action="stop", output={"save_every": 3, "keep_last": 9})
    run_ranks(1, stop_at_a_spike, run)
    status = json.loads((run.output.path / "status.json").read_text())
    assert status["state"] == "diverged"
    assert "step 9: the loss " in status["error"]
    assert "(optimizer.spike)" in status["error"]
    assert {path.name for path in (run.output.path / "checkpoints").glob("global_step*")} == {
        "global_step3",
        "global_step6",
    }
    assert [(event["step"], event["action"]) for event in metrics(run, "spike")] == [(9, "stop")]


def test_a_run_without_the_section_skips_nothing(folder: Path) -> None:
    run = make_run(folder, steps=12)
    with spiked():
        on_ranks(run, 1)
    assert metrics(run, "spike") == []
    assert metrics(run)[-1]["skipped"] == 0
    assert read_manifest(run.output.path / "checkpoints" / "global_step12").losses == ()


def test_what_is_judged_by_what() -> None:
    config = SpikeConfig(factor=2.0, action="skip", window=3)
    assert find_spike(config, (1.0, 1.0), 99.0) is None  # no full window yet
    assert find_spike(config, (1.0, 9.0, 2.0), 4.0) is None
    spike = find_spike(config, (1.0, 9.0, 2.0), 4.001)
    assert spike is not None
    assert spike.median == 2.0
    assert find_spike(config, (50.0, 50.0, 1.0, 1.0, 1.0), 3.0) is not None  # of a longer window before
    assert find_spike(config, (1.0, 1.0, 1.0), math.inf) is None
    assert find_spike(config, (1.0, 1.0, 1.0), math.nan) is None
    assert extend_window(config, (1.0, 2.0, 3.0), 4.0) == (2.0, 3.0, 4.0)
    assert extend_window(config, (1.0, 2.0, 3.0), math.nan) == (1.0, 2.0, 3.0)
    assert loss_of_all_ranks(torch.tensor(1.5), Topology()) == 1.5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"factor": 1.0}, "optimizer.spike.factor is 1.0, but it should be greater than 1"),
        ({"factor": 0}, "optimizer.spike.factor is 0, but it should be greater than 1"),
        ({"action": "warn"}, "optimizer.spike.action is \"warn\", but it should be 'skip' or 'stop'"),
        ({"window": 0}, "optimizer.spike.window is 0, but it should be greater than 0"),
        ({"faktor": 2}, "optimizer.spike.faktor: unknown key; did you mean 'factor'?"),
    ],
)
def test_wrong_values_are_refused(folder: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=r"optimizer\.spike") as refused:
        make_run(folder, optimizer={"spike": SPIKE | change})
    assert told in str(refused.value)
