"""A run on a blend resumes as exactly as one on a single corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_style.checkpoint.manifest import read_manifest
from megatron_style.checkpoint.reshard import reshard
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from tests.support.blends import SIZES, blend_in, with_data, write_blend
from tests.support.resuming import UPDATE, expect_bitwise, expect_close, make_run, metrics, on_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blend")
    write_blend(path)
    return path


def blend_run(folder: Path, name: str, **settings: Any) -> RunConfig:
    """Return a run of 14 steps: epochs of the smaller source end after steps 5, 9 and 13, a stage after step 7."""
    return with_data(make_run(folder, name, steps=14, **settings), train=blend_in(folder))


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunConfig:
    run = blend_run(folder, "undisturbed", dropout=True)
    on_ranks(run, 1)
    return run


@pytest.mark.parametrize("halt_after", [3, 5, 7, pytest.param(11, marks=pytest.mark.sweep)])
def test_a_resumed_blend_is_bit_equal(folder: Path, undisturbed: RunConfig, halt_after: int) -> None:
    """In the middle of a pass, at the end of an epoch of one source, at a stage switch, and after it."""
    run = blend_run(folder, f"halted{halt_after}", dropout=True)
    on_ranks(run, 1, halt_after=halt_after)
    on_ranks(run, 1)
    expect_bitwise(run, undisturbed)


def test_a_resumed_blend_is_bit_equal_on_two_ranks_at_half_precision(folder: Path) -> None:
    runs = [blend_run(folder, name, data=2, zero=2, half=True) for name in ("half", "halted-half")]
    on_ranks(runs[0], 2)
    on_ranks(runs[1], 2, halt_after=6)
    on_ranks(runs[1], 2)
    expect_bitwise(runs[1], runs[0])


def test_a_blend_resumes_on_another_grid(folder: Path) -> None:
    expected = blend_run(folder, "one-rank")
    on_ranks(expected, 1)
    moved = blend_run(folder, "moved")
    on_ranks(moved, 1, halt_after=6)
    moved = blend_run(folder, "moved", data=2, zero=2)
    on_ranks(moved, 2)
    expect_close(moved, expected)
    for found, wanted in zip(metrics(moved), metrics(expected), strict=True):
        assert found["by_source"] == pytest.approx(wanted["by_source"], rel=1e-5)


def test_a_blend_resumes_with_another_update(folder: Path) -> None:
    """Two ranks with the same batch each: the lanes of all sources are cut anew from what is unread."""
    on_ranks(blend_run(folder, "grown"), 1, halt_after=3)
    run = blend_run(folder, "grown", data=2, update=2 * UPDATE)
    on_ranks(run, 2)
    manifest = read_manifest(run.output.path / "checkpoints" / "global_step14")
    assert manifest.history == ((0, UPDATE), (3, 2 * UPDATE))
    assert dict(manifest.sources) == SIZES
    assert np.isfinite([event["loss"] for event in metrics(run)]).all()


def test_a_resharded_blend_resumes(folder: Path, tmp_path: Path, undisturbed: RunConfig) -> None:
    run = blend_run(folder, "to-reshard", dropout=True)
    on_ranks(run, 1, halt_after=6)
    reshard(run.output.path, tmp_path / "resharded", tensor=1, data=2)
    resharded = load_run(tmp_path / "resharded" / "run.yaml")
    on_ranks(resharded, 2, halt_after=1)
    found = metrics(resharded)[0]
    assert found["step"] == 7
    assert found["tokens"] == metrics(undisturbed)[6]["tokens"]


@pytest.mark.parametrize(("change", "words"), [
    ({"weight": 3}, "stages or data have changed, so resuming at step 3 would skip or repeat tokens"),
    ({"name": "novels"}, "the sources of its data.train are news, books, not news, novels; restore their names"),
    (None, "the sources of its data.train are news, books, not train; restore their names"),
])  # fmt: skip
def test_another_blend_is_refused(folder: Path, change: dict[str, Any] | None, words: str) -> None:
    name = f"another-{words[4:11].strip()}-{change}"
    run = blend_run(folder, name)
    on_ranks(run, 1, halt_after=3)
    *others, last = blend_in(folder)
    train = str(folder / "news" / "train") if change is None else [*others, last | change]
    with pytest.raises(Exception, match=words):
        on_ranks(with_data(run, train=train), 1)


def test_the_loss_of_each_source_is_recorded(undisturbed: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    for event in metrics(undisturbed):
        assert event["by_source"].keys() == SIZES.keys()
        assert min(event["by_source"].values()) <= event["loss"] <= max(event["by_source"].values())
