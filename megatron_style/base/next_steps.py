"""What people do with a run when it is finished."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from megatron_style.base.run_folder import RunFolder


def next_steps(folder: Path, held_out: Path) -> str:
    """Say where the model of a finished run is, and name the three commands that people need next."""
    run = quote(str(folder))
    model = quote(str(RunFolder(folder).model))
    return (
        f"the model is in {RunFolder(folder).model}; next:\n"
        f"  python -m megatron_style.evaluate {model} --data {quote(str(held_out))}\n"
        f"  python -m megatron_style.generate {model} --interactive\n"
        f"  python -m megatron_style.report {run}"
    )
