"""The checkpoints of a run: everything it needs to resume as if it had never stopped.

`checkpoints/global_stepN/` is DeepSpeed's layout plus `caches_*.safetensors`, one for each rank (none if
`output.save_caches` is false), `centroids.safetensors` of a routing model, and `manifest.json`. A checkpoint is written
under another name, flushed to disk, given its manifest, and renamed when all ranks are done; `latest` is updated last.
A kill at any moment thus leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from megatron_style.base.command import log
from megatron_style.base.errors import Diverged, RunFailed, UserError
from megatron_style.base.events import SaveEvent
from megatron_style.base.run_folder import checkpoint_name
from megatron_style.checkpoint.caches import read_caches, write_caches
from megatron_style.checkpoint.draft import Draft, explained, make_folder
from megatron_style.checkpoint.folder import CheckpointFolder
from megatron_style.checkpoint.logical import BUFFERS, LogicalReader, file_of
from megatron_style.checkpoint.manifest import Damaged, Manifest, check_file, optimizer_name, read_manifest
from megatron_style.checkpoint.origin import Origin, Progress, check_same_model
from megatron_style.checkpoint.proof import compared, take_fingerprints
from megatron_style.checkpoint.rank_files import Background, HostBuffer, RankFiles
from megatron_style.config.run import RunConfig
from megatron_style.config.section import differences
from megatron_style.engine.ds_config import read_ds_config
from megatron_style.engine.engine import TrainingEngine
from megatron_style.parallel.collectives import gather_json
from megatron_style.parallel.sharding import layouts_of
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import StageSchedule

_MOVES = ("output.path:", "deepspeed:")  # paths; the content of the ds_config is compared


class CheckpointStore:
    def __init__(self, run: RunConfig, topology: Topology) -> None:
        self._run = run
        self._topology = topology
        self._folder = CheckpointFolder(run.output)
        self._buffers: dict[str, HostBuffer] = {}  # of the files of this rank, from save to save
        self._background: Background[float] = Background()
        self._begun = (0, 0.0)  # step and stall of the save in the background
        self._saved: list[SaveEvent] = []
        self._proven = False  # true after the first save
        # The heartbeat notices a lost rank; a slow disk is no reason to give up.
        timeout = timedelta(days=7)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if run.output.save_async else None

    def origin(self, wanted: int | None = None) -> Origin | None:
        """Return the newest complete checkpoint, or the one of the wanted step, agreed on by all ranks; damaged ones
        are logged and skipped."""
        steps = sorted(self._steps(), reverse=True)
        if wanted is not None:
            steps = self._only(wanted, steps)
        for step in steps:
            folder = self._folder.checkpoint(step)
            problem = self._problem_with(folder)
            if problem is None:
                manifest = read_manifest(folder)
                load = self.restore if wanted is None else self._go_back
                return Origin(self._history(manifest), partial(load, folder, manifest))
            self._folder.damaged.add(step)
            if self._topology.is_first:
                log(f"warning: {folder} is passed over: {problem}")
        if wanted is not None:
            raise UserError(f"--resume-from {wanted}: {folder} is not complete; choose another step")
        if steps:
            raise UserError(
                f"{self._folder.path}: none of its checkpoints is complete; remove them to restart at step 0"
            )
        return None

    def _only(self, wanted: int, steps: list[int]) -> list[int]:
        if wanted not in steps:
            there = f"there are {', '.join(map(str, sorted(steps)))}" if steps else "there are none"
            raise UserError(f"--resume-from {wanted}: {self._folder.path} has no checkpoint of this step; {there}")
        return [wanted]

    def _go_back(self, folder: Path, manifest: Manifest, engine: TrainingEngine, schedule: StageSchedule) -> Progress:
        """Restore an older checkpoint, and set the later ones aside: the next start resumes from it, too."""
        progress = self.restore(folder, manifest, engine, schedule)
        if self._topology.is_first and (later := self._folder.abandon_after(manifest.step)):
            log(f"set aside, to be removed when they are not needed: {', '.join(later)} in {self._folder.path}")
        dist.barrier()
        return progress

    def _history(self, manifest: Manifest) -> tuple[tuple[int, int], ...]:
        """Return the history of the earlier grids, with a new entry if an update has another size now."""
        tokens = self._run.data.tokens_per_batch * self._topology.data.size
        if manifest.history[-1][1] == tokens:
            return manifest.history
        if self._topology.is_first:
            before = manifest.history[-1][1]
            log(
                f"from step {manifest.step} on an update has {tokens} tokens, not {before}, so new lanes are cut; "
                f"--set data.tokens_per_update={before} keeps it"
            )
        return (*(entry for entry in manifest.history if entry[0] < manifest.step), (manifest.step, tokens))

    def restore(self, folder: Path, manifest: Manifest, engine: TrainingEngine, schedule: StageSchedule) -> Progress:
        """Load a checkpoint of this run, which may be in another folder."""
        before = RunConfig.parse(manifest.run, source=str(folder))
        check_same_model(before.model.as_data(), manifest.vocab_size, engine, folder)
        _check_same_optimizer(manifest, self._run, folder)
        _check_same_sources(before, self._run, folder)
        if not schedule.is_at(manifest.step, manifest.place):
            raise UserError(
                f"{folder}: stages or data have changed, so resuming at step {manifest.step} would skip or repeat "
                f"tokens; restore the old settings, or choose another output.path"
            )
        reader = LogicalReader(folder, manifest)
        if self._has_same_layout(manifest, engine):  # each rank needs its own file only
            engine.state.load_flat(reader.flat_groups(self._my_file(manifest.files, engine)))
        else:
            engine.state.load_logical(reader.read)
        engine.state.load_buffers(reader.weight)
        engine.resume(reader.counters())
        self._log_changes(manifest, before)
        caches = read_caches(folder, manifest, engine, schedule, self._topology)
        return Progress(manifest.step, caches, manifest.sound, manifest.losses, manifest.best)

    def _log_changes(self, manifest: Manifest, before: RunConfig) -> None:
        """Log which settings have changed since the checkpoint: this is allowed, but should not go unnoticed."""
        found = differences(before.as_data(), self._run.as_data())
        changes = [change for change in found if not change.startswith(_MOVES)]
        changes += differences(manifest.ds_config, read_ds_config(self._run.deepspeed))
        if changes and self._topology.is_first:
            log(f"changed since step {manifest.step}: {'; '.join(changes)}")

    def _has_same_layout(self, manifest: Manifest, engine: TrainingEngine) -> bool:
        """True if every rank's flat tensors are stored as it would write them: it needs no other rank's file."""
        if manifest.grid != grid_of(engine, self._topology):
            return False
        own = engine.state.fragments()
        is_same = not own or tuple(own) == manifest.fragments.get(self._my_file(manifest.files, engine))
        return all(gather_json(is_same))

    def save(self, engine: TrainingEngine, progress: Progress, schedule: StageSchedule) -> None:
        """Save the state of the run; with output.save_async, copy it, and write it while training continues. Raise what
        went wrong with the save before: at most one is in flight."""
        begin = time.monotonic()
        self._wait()
        with explained(progress.step, self._folder):
            draft = self._draft(engine, progress, schedule)
        complete = partial(self._complete, draft, begin)
        if self._run.output.save_async:
            self._background.start(complete)
            self._begun = (progress.step, time.monotonic() - begin)
        else:
            seconds = complete()
            self._note(progress.step, stall_seconds=seconds, write_seconds=seconds)

    def finished(self, *, wait: bool = False) -> list[SaveEvent]:
        """Return the checkpoints that were completed since the last call, with `wait` also the one that is in flight.
        Raise what went wrong with it."""
        if wait or self._background.is_done:
            self._wait()
        saved = self._saved
        self._saved = []
        return saved

    def _wait(self) -> None:
        write_seconds = self._background.wait()
        if write_seconds is not None:
            step, stall_seconds = self._begun
            self._note(step, stall_seconds=stall_seconds, write_seconds=write_seconds)

    def _note(self, step: int, *, stall_seconds: float, write_seconds: float) -> None:
        event = SaveEvent(step=step, checkpoint=step, stall_seconds=stall_seconds, write_seconds=write_seconds)
        self._saved.append(event)
        self._proven = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave nothing in flight, whatever ends the run: the next start can use the checkpoint. If the save failed, it
        is the cause of any other failure: the other ranks have left because of it."""
        try:
            self._wait()
        except RunFailed as failure:
            if not isinstance(error, Diverged):
                raise
            log(f"error: {failure}")

    def _complete(self, draft: Draft, begin: float) -> float:
        """Complete a checkpoint, and return the seconds since its beginning. May run in another thread."""
        step = draft.manifest.step
        with explained(step, self._folder):
            if self._run.output.save_async:
                make_folder(step, self._folder, self._topology, self._group)
            draft.complete(self._folder, self._group)
        return time.monotonic() - begin

    def _draft(self, engine: TrainingEngine, progress: Progress, schedule: StageSchedule) -> Draft:
        """Write all files of this rank, or copy their content to host memory: then nothing waits for the disk."""
        save_async = self._run.output.save_async
        if not save_async:
            make_folder(progress.step, self._folder, self._topology, self._group)
        files = RankFiles(self._folder.aside(progress.step), self._buffers if save_async else None)
        with files.written_or_removed():
            engine.save(files)
            if self._run.output.save_caches:
                write_caches(files, progress.caches, self._topology)
            if self._topology.data.rank == 0:
                self._write_buffers(files, engine)
        manifest = self._manifest(engine, progress, schedule)
        fragments = engine.state.fragments()
        briefly = self._proven and save_async  # the map of a run does not change
        names = compared(manifest.parameters, progress.step, ways=self._topology.tensor.size, briefly=briefly)
        fingerprints = take_fingerprints(engine.state, fragments, names)
        return Draft(manifest, files, fragments, fingerprints, self._topology)

    def _my_file(self, names: Iterable[str], engine: TrainingEngine) -> str:
        return file_of(
            names,
            zero=engine.zero_stage,
            data_rank=self._topology.data.rank,
            tensor_rank=self._topology.tensor.rank,
        )

    def _manifest(self, engine: TrainingEngine, progress: Progress, schedule: StageSchedule) -> Manifest:
        return Manifest(
            step=progress.step,
            stage=schedule.plan(progress.step - 1).stage.index,
            tokens=schedule.tokens_before(progress.step),
            place=schedule.place_of(progress.step),
            history=schedule.history,
            run=self._run.as_data(),
            ds_config=read_ds_config(self._run.deepspeed),
            vocab_size=engine.model.vocab_size,
            corpus_tokens=schedule.corpus_tokens,
            grid=grid_of(engine, self._topology),
            parameters=layouts_of(engine.model),
            fragments={},
            files={},
            sound=progress.sound,
            losses=progress.losses,
            best=progress.best,
            sources=schedule.sources.tokens_by_name if self._run.data.is_blend else {},
        )

    def _problem_with(self, folder: Path) -> str | None:
        """Describe what is wrong with a checkpoint, if anything. Each rank checks some of the files, and all of them
        return the same verdict."""
        problem = None
        try:
            manifest = read_manifest(folder)
            if folder.name != checkpoint_name(manifest.step):
                raise Damaged(f"its manifest is of step {manifest.step}")
            files = sorted(manifest.files.items())
            for name, (size, digest) in files[dist.get_rank() :: dist.get_world_size()]:
                check_file(folder, name, size, digest)
        except Damaged as damage:
            problem = str(damage)
        return _first_of_all_ranks(problem)

    def _steps(self) -> list[int]:
        """Return the steps that rank 0 finds, so that all ranks see the same."""
        found: list[int] = gather_json(self._folder.steps() if self._topology.is_first else [])[0]
        return found

    def _write_buffers(self, files: RankFiles, engine: TrainingEngine) -> None:
        found = engine.state.full_buffers()
        if found and self._topology.is_first:
            files.save_tensors(BUFFERS, found)


def grid_of(engine: TrainingEngine, topology: Topology) -> dict[str, int]:
    return {"data": topology.data.size, "tensor": topology.tensor.size, "zero": engine.zero_stage}


def _check_same_optimizer(manifest: Manifest, run: RunConfig, folder: Path) -> None:
    before = manifest.optimizer
    now = optimizer_name(run.optimizer.name, read_ds_config(run.deepspeed))
    if before != now:
        raise UserError(
            f"{folder}: was trained with {before}, whose state is of no use to {now}; restore the optimizer, or start "
            f"a new run from an exported model"
        )


def _check_same_sources(before: RunConfig, now: RunConfig, folder: Path) -> None:
    """Refuse other sources than those of the checkpoint, or another order: a lane belongs to one of them."""
    if not before.data.is_blend and not now.data.is_blend:
        return
    names = [[source.label for source in run.data.sources] for run in (before, now)]
    if names[0] != names[1]:
        raise UserError(
            f"{folder}: the sources of its data.train are {', '.join(names[0])}, not {', '.join(names[1])}; restore "
            f"their names and order, or choose another output.path"
        )


def _first_of_all_ranks(problem: str | None) -> str | None:
    return next((message for message in gather_json(problem) if message), None)
