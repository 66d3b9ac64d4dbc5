"""Build a datastore in one walk through a text. The ranks share its units; an interrupted build resumes after the last
finished ones.

The files grow in a hidden folder next to the output, which is renamed when all rows are written. Each rank writes its
rows at their places, by `pwrite`: mapped pages would clash where hosts share a file system."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.base.command import log
from megatron_style.base.errors import RunFailed, UserError
from megatron_style.base.files import atomic_folder, put_in_place
from megatron_style.base.units import FLOPS, size
from megatron_style.config.datastore import DatastoreManifest, KeyDtype
from megatron_style.config.model import ModelFolderConfig
from megatron_style.datastore.store import KEYS, MANIFEST, VALUE, VALUES, key_dtype, open_datastore, read_manifest
from megatron_style.inference.scoring.modes import MODES, make_protocol
from megatron_style.inference.scoring.protocol import Protocol, Request
from megatron_style.inference.scoring.reader import Reader, Tokens
from megatron_style.inference.scoring.score import Progress
from megatron_style.inference.scoring.walk import share
from megatron_style.parallel.topology import Topology

WALKS = tuple(mode for mode in MODES if mode != "token-by-token")  # `cached` gives the same keys
TOKENS_PER_LANE = 2**16
DONE = "done.bin"  # one byte per unit of the walk
_BLOCK = 2**20  # tokens


def walk_of(request: Request, config: ModelFolderConfig, *, tokens: int, where: str) -> Protocol:
    """Return the protocol of the walk. By default a cached one is cut into lanes, which ranks can share, and after each
    of which a build can resume; their number depends on the text alone."""
    if request.mode == "cached":
        lanes = request.lanes or max(1, tokens // max(TOKENS_PER_LANE, request.segment_length or config.segment_length))
        request = replace(request, lanes=lanes, batch_rows=request.batch_rows or 1)
    return make_protocol(request, config, tokens=tokens, where=where)


def describe(manifest: DatastoreManifest) -> str:
    return (
        f"{manifest.count:,} keys of {manifest.hidden_size} numbers, {size(manifest.key_bytes + manifest.value_bytes)} "
        f"on disk; {FLOPS.text(manifest.search_flops)} per exact search"
    )


def facts_of(manifest: DatastoreManifest, protocol: Protocol) -> dict[str, object]:
    names = ("count", "hidden_size", "dtype", "key_bytes", "value_bytes", "search_flops")
    facts = {name: getattr(manifest, name) for name in names}
    return {**facts, "mode": protocol.mode, "lanes": protocol.lanes}


def make_manifest(
    digest: str,
    config: ModelFolderConfig,
    tokens: Tokens,
    protocol: Protocol,
    dtype: KeyDtype,
    computed_in: str,
) -> DatastoreManifest:
    text = xxhash.xxh3_128()
    for first in range(0, len(tokens), _BLOCK):
        text.update(tokens[first : first + _BLOCK].astype(VALUE).tobytes())
    data = {
        "model": digest,
        "text": text.hexdigest(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.model.hidden_size,
        "dtype": dtype,
        "count": len(tokens),
        "walk": asdict(protocol) | {"dtype": computed_in},
    }
    return DatastoreManifest.parse(data, source="the datastore")


def is_built(output: Path, manifest: DatastoreManifest) -> bool:
    """True if exactly this datastore exists. Another one at its place, or the beginning of another, is refused."""
    folder = _unfinished(output)
    if folder.exists() and read_manifest(folder) != manifest:
        raise UserError(f"{folder}: is an unfinished datastore of another model or text; remove it first")
    if not output.exists():
        return False
    if not (output / MANIFEST).is_file() or open_datastore(output).manifest != manifest:
        raise UserError(f"--output {output}: exists, and is not the datastore of this model and text; remove it first")
    return True


@torch.no_grad()
def build(
    reader: Reader,
    protocol: Protocol,
    manifest: DatastoreManifest,
    output: Path,
    *,
    topology: Topology,
    progress: Progress,
) -> None:
    """Write the datastore. All ranks take part."""
    folder = _unfinished(output)
    mode = MODES[protocol.mode]
    done = _begin(folder, manifest, reader, protocol, topology)
    progress(manifest.count * int(done.sum()) // len(done))
    unfinished = (unit for unit in enumerate(mode.units(manifest.count, protocol)) if not done[unit[0]])
    with _open_rows(folder, manifest, writes=topology.tensor.rank == 0) as rows:
        for number, unit in share(unfinished, topology.data):
            for part in mode.read(reader, protocol, unit):
                assert part.keys is not None, "the reader gives keys"
                rows.write(part.first, part.keys)
                progress(len(part.keys) * topology.data.size)  # the other ranks are about as far
            rows.finish(number)
    _meet(topology, reader)
    if topology.is_first:
        put_in_place(folder, output)
        (output / DONE).unlink()
    _meet(topology, reader)


def _begin(
    folder: Path, manifest: DatastoreManifest, reader: Reader, protocol: Protocol, topology: Topology
) -> NDArray[np.uint8]:
    """Make the folder, unless an interrupted build has left one. Return which units are done."""
    if topology.is_first and not folder.exists():
        units = sum(1 for _ in MODES[protocol.mode].units(manifest.count, protocol))
        _lay_out(folder, manifest, reader.tokens, units)
    _meet(topology, reader)
    done = np.fromfile(folder / DONE, np.uint8)
    if topology.is_first and done.any():
        log(f"resuming {folder}: {done.sum()} of {len(done)} parts are done")
    _meet(topology, reader)  # before a further unit is marked
    return done


def _unfinished(output: Path) -> Path:
    return output.with_name(f".{output.name}.building")


def _lay_out(folder: Path, manifest: DatastoreManifest, tokens: Tokens, units: int) -> None:
    """Make the files at their full size: the values at once, the keys as a hole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if manifest.key_bytes + manifest.value_bytes > free:
        needed = size(manifest.key_bytes + manifest.value_bytes)
        raise UserError(f"{folder.parent}: has {size(free)} free, the datastore needs {needed}")
    with atomic_folder(folder) as new:
        (new / MANIFEST).write_text(json.dumps(manifest.as_data(), indent=2) + "\n", encoding="utf-8")
        with (new / VALUES).open("wb") as values:
            for first in range(0, len(tokens), _BLOCK):
                values.write(tokens[first : first + _BLOCK].astype(VALUE).tobytes())
        for name, length in ((KEYS, manifest.key_bytes), (DONE, units)):
            with (new / name).open("wb") as file:
                file.truncate(length)


@dataclass(frozen=True)
class _Rows:
    """The files of one rank. Only the first of the tensor ranks, which have the same keys, writes."""

    manifest: DatastoreManifest
    keys: int  # open files
    done: int
    writes: bool

    def write(self, first: int, keys: Tensor) -> None:
        exact = keys.cpu().double().numpy()
        if not np.isfinite(exact).all():
            raise RunFailed("the model's keys are not finite; its weights are damaged, or its training diverged")
        with np.errstate(over="ignore"):
            stored = exact.astype(key_dtype(self.manifest))
        if not np.isfinite(stored).all():
            raise RunFailed(f"--dtype {self.manifest.dtype}: a key is beyond its range; use --dtype float32")
        if self.writes:
            _write_all(self.keys, stored.tobytes(), first * stored[0].nbytes)

    def finish(self, unit: int) -> None:
        if self.writes:
            os.fsync(self.keys)  # a unit that is marked is on disk
            os.pwrite(self.done, b"\x01", unit)


@contextmanager
def _open_rows(folder: Path, manifest: DatastoreManifest, *, writes: bool) -> Iterator[_Rows]:
    with (folder / KEYS).open("r+b") as keys, (folder / DONE).open("r+b") as done:
        yield _Rows(manifest, keys.fileno(), done.fileno(), writes)


def _write_all(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset += written


def _meet(topology: Topology, reader: Reader) -> None:
    """Wait until all ranks are here."""
    for axis in (topology.data, topology.tensor):
        axis.sum(torch.zeros((), device=reader.model.positions.table.device))
