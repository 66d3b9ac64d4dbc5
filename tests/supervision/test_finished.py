"""A finished run that is started again says so at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import save_run
from megatron_style.supervision.finished import what_is_finished
from megatron_style.supervision.record import State, Status, write_status
from tests.support.runs import tiny_run


def run_in(folder: Path, **changes: Any) -> RunConfig:
    changes["output"] = {"path": str(folder)} | changes.get("output", {})
    return tiny_run(**changes)


def finish(folder: Path, run: RunConfig, state: State = "finished") -> None:
    (folder / "model").mkdir(exist_ok=True)
    save_run(run, folder / "run.yaml")
    write_status(folder, Status("launch", state, 40, "now"))


def test_it_names_the_model_and_the_next_commands(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert what_is_finished(run) is None
    finish(tmp_path, run)
    told = what_is_finished(run)
    assert told is not None
    assert told.startswith(f"{tmp_path}: is finished after 40 steps; for more of them change `stages`")
    assert f"python -m megatron_style.evaluate {tmp_path}/model --data valid" in told
    assert what_is_finished(run_in(tmp_path, output={"log_every": 3})), "what is shown changes nothing"


@pytest.mark.parametrize("state", ["failed", "stopped", "diverged"])
def test_any_other_end_is_not_finished(tmp_path: Path, state: State) -> None:
    run = run_in(tmp_path)
    finish(tmp_path, run, state)
    assert what_is_finished(run) is None


def test_other_settings_are_left_to_the_training(tmp_path: Path) -> None:
    finish(tmp_path, run_in(tmp_path))
    assert what_is_finished(run_in(tmp_path, stages=[{"segment_length": 4, "epochs": 2}])) is None
    assert what_is_finished(run_in(tmp_path, seed=2)) is None


def test_what_the_corpus_and_the_grid_decide_is_no_change(tmp_path: Path) -> None:
    open_run = run_in(
        tmp_path, model={"vocabulary": {"kind": "adaptive"}}, data={"tokens_per_batch": 48, "tokens_per_update": 48}
    )
    finish(tmp_path, open_run.with_vocabulary(424).on_ranks(2))
    assert what_is_finished(open_run)
    fixed = run_in(tmp_path, model={"vocabulary": {"kind": "adaptive", "cutoffs": [8]}}, data={"tokens_per_update": 48})
    assert what_is_finished(fixed) is None
