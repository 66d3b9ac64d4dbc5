"""A trainer for Shortformer language models on DeepSpeed."""

from __future__ import annotations

from typing import NoReturn

from megatron_style.base import leave_at_ctrl_c

__version__ = "0.1.0"


def start(command: str) -> NoReturn:
    """Run a command, as `python -m megatron_style.COMMAND` does it. It is imported by its name, so that Ctrl-C during
    the seconds of its imports ends it in one line."""
    leave_at_ctrl_c()
    from megatron_style.__main__ import run_named

    run_named(command)
