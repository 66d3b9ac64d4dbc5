"""The run files and ds_configs that come with the package. In a checkout they are next to it, in a wheel inside it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megatron_style.base.errors import UserError

FOLDERS = ("run_configs", "ds_configs")
_PACKAGE = Path(__file__).parents[1]


def shipped_file(name: str) -> Path:
    """Return the path of `run_configs/NAME.yaml` or `ds_configs/NAME.json` in this installation."""
    root = _PACKAGE if (_PACKAGE / FOLDERS[0]).is_dir() else _PACKAGE.parent
    return root / name


def find_file(path: Path, expected: str) -> Path:
    """Return the path or, if no such file exists and it names a shipped file, the shipped file's path."""
    with suppress(FileNotFoundError):
        path.stat()
        return path
    tried = ""
    if len(path.parts) == 2 and path.parts[0] in FOLDERS:
        shipped = shipped_file(str(path))
        if shipped.is_file():
            return shipped
        tried = f", and {path.name} is not in {shipped.parent} either"
    raise UserError(f"{path}: no such file{tried}; {expected} is expected")
