"""The progress of a long pass: a bar on a terminal, elsewhere one line at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from megatron_style.base.command import log
from megatron_style.base.errors import one_line


@contextmanager
def byte_progress(label: str, total: int | None, *, quiet_seconds: float = 0) -> Iterator[Callable[[int], object]]:
    """Yield the function to call with the number of bytes just done. Nothing is shown of a pass that takes less than
    `quiet_seconds`."""
    if sys.stderr.isatty():
        label = one_line(label)
        with tqdm(
            total=total,
            desc=label,
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            dynamic_ncols=True,
            delay=quiet_seconds,
        ) as bar:
            yield bar.update
        return
    done = 0
    begin = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done
        done += count

    yield advance
    seconds = time.monotonic() - begin
    if seconds >= quiet_seconds:
        log(f"{label}: {done / 1e6:.1f} MB in {seconds:.1f} s")
