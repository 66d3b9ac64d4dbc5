"""Call a function in a process of its own, for what changes the state of its process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def in_child(body: Callable[..., Result], *args: Any) -> Result:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(body, *args).result()
