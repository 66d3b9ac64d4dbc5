"""A checkpoint that is being written. Each rank has a draft of its own; together they complete the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_style.base.errors import RunFailed
from megatron_style.base.files import room_at, sync
from megatron_style.checkpoint.folder import CheckpointFolder
from megatron_style.checkpoint.logical import LogicalReader, file_of
from megatron_style.checkpoint.manifest import Manifest, digest_of, gap
from megatron_style.checkpoint.proof import Fingerprint, difference
from megatron_style.checkpoint.rank_files import RankFiles
from megatron_style.parallel.collectives import gather_json
from megatron_style.parallel.sharding import Fragment
from megatron_style.parallel.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class Draft:
    """Everything that completes a checkpoint without the engine, which may compute the next steps meanwhile."""

    manifest: Manifest  # without files and fragments, which all ranks have to contribute
    files: RankFiles
    fragments: Sequence[Fragment]  # of this rank's file
    fingerprints: Mapping[str, Fingerprint]
    topology: Topology

    def complete(self, folder: CheckpointFolder, group: dist.ProcessGroup | None) -> None:
        """Write, prove and publish the checkpoint. All ranks call it, and it succeeds or fails on all of them; then
        nothing of it stays on the disk. In another thread than the training, it needs a process group of its own."""
        try:
            self._complete(folder, group)
        except (OSError, RunFailed):  # all ranks have got here, so none is writing
            _on_all_ranks(folder.sweep if self.topology.is_first else _nothing, group)
            raise

    def _complete(self, folder: CheckpointFolder, group: dist.ProcessGroup | None) -> None:
        manifest = self._with_parts(_on_all_ranks(self._write, group))
        problems = _on_all_ranks(lambda: self._problem(manifest), group)
        problem = next((found for found in problems if found), None)
        if problem is not None:
            raise RunFailed(
                f"the checkpoint of step {manifest.step} would be wrong, so it was not kept: {problem}; "
                f"{folder.what_stays()}: remove unusual settings from {manifest.run['deepspeed'] or 'the run file'}, "
                f"and report it"
            )
        _on_all_ranks((lambda: folder.publish(manifest)) if self.topology.is_first else _nothing, group)

    def _write(self) -> dict[str, Any]:
        """Write this rank's files, and return its share of the manifest: their digests, and the fragments."""
        self.files.write()
        paths = {name: self.files.folder / name for name in self.files.names}
        with ThreadPoolExecutor() as threads:  # the disk writes one file while another is read
            list(threads.map(sync, paths.values()))
        return {
            "files": {name: [path.stat().st_size, digest_of(path)] for name, path in paths.items()},
            "fragments": {self._own_file: [list(astuple(part)) for part in self.fragments]} if self.fragments else {},
        }

    @property
    def _own_file(self) -> str:
        return file_of(
            self.files.names,
            zero=self.manifest.grid["zero"],
            data_rank=self.topology.data.rank,
            tensor_rank=self.topology.tensor.rank,
        )

    def _with_parts(self, parts: Sequence[dict[str, Any]]) -> Manifest:
        fragments: dict[str, tuple[Fragment, ...]] = {}
        files: dict[str, tuple[int, str]] = {}
        for part in parts:
            for name, rows in part["fragments"].items():
                fragments[name] = tuple(Fragment(*row) for row in rows)
            files |= {name: (size, digest) for name, (size, digest) in part["files"].items()}
        return replace(self.manifest, fragments=fragments, files=files)

    def _problem(self, manifest: Manifest) -> str | None:
        """Compare the written file with the engine's weights; a checkpoint that differs never gets its name."""
        problem = None
        if self.fragments:
            flat = LogicalReader(self.files.folder, manifest).flat_groups(self._own_file)
            problem = difference(flat, self.fragments, self.fingerprints, self._own_file)
        return problem or (gap(manifest) if self.topology.is_first else None)


def make_folder(step: int, folder: CheckpointFolder, topology: Topology, group: dist.ProcessGroup | None) -> None:
    """Make the folder of a draft. All ranks call it before any of them writes."""
    _on_all_ranks((lambda: folder.begin(step)) if topology.is_first else _nothing, group)


@contextmanager
def explained(step: int, folder: CheckpointFolder) -> Iterator[None]:
    """Turn an error of the disk into one that says what to do."""
    try:
        yield
    except RunFailed:
        raise
    except (OSError, RuntimeError) as error:  # torch's writer raises no OSError on a full disk
        reason = str(error).split("\n")[0][:200]
        raise RunFailed(
            f"the checkpoint of step {step} could not be written ({reason}); {folder.what_stays()}: "
            f"{room_at(folder.path)}; free some and start again"
        ) from error


def _on_all_ranks(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Return what the action returns on each rank, or raise the first rank's error on all of them."""
    value = None
    own_problem = None
    try:
        value = action()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        own_problem = str(error).split("\n")[0][:200] or type(error).__name__
    outcomes = gather_json([value, own_problem], group)
    for _, problem in outcomes:
        if problem is not None:
            raise OSError(problem)
    return [found for found, _ in outcomes]


def _nothing() -> None: ...
