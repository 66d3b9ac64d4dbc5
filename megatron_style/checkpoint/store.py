"""The checkpoints of a run: everything it needs to resume as if it had never stopped.

`checkpoints/global_stepN/` is DeepSpeed's layout plus `caches_*.safetensors`, one for each rank (none if
`output.save_caches` is false), `centroids.safetensors` of a routing model, and `manifest.json`. A checkpoint is written
under another name, flushed to disk, given its manifest, and renamed when all ranks are done; `latest` is updated last.
A kill at any moment thus leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_style.base.command import log
from megatron_style.base.errors import RunFailed, UserError
from megatron_style.base.files import atomic_file, sync
from megatron_style.base.run_folder import RunFolder, checkpoint_name, step_of
from megatron_style.checkpoint.logical import BUFFERS, LogicalReader, file_of
from megatron_style.checkpoint.manifest import (
    FILE,
    Damaged,
    Manifest,
    check_file,
    digest_of,
    gap,
    optimizer_name,
    read_manifest,
)
from megatron_style.checkpoint.origin import Origin, Progress, check_same_model
from megatron_style.checkpoint.proof import difference
from megatron_style.config.model import ModelConfig
from megatron_style.config.run import RunConfig
from megatron_style.config.section import differences
from megatron_style.engine.ds_config import read_ds_config
from megatron_style.engine.engine import TrainingEngine
from megatron_style.model.memory import Memory, memory_of
from megatron_style.parallel.collectives import gather_json
from megatron_style.parallel.sharding import Fragment, layouts_of
from megatron_style.parallel.topology import Axis, Topology
from megatron_style.schedule.stages import Stage, StageSchedule

_ASIDE = ".partial"
_REMOVED = ".removed"
_MOVES = ("output.path:", "deepspeed:")  # paths; the content of the ds_config is compared


class CheckpointStore:
    def __init__(self, run: RunConfig, topology: Topology) -> None:
        self._run = run
        self._topology = topology
        self._run_folder = RunFolder(run.output.path)
        self._folder = self._run_folder.checkpoints
        self._damaged: set[int] = set()  # steps whose checkpoints were skipped, and not written again since

    def newest(self) -> Origin | None:
        """Return the newest complete checkpoint, agreed on by all ranks; damaged ones are logged and skipped."""
        steps = sorted(self._steps(), reverse=True)
        for step in steps:
            folder = self._run_folder.checkpoint(step)
            problem = self._problem_with(folder)
            if problem is None:
                manifest = read_manifest(folder)
                return Origin(self._history(manifest), partial(self.restore, folder, manifest))
            self._damaged.add(step)
            if self._topology.is_first:
                log(f"warning: {folder} is passed over: {problem}")
        if steps:
            raise UserError(f"{self._folder}: none of its checkpoints is complete; remove them to restart at step 0")
        return None

    def _history(self, manifest: Manifest) -> tuple[tuple[int, int], ...]:
        """Return the history of the earlier grids, with a new entry if an update has another size now."""
        tokens = self._run.data.tokens_per_batch * self._topology.data.size
        if manifest.history[-1][1] == tokens:
            return manifest.history
        if self._topology.is_first:
            log(f"from step {manifest.step} on an update has {tokens} tokens, not {manifest.history[-1][1]}: new lanes")
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
            engine.load_flat(reader.flat_groups(self._my_file(manifest.files, engine)))
        else:
            engine.load_logical(reader.read)
        engine.load_buffers(reader.weight)
        engine.resume(reader.counters())
        self._log_changes(manifest, before)
        caches = self._read_caches(folder, manifest, engine, schedule)
        return Progress(manifest.step, caches, manifest.sound, manifest.losses)

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
        own = engine.fragments()
        is_same = not own or tuple(own) == manifest.fragments.get(self._my_file(manifest.files, engine))
        return all(gather_json(is_same))

    def save(self, engine: TrainingEngine, progress: Progress, schedule: StageSchedule) -> None:
        try:
            self._save(engine, progress, schedule)
        except RunFailed:
            raise
        except (OSError, RuntimeError) as error:  # torch's writer raises no OSError on a full disk
            reason = str(error).split("\n")[0][:200]
            raise RunFailed(
                f"the checkpoint of step {progress.step} could not be written ({reason}); {self._what_stays()}: "
                f"free some disk space and start again"
            ) from error

    def _save(self, engine: TrainingEngine, progress: Progress, schedule: StageSchedule) -> None:
        folder = self._run_folder.checkpoint(progress.step)
        aside = folder.with_name(folder.name + _ASIDE)
        if self._topology.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
        dist.barrier()
        engine.save(self._folder, aside.name)
        if self._run.output.save_caches:
            self._write_caches(aside, progress.caches)
        if self._topology.data.rank == 0:
            self._write_buffers(aside, engine)
        dist.barrier()  # all files have been written
        parts = gather_json(self._describe(aside, engine))
        manifest = self._manifest(parts, engine, progress, schedule)
        self._prove(aside, manifest, engine)
        if self._topology.is_first:
            manifest.write(aside)
            sync(aside / FILE)
            sync(aside)
            if folder.exists():  # the run was reset to an earlier step by hand
                self._remove(folder)
            aside.rename(folder)
            self._point_to(folder.name)
            self._prune(progress.step, sound=progress.sound)
        dist.barrier()

    def _prove(self, folder: Path, manifest: Manifest, engine: TrainingEngine) -> None:
        """Compare the written files with the engine's weights; a checkpoint that differs never gets its name."""
        own_problem = difference(folder, manifest, engine, self._my_file(manifest.files, engine))
        if self._topology.is_first:
            own_problem = own_problem or gap(manifest)
        problem = _first_of_all_ranks(own_problem)
        if problem is None:
            return
        if self._topology.is_first:
            self._sweep()
        raise RunFailed(
            f"the checkpoint of step {manifest.step} would be wrong, so it was not kept: {problem}; "
            f"{self._what_stays()}: remove unusual settings from {self._run.deepspeed or 'the run file'}, and report it"
        )

    def _what_stays(self) -> str:
        """Name the checkpoint from which the run can resume."""
        steps = self._run_folder.steps()
        return f"the checkpoint of step {steps[-1]} is unchanged" if steps else "no checkpoint has been written before"

    def _describe(self, folder: Path, engine: TrainingEngine) -> dict[str, Any]:
        """Return this rank's share of the manifest: digests of some files, and the fragments of its own."""
        names = sorted(path.name for path in folder.iterdir())
        share = names[dist.get_rank() :: dist.get_world_size()]
        with ThreadPoolExecutor() as threads:  # the disk writes one file while another is read
            list(threads.map(sync, (folder / name for name in share)))
        fragments = [list(astuple(fragment)) for fragment in engine.fragments()]
        return {
            "files": {name: [(folder / name).stat().st_size, digest_of(folder / name)] for name in share},
            "fragments": {self._my_file(names, engine): fragments} if fragments else {},
        }

    def _my_file(self, names: Iterable[str], engine: TrainingEngine) -> str:
        return file_of(
            names,
            zero=engine.zero_stage,
            data_rank=self._topology.data.rank,
            tensor_rank=self._topology.tensor.rank,
        )

    def _manifest(
        self, parts: Sequence[dict[str, Any]], engine: TrainingEngine, progress: Progress, schedule: StageSchedule
    ) -> Manifest:
        fragments: dict[str, tuple[Fragment, ...]] = {}
        files: dict[str, tuple[int, str]] = {}
        for part in parts:
            fragments |= {name: _fragments(rows) for name, rows in part["fragments"].items()}
            files |= {name: (size, digest) for name, (size, digest) in part["files"].items()}
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
            fragments=fragments,
            files=files,
            sound=progress.sound,
            losses=progress.losses,
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
        found: list[int] = gather_json(self._run_folder.steps() if self._topology.is_first else [])[0]
        return found

    def _point_to(self, name: str) -> None:
        with atomic_file(self._run_folder.latest) as new:
            new.write_text(name, encoding="utf-8")
            sync(new)
        sync(self._folder)

    def _prune(self, written: int, *, sound: int) -> None:
        """Remove old checkpoints. The newest few are kept, every n-th for good, and the newest whose model is known to
        be sound: the held-out loss was finite then or later. Damaged ones do not count, so the one just written is
        always kept; they are removed when a newer one is complete."""
        self._damaged.discard(written)
        for step in sorted(step for step in self._damaged & {*self._run_folder.steps()} if step < written):
            self._remove(self._run_folder.checkpoint(step))
        forever = self._run.output.keep_every
        steps = [step for step in self._run_folder.steps() if step not in self._damaged]
        newest_sound = max((step for step in steps if step <= sound), default=None)
        for step in steps[: -self._run.output.keep_last]:
            if step != newest_sound and (forever is None or step % forever):
                self._remove(self._run_folder.checkpoint(step))

    def _remove(self, folder: Path) -> None:
        removed = folder.with_name(folder.name + _REMOVED)
        folder.rename(removed)  # a checkpoint that is half removed must not look complete
        shutil.rmtree(removed)

    def _sweep(self) -> None:
        """Remove what interrupted saves have left. Not to be called during a save, whose files it would remove."""
        for path in self._folder.iterdir():
            if path.suffix in (_ASIDE, _REMOVED) and step_of(path.stem) is not None:
                shutil.rmtree(path)

    def _write_caches(self, folder: Path, caches: Sequence[Memory]) -> None:
        """Write this rank's features of its rows in the order of their lanes, whatever the micro-batches."""
        names = caches[0].tensors if caches else ()
        tensors = {}
        for name in names:
            parts = [cache.tensors[name] for cache in caches]
            tensors[name] = torch.cat(parts).contiguous()
        rows = max(map(len, tensors.values()), default=0)
        first = self._topology.data.rank * rows
        metadata = {"global_rows": f"{first}..{first + rows}"}
        name = _cache_file(self._topology.data.rank, self._topology.tensor.rank)
        save_file(tensors, folder / name, metadata=metadata)

    def _write_buffers(self, folder: Path, engine: TrainingEngine) -> None:
        found = engine.full_buffers()
        if found and self._topology.is_first:
            save_file(found, folder / BUFFERS)

    def _read_caches(
        self, folder: Path, manifest: Manifest, engine: TrainingEngine, schedule: StageSchedule
    ) -> tuple[Memory, ...]:
        """Return this rank's features of the caches of its rows, from whichever ranks wrote them; none if the next step
        opens new lanes."""
        if manifest.step >= schedule.total_steps or schedule.plan(manifest.step).opens_lanes:
            return ()
        stage = schedule.plan(manifest.step).stage
        if not RunConfig.parse(manifest.run, source=str(folder)).output.save_caches:
            return self._cold_caches(folder, engine, stage)
        rows = range(self._topology.data.rank * stage.rows, (self._topology.data.rank + 1) * stage.rows)
        wanted = _expected(self._run.model, stage, self._topology.tensor.size)
        files = _cache_files(manifest)
        axis = self._topology.tensor
        tensors = {name: _read_cache(folder, files, name, rows, axis) for name in wanted}
        _check_memory(tensors, wanted, folder, least=_least_length(self._run.model, stage))
        return tuple(map(engine.caches.keep, _split(tensors, self._run.model, stage)))

    def _cold_caches(self, folder: Path, engine: TrainingEngine, stage: Stage) -> tuple[Memory, ...]:
        """Return empty caches: the rows continue in their lanes, without the text before them."""
        if stage.cache_length and self._topology.is_first:
            log(f"{folder}: was saved without caches (output.save_caches is false), so its lanes open cold")
        empty = (engine.model.empty_memory(stage.micro_rows, stage.cache_length) for _ in range(stage.accumulation))
        return tuple(map(engine.caches.keep, empty))


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


def _fragments(rows: Iterable[Sequence[Any]]) -> tuple[Fragment, ...]:
    return tuple(Fragment(*row) for row in rows)


def _split(tensors: Mapping[str, torch.Tensor], model: ModelConfig, stage: Stage) -> tuple[Memory, ...]:
    """Return one memory for each micro-batch."""
    parts = zip(*(tensor.split(stage.micro_rows) for tensor in tensors.values()), strict=True)
    named = (dict(zip(tensors, rows, strict=True)) for rows in parts)
    return tuple(memory_of(model).from_tensors(part, model, stage.cache_length) for part in named)


def _cache_files(manifest: Manifest) -> list[list[str]]:
    """Return the names of the files with caches: for each data-parallel rank, those of its tensor-parallel ranks. In
    checkpoints of format 1, a single file has all features."""
    found = []
    for rank in range(manifest.grid["data"]):
        parts = [_cache_file(rank, part) for part in range(manifest.grid["tensor"])]
        found.append(parts if parts[0] in manifest.files else [f"caches_data_rank_{rank:05d}.safetensors"])
    return found


def _read_cache(folder: Path, files: Sequence[Sequence[str]], name: str, rows: range, axis: Axis) -> torch.Tensor:
    """Return one rank's features of some rows of one tensor."""
    found = []
    first = 0
    for parts in files:
        try:
            with ExitStack() as stack:
                opened = [stack.enter_context(safe_open(folder / part, framework="pt")) for part in parts]
                held = [file.get_slice(name) for file in opened]
                count = held[0].get_shape()[0]
                if inside := _overlap(rows, first, count):
                    found.append(_read_features(held, inside, axis))
                first += count
        except (SafetensorError, IndexError, RuntimeError) as error:
            where = folder / parts[0]
            raise UserError(f"{where}: does not hold the cache of layer {name}, so it is not read ({error})") from None
    return torch.cat(found) if found else torch.empty(0)


def _read_features(held: Sequence[Any], rows: slice, axis: Axis) -> torch.Tensor:
    """Return one rank's share of features that may have been split among another number of ranks."""
    sizes = [part.get_shape()[-1] for part in held]
    each = sum(sizes) // axis.size
    own = range(axis.rank * each, (axis.rank + 1) * each)
    found = []
    first = 0
    for part, size in zip(held, sizes, strict=True):
        if inside := _overlap(own, first, size):
            found.append(part[rows, :, inside])
        first += size
    return torch.cat(found, dim=-1)


def _overlap(wanted: range, first: int, count: int) -> slice | None:
    """Return where `wanted` lies within the `count` elements that begin at `first`, if it does."""
    begin = max(wanted.start, first)
    end = min(wanted.stop, first + count)
    return slice(begin - first, end - first) if begin < end else None


def _expected(model: ModelConfig, stage: Stage, ways: int) -> dict[str, torch.Tensor]:
    """Return one rank's tensors of a full memory of all rows, without content."""
    nowhere = torch.empty(0, device="meta")
    return memory_of(model).full(model, rows=stage.rows, capacity=stage.cache_length, like=nowhere, ways=ways).tensors


def _least_length(model: ModelConfig, stage: Stage) -> int:
    """Return the length of a memory that has read nothing."""
    return memory_of(model).length_after(0, model, stage.cache_length)


def _check_memory(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], folder: Path, *, least: int
) -> None:
    """Refuse caches of other rows or sizes than this model's, and layers that remember different lengths."""
    lengths = {tensor.shape[1] if tensor.dim() > 1 else -1 for tensor in tensors.values()}
    for name, tensor in tensors.items():
        full = wanted[name].shape
        fits = tensor.dim() == len(full) and least <= tensor.shape[1] <= full[1] and len(lengths) == 1
        if not fits or (*tensor.shape[:1], *tensor.shape[2:]) != (*full[:1], *full[2:]):
            raise UserError(
                f"{folder}: its cache of layer {name} has shape {list(tensor.shape)}; at most {list(full)} is right"
            )


def _cache_file(data_rank: int, tensor_rank: int) -> str:
    return f"caches_data_rank_{data_rank:05d}_tensor_rank_{tensor_rank:02d}.safetensors"
