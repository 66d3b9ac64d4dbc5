"""Paths of a run file are those of the current folder or of the run file's, whichever has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_style.base.errors import UserError
from megatron_style.config.paths import check_inputs
from megatron_style.config.run_file import load_run
from tests.support.runs import tiny_run


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run file in a folder `there`; the current folder is `here`."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    data = tiny_run(
        stages=[{"segment_length": 4, "steps": 1}],
        data={"train": [{"path": "a/train", "weight": 1}, {"path": "b/train", "weight": 1}], "valid": {"x": "a/valid"}},
        output={"path": "runs/x"},
    ).as_data()
    path = there / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def store(prefix: Path) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_suffix(".bin").touch()


def test_files_are_found_next_to_the_run_file_or_here(run_file: Path) -> None:
    there = run_file.parent
    store(there / "a" / "train")
    store(there / "a" / "valid")
    store(Path("b/train"))
    store(there / "b" / "train")
    run = load_run(run_file)
    assert [source.path for source in run.data.sources] == [there / "a" / "train", Path("b/train")]
    assert run.data.held_out == {"x": there / "a" / "valid"}
    assert run.output.path == Path("runs/x"), "what exists nowhere is made here"
    check_inputs(run, there)
    (there / "runs" / "x").mkdir(parents=True)
    assert load_run(run_file).output.path == there / "runs" / "x"


def test_a_missing_file_is_named_with_what_was_tried(run_file: Path) -> None:
    with pytest.raises(UserError) as refusal:
        check_inputs(load_run(run_file), run_file.parent)
    assert str(refusal.value) == (
        f"data.train: a/train does not exist; make it with `prepare` (tried {Path.cwd()}/a/train and "
        f"{run_file.parent}/a/train)"
    )
