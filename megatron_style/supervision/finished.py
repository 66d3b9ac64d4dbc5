"""Recognise a run that is finished, before anything is started."""

from __future__ import annotations

from contextlib import suppress

from megatron_style.base.errors import UserError
from megatron_style.base.run_folder import RunFolder, next_steps
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from megatron_style.config.section import differences
from megatron_style.supervision.record import read_status

# What the grid and the corpus decide, if the run file leaves it open.
_DECIDED = ("model.vocabulary.cutoffs: ", "model.document_end: ", "data.tokens_per_batch: ")
_LEFT_OPEN = (" -> []", " -> null")


def what_is_finished(run: RunConfig) -> str | None:
    """Say that there is nothing left to do, if the last launch of this run has finished and its settings are the same.
    Other settings may mean other stages, so that only the training itself can tell."""
    folder = RunFolder(run.output.path)
    status = read_status(folder.path)
    if status is None or status.state != "finished" or not folder.model.is_dir():
        return None
    with suppress(UserError):
        changes = differences(load_run(folder.run_file).as_data(), run.as_data())
        if all(_is_no_change(change, run) for change in changes):
            held_out = next(iter(run.data.held_out.values()))
            return (
                f"{folder.path}: is finished after {status.step} steps; for more of them change `stages`, for a new "
                f"run choose another output.path\n{next_steps(folder.path, held_out)}"
            )
    return None


def _is_no_change(change: str, run: RunConfig) -> bool:
    if change.startswith(_DECIDED[2]):
        return run.data.tokens_per_update is not None
    return change.startswith("output.") or (change.startswith(_DECIDED) and change.endswith(_LEFT_OPEN))
