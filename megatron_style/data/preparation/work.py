"""The folder in which a corpus is prepared. An interrupted preparation resumes there, after the last input file that is
on record."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.base.files import put_in_place, write_atomic
from megatron_style.base.json_text import parse_json

SAVE_SECONDS = 10.0
_LOCK_FILE = "lock"
_STATE_SUFFIX = ".state.json"
SCRATCH_PREFIX = "provisional."  # of files that are not part of the corpus


@dataclass
class Work:
    """A folder with the progress of each pass over the input files."""

    folder: Path
    save_seconds: float = SAVE_SECONDS
    _saved: float = field(default_factory=time.monotonic)

    def state(self, name: str) -> dict[str, Any] | None:
        """Return the last state of a pass, or None if it has to begin."""
        with suppress(OSError, ValueError):
            state = parse_json((self.folder / f"{name}{_STATE_SUFFIX}").read_bytes())
            return state if isinstance(state, dict) else None
        return None

    def is_due(self) -> bool:
        """True if the last state is so old that another should be saved."""
        return time.monotonic() - self._saved >= self.save_seconds

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        write_atomic(self.folder / f"{name}{_STATE_SUFFIX}", json.dumps(state))
        self._saved = time.monotonic()

    @property
    def has_state(self) -> bool:
        return any(self.folder.glob(f"*{_STATE_SUFFIX}"))

    def finish(self) -> None:
        """Remove what is not part of the corpus."""
        scratch = self.folder.glob(f"{SCRATCH_PREFIX}*")
        for path in [*self.folder.glob(f"*{_STATE_SUFFIX}"), *scratch, self.folder / _LOCK_FILE]:
            path.unlink(missing_ok=True)


@contextmanager
def work_folder(output: Path, identity: Mapping[str, Any], *, save_seconds: float = SAVE_SECONDS) -> Iterator[Work]:
    """Yield the folder next to `output` that replaces it when the body is done. A killed or interrupted body leaves it
    for the next call with the same identity; any other error removes it, and so does another call that succeeds."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = output.with_name(f".{output.name}.partial.{digest}")
    output.parent.mkdir(parents=True, exist_ok=True)
    is_own = not folder.is_dir()
    try:
        folder.mkdir(exist_ok=True)
        with _locked(folder) as is_own:
            if not is_own:
                raise UserError(f"--output {output}: another process is writing it; wait, or name another folder")
            work = Work(folder, save_seconds)
            if work.has_state:
                log(f"{output}: resuming an interrupted preparation")
            yield work
            work.finish()
            put_in_place(folder, output)
        _remove_abandoned(output)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and Work(folder).has_state:
            log(f"{output}: the work on complete input files is kept; the same command resumes it")
        elif is_own:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Yield True while the folder is locked by this call, or False if it is locked by another one."""
    with (folder / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _remove_abandoned(output: Path) -> None:
    """Remove what interrupted preparations of this output left, if it is now made from something else."""
    for folder in output.parent.glob(f".{glob.escape(output.name)}.partial.*"):
        with suppress(OSError), _locked(folder) as is_locked:
            if is_locked:
                shutil.rmtree(folder, ignore_errors=True)
