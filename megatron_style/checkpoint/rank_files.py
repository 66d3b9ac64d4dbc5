"""The files that one rank writes of a checkpoint: at once, or from a copy in host memory while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Generic, TypeVar, cast

from safetensors.torch import save_file
from torch import Tensor

T = TypeVar("T")


class HostBuffer:
    """A file in host memory. Its memory is kept: the next content of the same size allocates nothing."""

    def __init__(self) -> None:
        self._memory = bytearray()
        self._size = 0

    def clear(self) -> None:
        self._size = 0

    def write(self, data: memoryview) -> int:
        kept = min(len(data), len(self._memory) - self._size)
        with memoryview(self._memory) as memory:
            memory[self._size : self._size + kept] = data[:kept]
        self._memory += data[kept:]
        self._size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch's writer asks for it."""

    def write_to(self, path: Path) -> None:
        with memoryview(self._memory) as memory, path.open("wb") as file:
            file.write(memory[: self._size])


class RankFiles:
    def __init__(self, folder: Path, buffers: dict[str, HostBuffer] | None) -> None:
        """With `buffers`, copy what is given, and write it when `write` is called; without them write at once."""
        self.folder = folder
        self.names: list[str] = []
        self._buffers = buffers
        self._later: list[Callable[[], None]] = []

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a file to write into."""
        self.names.append(name)
        if self._buffers is None:
            with (self.folder / name).open("wb") as file:
                yield file
            return
        buffer = self._buffers.setdefault(name, HostBuffer())
        buffer.clear()
        yield cast(IO[bytes], buffer)
        self.do(partial(buffer.write_to, self.folder / name))

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Write tensors that nothing else will change, so that those on the host need no copy."""
        self.names.append(name)
        on_host = {key: tensor.cpu() for key, tensor in tensors.items()}
        self.do(partial(save_file, on_host, self.folder / name, metadata=metadata))

    @contextmanager
    def written_or_removed(self) -> Iterator[None]:
        """Remove what this rank has written if the block fails: a full disk does not stay full because of it."""
        try:
            yield
        except (OSError, RuntimeError):  # torch's writer raises no OSError on a full disk
            for name in self.names:
                (self.folder / name).unlink(missing_ok=True)
            raise

    def do(self, task: Callable[[], None]) -> None:
        """Do something that may wait for the disk: at once, or when `write` is called."""
        if self._buffers is None:
            task()
        else:
            self._later.append(task)

    def write(self) -> None:
        """Write what is in memory only."""
        for task in self._later:
            task()
        self._later.clear()


class Background(Generic[T]):
    """At most one task in another thread. What it raises is raised in this one, by `wait`."""

    def __init__(self) -> None:
        self._result: Future[T] | None = None

    def start(self, task: Callable[[], T]) -> None:
        assert self._result is None, "the task before has not been waited for"
        self._result = Future()
        # A daemon: when the run fails elsewhere, a writer that waits for a lost rank must not keep the process.
        threading.Thread(target=_run, args=(task, self._result), name="checkpoint", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._result is not None and self._result.done()

    def wait(self) -> T | None:
        """Return the result of the task; None if there is no task."""
        result = self._result
        self._result = None
        return None if result is None else result.result()


def _run(task: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(task())
    except BaseException as error:  # it belongs to the thread that waits
        result.set_exception(error)
