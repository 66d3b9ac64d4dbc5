"""A parallel map with results in the order of the items, and only a few items in flight.

The same code runs on one process, a pool of processes, and the ranks of an `mpirun`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Protocol, TypeVar, cast

from megatron_style.base.launchers import mpi_world_size

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerPool(Protocol):
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield `function(item)` for each item, in order. Items are taken as workers become free: memory stays flat."""


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def worker_pool(workers: int) -> Iterator[WorkerPool]:
    """Yield a pool. Under `mpirun` the ranks are the workers: rank 0 runs the body, the others serve it and exit."""
    if mpi_world_size() > 1:
        with _mpi_executor() as executor:
            yield _ExecutorPool(executor, in_flight=2 * mpi_world_size())
    elif workers == 1:
        yield _ThisProcess()
    else:
        with ProcessPoolExecutor(workers, initializer=_follow_the_parent) as executor:
            try:
                yield _ExecutorPool(executor, in_flight=2 * workers)
            except BrokenProcessPool as error:
                raise ChildProcessError("a worker process died (out of memory?); try fewer --workers") from error


class _ThisProcess:
    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        return map(function, items)


class _ExecutorPool:
    def __init__(self, executor: Executor, *, in_flight: int) -> None:
        self._executor = executor
        self._in_flight = in_flight

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        # After an error the items in flight are finished: cancelling them hangs the executor of Python 3.11.2.
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(self._executor.submit(function, item))
            if len(pending) >= self._in_flight:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def _mpi_executor() -> Iterator[Executor]:
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is not None:
            yield cast(Executor, executor)
            return
    sys.exit(0)  # another rank, after rank 0 is done


def _follow_the_parent() -> None:
    """Leave interrupts to the parent, and end when it is killed: a worker that waits for work would wait for good."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_after, args=(parent_process(),), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
