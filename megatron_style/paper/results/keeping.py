"""Keeps the records of a run next to the results: small, and without the paths of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_style.base.events import Event, SampleEvent, TrainEvent, ValidEvent, line_of, read_events
from megatron_style.base.run_folder import RUN_FILE, RunFolder
from megatron_style.paper.experiment import Experiment
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.work.jobs import ORIGIN
from megatron_style.paper.work.sharing import TAKEN

_MOST_LINES = 60  # training events that are kept per run
_KEPT = (RUN_FILE, ORIGIN, TAKEN)


def keep(experiment: Experiment, spec: RunSpec, results: Path) -> None:
    """Copy the records of a run to the results. Paths in them are relative to the folder of the experiment."""
    run = experiment.folder(spec)
    target = results / "runs" / run.name
    (target / "evaluations").mkdir(parents=True)
    files = [run / name for name in _KEPT if (run / name).is_file()]
    for file in (*files, *sorted((run / "evaluations").glob("*.json"))):
        text = file.read_text(encoding="utf-8").replace(f"{experiment.output}/", "")
        (target / file.relative_to(run)).write_text(text, encoding="utf-8")
    lines = "".join(line_of(event) + "\n" for event in thinned(list(read_events(RunFolder(run).metrics))))
    RunFolder(target).metrics.write_text(lines, encoding="utf-8")


def thinned(events: Sequence[Event]) -> list[Event]:
    """Return the events without samples, without losses by position, and with only some of training, among them the
    last, which has all totals."""
    trained = [event.step for event in events if isinstance(event, TrainEvent)]
    every = -(-len(trained) // _MOST_LINES)
    kept = {*trained[::-1][:: every or 1]}
    found: list[Event] = []
    for event in events:
        if isinstance(event, SampleEvent) or (isinstance(event, TrainEvent) and event.step not in kept):
            continue
        found.append(replace(event, by_position=None) if isinstance(event, ValidEvent) else event)
    return found
