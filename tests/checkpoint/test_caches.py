"""Caches in checkpoints: every rank writes its own part, and any other grid regroups the parts, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_style.checkpoint.manifest import FILE, digest_of
from megatron_style.checkpoint.reshard import reshard
from megatron_style.config.run import RunConfig
from tests.support.resuming import expect_bitwise, make_run, on_ranks

pytestmark = pytest.mark.slow
MEMORY = {"memory": {"compressed": 4, "rate": 2}}


def checkpoint_of(run_folder: Path) -> Path:
    checkpoints = run_folder / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text()


def cache_files(folder: Path, data_rank: int) -> list[Path]:
    """Return the files of a data-parallel rank, in the order of its tensor-parallel ranks."""
    return sorted(folder.glob(f"caches_data_rank_{data_rank:05d}*"))


def complete_caches(folder: Path, data: int) -> dict[str, Tensor]:
    """Return all rows and all features of every cache."""
    found: dict[str, list[Tensor]] = {}
    for rank in range(data):
        parts = [load_file(path) for path in cache_files(folder, rank)]
        for name in parts[0]:
            found.setdefault(name, []).append(torch.cat([part[name] for part in parts], dim=-1))
    return {name: torch.cat(rows) for name, rows in found.items()}


def stopped(folder: Path, name: str, tensor: int, data: int, **settings: Any) -> RunConfig:
    """Return a run that was stopped in mid-epoch, after four steps."""
    run = make_run(folder, name, tensor=tensor, data=data, steps=10, **settings)
    on_ranks(run, tensor * data, halt_after=4)
    return run


@pytest.mark.parametrize(
    ("tensor", "model"),
    [
        (4, {}),
        pytest.param(1, MEMORY, id="1-compressive"),
        pytest.param(2, {}, marks=pytest.mark.sweep),
        pytest.param(1, {}, marks=pytest.mark.sweep),
        pytest.param(4, MEMORY, id="4-compressive", marks=pytest.mark.sweep),
    ],
)
def test_another_grid_regroups_the_parts(folder: Path, tensor: int, model: dict[str, Any]) -> None:
    run = stopped(folder, "before", 2, 2, model=model)
    expected = complete_caches(checkpoint_of(run.output.path), data=2)
    assert all(cache.abs().max() > 0 for cache in expected.values())
    reshard(run.output.path, folder / "after", tensor=tensor, data=1)
    moved = checkpoint_of(folder / "after")
    assert len(cache_files(moved, 0)) == tensor
    found = complete_caches(moved, data=1)
    assert found.keys() == expected.keys()
    for name, cache in expected.items():
        assert torch.equal(found[name], cache), name


def test_each_rank_writes_its_part_only(folder: Path) -> None:
    (alone,) = cache_files(checkpoint_of(stopped(folder, "alone", 1, 1).output.path), 0)
    parts = cache_files(checkpoint_of(stopped(folder, "split", 4, 1).output.path), 0)
    expected = {name: cache.nbytes for name, cache in load_file(alone).items()}
    for part in parts:
        assert {name: 4 * cache.nbytes for name, cache in load_file(part).items()} == expected


def in_format_1(folder: Path, tensor: int) -> None:
    """Rewrite a checkpoint of one data-parallel rank as earlier versions wrote it: one file with all features."""
    parts = cache_files(folder, 0)
    assert len(parts) == tensor
    save_file(complete_caches(folder, data=1), folder / "caches_data_rank_00000.safetensors")
    for part in parts:
        part.unlink()
    manifest = json.loads((folder / FILE).read_text().split("\n")[0])
    files = {name: entry for name, entry in manifest["files"].items() if not name.startswith("caches")}
    (written,) = cache_files(folder, 0)
    files[written.name] = [written.stat().st_size, digest_of(written)]
    text = json.dumps(manifest | {"format": 1, "files": files})
    (folder / FILE).write_text(f"{text}\n{xxhash.xxh3_128(text.encode()).hexdigest()}\n")


def test_checkpoints_of_earlier_versions_are_resumed(folder: Path) -> None:
    expected = make_run(folder, "expected", tensor=2, steps=10)
    on_ranks(expected, 2)
    run = stopped(folder, "old", 2, 1)
    in_format_1(checkpoint_of(run.output.path), tensor=2)
    on_ranks(run, 2)
    expect_bitwise(run, expected)
