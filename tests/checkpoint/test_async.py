"""A checkpoint that is written in the background is the one that a pause would have written, or a loud error."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_style.base.errors import Diverged, RunFailed, Stopped
from megatron_style.checkpoint.manifest import read_manifest
from megatron_style.checkpoint.rank_files import HostBuffer, RankFiles
from megatron_style.config.run import RunConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.killing import complete_steps
from tests.support.models import CLUSTERS, ROUTED
from tests.support.resuming import age_event_files, expect_bitwise, make_run, metrics, on_ranks, train_until

write = RankFiles.write
SLOW_SECONDS = 0.3  # in which a few steps are trained
ADAMW = {"name": "adamw", "weight_decay": 0.1, "learning_rate": {"peak": 0.01}}
ROUTING = {**ROUTED, "routing": CLUSTERS}
OUTPUT = {"save_every": 2, "keep_last": 9, "save_async": True}


def slowly(files: RankFiles) -> None:
    time.sleep(SLOW_SECONDS)
    write(files)


def train_with(run: RunConfig, writer: Callable[[RankFiles], None], halt_after: int | None = None) -> None:
    with patch.object(RankFiles, "write", writer):
        train_until(run, halt_after)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"zero": 3, "data": 2, "half": True, "optimizer": ADAMW},
        pytest.param({"zero": 1, "tensor": 2}, marks=pytest.mark.sweep),
        pytest.param({"zero": 0, "data": 2, "optimizer": ADAMW}, marks=pytest.mark.sweep),
        pytest.param({"zero": 1, "data": 2, "half": True, "optimizer": ADAMW}, marks=pytest.mark.sweep),
        pytest.param({"zero": 2, "tensor": 2, "data": 2, "half": True}, marks=pytest.mark.sweep),
        pytest.param({"zero": 3, "tensor": 2, "data": 2}, marks=pytest.mark.sweep),
        pytest.param({"zero": 2, "data": 2, "model": ROUTING, "optimizer": ADAMW}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_files_are_those_of_a_pause(folder: Path, settings: dict[str, Any]) -> None:
    """Also if they are written when the steps after them have been trained."""
    world = settings.get("tensor", 1) * settings.get("data", 1)
    paused = make_run(folder, "paused", steps=6, output=OUTPUT | {"save_async": False}, **settings)
    run_ranks(world, train_until, paused, None)
    run = make_run(folder, "run", steps=6, output=OUTPUT, **settings)
    run_ranks(world, train_with, run, slowly)
    for step in (2, 3, 4, 6):
        expected = paused.output.path / "checkpoints" / f"global_step{step}"
        found = run.output.path / "checkpoints" / f"global_step{step}"
        manifest = read_manifest(expected)
        assert read_manifest(found).files == manifest.files
        for name in manifest.files:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), (step, name)
    expect_bitwise(run, paused)
    saves = metrics(run, "save")
    assert [event["checkpoint"] for event in saves] == [2, 3, 4, 6]
    assert all(event["write_seconds"] > event["stall_seconds"] for event in saves)


class OneAtATime:
    """Writes slowly, and fails if a second thread writes meanwhile, or if the training has written anything."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def __call__(self, files: RankFiles) -> None:
        assert self._busy.acquire(blocking=False), "two saves are in flight"
        assert not any(files.folder.iterdir()), "the training has waited for the disk"
        slowly(files)
        self._busy.release()


def expect_one_at_a_time(run: RunConfig) -> None:
    writer = OneAtATime()
    train_with(run, lambda files: writer(files))


@pytest.mark.slow
def test_at_most_one_is_in_flight(folder: Path) -> None:
    """A save that comes before the last one is written waits for it."""
    run = make_run(folder, steps=6, output=OUTPUT | {"save_every": 1})
    run_ranks(1, expect_one_at_a_time, run)
    assert complete_steps(run.output.path / "checkpoints") == [6, 5, 4, 3, 2, 1]
    assert max(event["stall_seconds"] for event in metrics(run, "save")) > SLOW_SECONDS / 2


def fail_at(step: int) -> Callable[[RankFiles], None]:
    def fail(files: RankFiles) -> None:
        slowly(files)
        if files.folder.name == f"global_step{step}.partial" and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fail


def expect_failure(run: RunConfig, message: str, writer: Callable[[RankFiles], None]) -> None:
    with pytest.raises(RunFailed, match=message):
        train_with(run, writer)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_write_that_fails_on_one_rank_ends_the_run(folder: Path, world: int) -> None:
    """At the next step, or at the end for the last one; what was complete stays, and the run can be resumed."""
    run = make_run(folder, data=world, steps=6, output=OUTPUT | {"heartbeat_timeout": 5.0})
    message = r"step 4 could not be written \(.*No space left on device\); the checkpoint of step 3 is unchanged"
    run_ranks(world, expect_failure, run, message, fail_at(4))
    assert complete_steps(run.output.path / "checkpoints") == [3, 2]
    assert not [*run.output.path.glob("checkpoints/*.partial")], "what was written takes up space"
    undisturbed = make_run(folder, "undisturbed", data=world, steps=6, output=OUTPUT)
    on_ranks(undisturbed, world)
    age_event_files(run)
    message = r"step 6 could not be written \(.*No space left on device\); the checkpoint of step 4 is unchanged"
    run_ranks(world, expect_failure, run, message, fail_at(6))
    assert not (run.output.path / "model").exists()
    on_ranks(run, world)
    expect_bitwise(run, undisturbed)


def stop_in_flight(run: RunConfig) -> None:
    def signalled(files: RankFiles) -> None:
        if files.folder.name == "global_step2.partial":
            os.kill(os.getpid(), signal.SIGTERM)
        slowly(files)

    with patch.object(RankFiles, "write", signalled), pytest.raises(Stopped):
        train(run)


@pytest.mark.slow
def test_a_signal_waits_for_the_save_in_flight_and_for_its_own(folder: Path) -> None:
    run = make_run(folder, steps=12, output=OUTPUT)
    undisturbed = make_run(folder, "undisturbed", steps=12, output=OUTPUT)
    on_ranks(undisturbed, 1)
    run_ranks(1, stop_in_flight, run)
    last = metrics(run)[-1]["step"]
    assert complete_steps(run.output.path / "checkpoints")[0] == last < 12
    assert [event["checkpoint"] for event in metrics(run, "save")][-1] == last
    on_ranks(run, 1)
    expect_bitwise(run, undisturbed)


def diverge_in_flight(run: RunConfig) -> None:
    def fail(*_: Any) -> None:
        if (run.output.path / "checkpoints" / "global_step2.partial").exists():
            raise Diverged("the test asked for it")

    with patch("megatron_style.train.due", fail_or(fail)), pytest.raises(Diverged):
        train_with(run, slowly)


def fail_or(check: Callable[..., None]) -> Callable[[int, int | None], bool]:
    from megatron_style.train import due

    def checked(step: int, every: int | None) -> bool:
        check()
        return due(step, every)

    return checked


@pytest.mark.slow
def test_a_run_that_diverges_completes_the_save_in_flight(folder: Path) -> None:
    run = make_run(folder, steps=6, output=OUTPUT)
    run_ranks(1, diverge_in_flight, run)
    assert complete_steps(run.output.path / "checkpoints") == [2]


def test_the_memory_of_a_copy_is_used_again() -> None:
    data = memoryview(os.urandom(2**20))
    buffer = HostBuffer()
    buffer.write(data)
    buffer.clear()
    tracemalloc.start()
    for part in (data[:1000], data[1000:]):
        assert buffer.write(part) == len(part)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**16


@pytest.mark.parametrize("sizes", [(10, 20), (20, 10), (0, 5), (5, 0)])
def test_a_copy_holds_the_last_content(tmp_path: Path, sizes: tuple[int, int]) -> None:
    buffer = HostBuffer()
    for number, size in enumerate(sizes):
        buffer.clear()
        content = bytes([number]) * size
        buffer.write(memoryview(content[: size // 2]))
        buffer.write(memoryview(content[size // 2 :]))
    buffer.write_to(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
