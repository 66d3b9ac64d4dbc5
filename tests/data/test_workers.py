from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from operator import neg
from pathlib import Path

import pytest

from megatron_style.base.errors import UserError
from megatron_style.data.preparation.workers import worker_pool

ROOT = Path(__file__).resolve().parents[2]


def slow_when_even(number: int) -> int:
    time.sleep(0.02 * (number % 2 == 0))
    return -number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise UserError("three")
    return number


def die(_: int) -> None:
    os._exit(1)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    with worker_pool(workers) as pool:
        assert list(pool.map(slow_when_even, range(10))) == [-n for n in range(10)]
        assert list(pool.map(neg, [])) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_items_are_drawn_as_they_are_needed(workers: int) -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for number in range(1000):
            drawn += 1
            yield number

    with worker_pool(workers) as pool:
        next(iter(pool.map(neg, items())))
        assert drawn <= 2 * workers


@pytest.mark.parametrize("workers", [1, 2])
def test_a_users_error_in_a_worker_is_the_commands_error(workers: int) -> None:
    with pytest.raises(UserError, match="three"), worker_pool(workers) as pool:
        list(pool.map(fail_at_three, range(100)))


def test_a_worker_that_dies_is_an_error_of_one_line() -> None:
    with pytest.raises(ChildProcessError, match="a worker process died"), worker_pool(2) as pool:
        list(pool.map(die, range(3)))


def test_mpi_is_not_started_outside_mpirun() -> None:
    code = "import sys, operator; from megatron_style.data.preparation.workers import worker_pool\n"
    code += "with worker_pool(2) as pool: list(pool.map(operator.neg, range(2)))\n"
    code += "sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        "import os, time\n"
        "from megatron_style.data.preparation.workers import worker_pool\n"
        "def pid(_):\n"
        "    time.sleep(0.2)\n"
        "    return os.getpid()\n"
        "with worker_pool(2) as pool:\n"
        "    print(*set(pool.map(pid, range(6))), flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [Path("/proc") / pid for pid in parent.stdout.readline().split()]
        assert workers
        assert all(worker.exists() for worker in workers)
        parent.kill()
    deadline = time.monotonic() + 60
    while any(worker.exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.exists() for worker in workers)
