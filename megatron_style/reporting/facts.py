"""What a run is called, what it is and how it ended, as its folder says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePath

from megatron_style.base.json_text import parse_json
from megatron_style.base.launches import Launch, read_launches
from megatron_style.base.run_folder import RunFolder
from megatron_style.base.units import COUNT, NOT_RECORDED

_LONGEST_NAME = 28  # characters; longer ones would fill tables and legends
_ENDS = ("finished", "stopped", "failed", "diverged")


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its own, with as many of its parents as make it differ from the others; long ones
    without their middle, if they still differ then."""
    names = [_own_tail(folder, [other for other in folders if other != folder]) for folder in folders]
    shorter = [_shorter(name) for name in names]
    return shorter if len(set(shorter)) == len(shorter) else names


def _own_tail(folder: Path, others: Sequence[Path]) -> str:
    """Return the shortest end of the folder's path that no other folder's path has."""
    parts = folder.parts
    tails = (parts[-count:] for count in range(1, len(parts)))
    own = (tail for tail in tails if all(other.parts[-len(tail) :] != tail for other in others))
    return "/".join(next(own, parts))


def _shorter(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…{name[-_LONGEST_NAME // 2 + 1 :]}"


@dataclass(frozen=True)
class _Ending:
    """How a launch ended."""

    state: str
    step: int
    time: str


@dataclass(frozen=True)
class Facts:
    """The facts of a run in words."""

    state: str = NOT_RECORDED
    began: str = NOT_RECORDED
    parameters: str = NOT_RECORDED
    corpus: str = NOT_RECORDED
    ranks: str = NOT_RECORDED
    precision: str = NOT_RECORDED
    commit: str = NOT_RECORDED


def read_facts(folder: Path, settings: Mapping[str, str], *, last_step: int) -> Facts:
    launches = read_launches(RunFolder(folder).launches)
    last = launches[-1] if launches else Launch()
    zero = "" if last.zero is None else f", ZeRO {last.zero}"
    return Facts(
        state=_state(folder, last, last_step),
        began=_date(launches[0].began if launches else None),
        parameters=COUNT.text(last.parameters),
        corpus=_corpus(last, settings),
        ranks=_ranks(last),
        precision=f"{last.precision}{zero}" if last.precision else NOT_RECORDED,
        commit=last.commit or NOT_RECORDED,
    )


def _state(folder: Path, launch: Launch, step: int) -> str:
    of = "" if launch.total_steps is None else f" of {launch.total_steps:,}"
    ending = _read_ending(folder, launch)
    if ending is None:
        written = datetime.fromtimestamp(RunFolder(folder).metrics.stat().st_mtime, UTC)
        return f"not ended: step {step:,}{of}, last record {_date(written.isoformat())}"
    return ending.state if ending.state == "finished" else f"{ending.state} at step {ending.step:,}{of}"


def _read_ending(folder: Path, launch: Launch) -> _Ending | None:
    """Return the end of the last launch; None if it has not ended, was killed or did not record it. A launch that was
    killed leaves the status of the one before it, which is older than its beginning."""
    try:
        status = parse_json(RunFolder(folder).status.read_text(encoding="utf-8"))
        ending = _Ending(status["state"], int(status["step"]), str(status["time"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if ending.state not in _ENDS or (launch.began is not None and ending.time < launch.began):
        return None
    return ending


def _date(moment: str | None) -> str:
    try:
        return datetime.fromisoformat(moment or "").strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return NOT_RECORDED


def _corpus(launch: Launch, settings: Mapping[str, str]) -> str:
    """Return the folders of the training text; a run file names a store as folder/train."""
    named = (value for key, value in settings.items() if key == "data.train" or _is_source(key))
    names = dict.fromkeys(PurePath(value).parent.name or value for value in named)
    tokens = [] if launch.corpus_tokens is None else [f"{COUNT.text(launch.corpus_tokens)} tokens"]
    return ", ".join([*([" + ".join(names)] if names else []), *tokens]) or NOT_RECORDED


def _is_source(key: str) -> bool:
    return key.startswith("data.train.") and key.endswith(".path")


def _ranks(launch: Launch) -> str:
    if launch.data is None or launch.tensor is None:
        return NOT_RECORDED
    grid = f" ({launch.data} data x {launch.tensor} tensor)" if launch.tensor > 1 else ""
    device = f", {launch.device}" if launch.device else ""
    return f"{launch.data * launch.tensor}{grid}{device}"
