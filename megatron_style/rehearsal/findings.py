"""Judge a rehearsal: which stages ran, and whether they fit into memory, as planned. Without the engine, which takes
seconds to import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_style.base.command import Finding
from megatron_style.base.units import size
from megatron_style.config.run import RunConfig
from megatron_style.data.store import store_files
from megatron_style.rehearsal.requirements import judge_run

if TYPE_CHECKING:
    from megatron_style.rehearsal.rehearsal import Rehearsal, StageRehearsal


def judge_rehearsal(run: RunConfig, rehearsal: Rehearsal) -> Iterator[Finding]:
    if rehearsal.failure is not None:
        passed = f"{len(rehearsal.stages)} of {len(run.stages)} stages passed before"
        yield Finding("FAIL", "rehearsal", f"{rehearsal.failure}; {passed}")
    for rehearsed in rehearsal.stages:
        yield judge_stage(rehearsed, rehearsal.usable)
    extent = "shapes, devices and memory are rehearsed; numbers, speed and messages between ranks are not"
    yield Finding("ok", f"rank {rehearsal.rank}", f"one of {rehearsal.ranks:,}: {extent}")
    yield judge_corpus(run, rehearsal.ranks)


def judge_stage(rehearsed: StageRehearsal, usable: float) -> Finding:
    subject = f"stage {rehearsed.stage.index + 1}"
    peaks = f"peak {size(rehearsed.peak)}, planned {size(rehearsed.planned)}"
    if rehearsed.remedy is not None:
        return Finding("FAIL", subject, f"{peaks}: more than the {size(usable)} that are usable; {rehearsed.remedy}")
    return Finding("ok", subject, f"{peaks}, usable {size(usable)}")


def judge_corpus(run: RunConfig, world: int) -> Finding:
    """Without a corpus, only what the rehearsal itself needs has been checked."""
    files = [path for prefix in run.data.prefixes for path in store_files(prefix)]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        assumed = "token ids follow Zipf's law, and the number of steps is not checked"
        return Finding("WARN", "run", f"cannot read {', '.join(missing)}; {assumed}")
    return judge_run(run, world)


def compare_with_plan(rehearsal: Rehearsal) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table with a column for each stage that ran."""
    stages = rehearsal.stages
    header = [f"rank {rehearsal.rank} of {rehearsal.ranks}", *(f"stage {each.stage.index + 1}" for each in stages)]
    return header, [
        ["forward and backward", *(size(each.passes) for each in stages)],
        ["update", *(size(each.update) for each in stages)],
        ["rehearsed peak", *(size(each.peak) for each in stages)],
        ["planned peak", *(size(each.planned) for each in stages)],
        ["rehearsed against planned", *(f"{each.peak / each.planned - 1:+.1%}" for each in stages)],
    ]
