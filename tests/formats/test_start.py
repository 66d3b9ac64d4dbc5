"""A run that begins with a model trained elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from megatron_style.config.run import RunConfig
from megatron_style.formats import fairseq, model_folder, run_checkpoint
from megatron_style.formats.transfer import transfer
from tests.support.resuming import make_run, metrics, on_ranks
from tests.support.tiny import tiny_config, write_tiny_model

pytestmark = pytest.mark.slow


def starting_at(run: RunConfig, start: Path, output: str) -> RunConfig:
    changed = run.as_data()
    changed["output"]["path"] = str(run.output.path.with_name(output))
    return RunConfig.parse(changed | {"start": str(start)}, source="test")


@pytest.mark.parametrize(
    ("form", "name", "zero", "world"),
    [
        (fairseq, "model.pt", 1, 2),
        (model_folder, "model", 3, 2),
        pytest.param(model_folder, "model", 0, 1, marks=pytest.mark.sweep),
    ],
)
def test_it_resumes_with_step_and_optimizer(folder: Path, form: object, name: str, zero: int, world: int) -> None:
    """At a stage's end, where lanes open anyway: so the losses are those of the run that never left."""
    whole = make_run(folder, steps=8, zero=zero, data=world, output={"keep_every": 4})
    on_ranks(whole, world)
    source = run_checkpoint.read(whole.output.path / "checkpoints" / "global_step4")
    transfer(source, form, folder / name)  # type: ignore[arg-type]
    second = starting_at(whole, folder / name, "second")
    on_ranks(second, world)
    expected = [event for event in metrics(whole) if event["step"] > 4]
    found = metrics(second)
    assert [event["step"] for event in found] == [5, 6, 7, 8]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["learning_rate"] == theirs["learning_rate"]


def test_without_optimizer_state_it_begins_at_step_0_with_the_weights(folder: Path) -> None:
    first = make_run(folder, steps=8)
    on_ranks(first, 1)
    second = starting_at(first, first.output.path / "model", "second")
    on_ranks(second, 1)
    assert [event["step"] for event in metrics(second)] == list(range(1, 9))
    assert metrics(second)[0]["loss"] < metrics(first)[0]["loss"] - 0.1


def test_its_own_checkpoints_come_before_the_start(folder: Path) -> None:
    first = make_run(folder, steps=8)
    on_ranks(first, 1)
    second = starting_at(first, first.output.path / "model", "second")
    on_ranks(second, 1, halt_after=5)
    (first.output.path / "model" / "config.json").unlink()  # nobody needs it any more
    on_ranks(second, 1)
    assert [event["step"] for event in metrics(second)] == list(range(1, 9))


def test_another_model_and_a_finished_one_are_refused(folder: Path) -> None:
    run = make_run(folder, steps=8)
    on_ranks(run, 1)
    write_tiny_model(folder / "other", tiny_config(layers=3))
    with pytest.raises(ProcessRaisedException, match=r"its model.layers is 3, not 2"):
        on_ranks(starting_at(run, folder / "other", "second"), 1)
    transfer(run_checkpoint.read(run.output.path), model_folder, folder / "finished")
    with pytest.raises(ProcessRaisedException, match="has done 8 steps, but this run's stages end at 8"):
        on_ranks(starting_at(run, folder / "finished", "second"), 1)
