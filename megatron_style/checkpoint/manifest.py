"""The manifest: what a checkpoint says about itself. It is written last, so a folder with a manifest was once complete;
its digests show whether it still is."""

from __future__ import annotations

import itertools
import json
import math
import mmap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from megatron_style.base.errors import UserError, one_line
from megatron_style.base.json_text import parse_json
from megatron_style.base.run_folder import LATEST, RunFolder, checkpoint_name
from megatron_style.config.model import DEFAULT_OPTIMIZER
from megatron_style.parallel.sharding import Fragment, Layout

FILE = "manifest.json"
FORMAT = 2  # 1: the tensor-parallel ranks of a data-parallel one share a file of caches
_READABLE = (1, FORMAT)


class Damaged(Exception):
    """A checkpoint that differs from its manifest, or has none. The message says how."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class Best(NamedTuple):
    """The lowest held-out loss so far. Losses of another text cannot be compared with it."""

    step: int
    loss: float
    text_digest: str


@dataclass(frozen=True)
class Manifest:
    step: int
    stage: int  # of the last step
    tokens: int  # trained so far, over all ranks
    place: Mapping[str, int | str]  # how far the text has been read
    history: tuple[tuple[int, int], ...]  # (first step, tokens per update) of every grid the run has had
    run: Mapping[str, Any]  # the resolved run file
    ds_config: Mapping[str, Any]  # the user's
    vocab_size: int
    corpus_tokens: int
    grid: Mapping[str, int]  # data, tensor, zero
    parameters: Mapping[str, Layout]  # in the model's order
    fragments: Mapping[str, tuple[Fragment, ...]]  # by file
    files: Mapping[str, tuple[int, str]]  # name -> bytes, digest
    sound: int = 0  # the last step at which the held-out loss was finite
    losses: tuple[float, ...] = ()  # of the last steps, against which a spike is measured
    sources: Mapping[str, int] = field(default_factory=dict)  # of a blend, in its order: name -> tokens
    best: Best | None = None  # at its step or earlier

    @property
    def optimizer(self) -> str:
        """Return the name of the optimizer, from whichever file sets it."""
        return optimizer_name(self.run["optimizer"]["name"], self.ds_config)

    @property
    def source_tokens(self) -> tuple[int, ...]:
        """Return the tokens of each source of the text; most runs have one."""
        return tuple(self.sources.values()) or (self.corpus_tokens,)

    def write(self, folder: Path) -> None:
        data = {
            "format": FORMAT,
            **asdict(self),
            "parameters": {name: [list(layout.shape), layout.shard_dim] for name, layout in self.parameters.items()},
            "fragments": {name: list(map(astuple, found)) for name, found in self.fragments.items()},
        }
        write_sealed(folder / FILE, data)


def read_manifest(folder: Path) -> Manifest:
    data = read_sealed(folder / FILE)
    if (format_version := data.pop("format", None)) not in _READABLE:
        readable = " and ".join(map(str, _READABLE))
        raise UserError(f"{folder}: has format {format_version}; this version reads formats {readable}")
    try:
        return _manifest_of(data)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise Damaged(f"its {FILE} does not hold a manifest ({error})") from None


def open_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """Find a checkpoint and check every byte of it: a damaged one is never read in part."""
    folder = find_checkpoint(path)
    if folder is None:
        raise UserError(f"{path}: neither a run nor a checkpoint (with {FILE})")
    try:
        manifest = read_manifest(folder)
        for name, (size, digest) in manifest.files.items():
            check_file(folder, name, size, digest)
    except Damaged as damage:
        raise UserError(f"{folder}: is not complete: {damage}") from None
    return folder, manifest


def find_checkpoint(path: Path) -> Path | None:
    if (path / FILE).is_file():
        return path
    for latest in (path / LATEST, RunFolder(path).latest):
        if latest.is_file():
            return latest.parent / _name_in(latest)
    return None


def _name_in(latest: Path) -> str:
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not is_file_name(name):
        example = checkpoint_name(100)
        raise UserError(f"{latest}: holds {name[:60]!r}; the name of a checkpoint such as {example} is expected")
    return name


def _manifest_of(data: dict[str, Any]) -> Manifest:
    data["history"] = tuple((int(step), int(tokens)) for step, tokens in data["history"])
    data["best"] = Best(*data["best"]) if data.get("best") else None
    data["losses"] = tuple(float(loss) for loss in data.get("losses", ()))
    data["parameters"] = {name: Layout(tuple(shape), dim) for name, (shape, dim) in data["parameters"].items()}
    data["files"] = {str(name): (int(size), str(digest)) for name, (size, digest) in data["files"].items()}
    fragments = {}
    for name, rows in data["fragments"].items():
        fragments[_written_name(name, data["files"])] = tuple(Fragment(*row) for row in rows)
    data["fragments"] = fragments
    manifest = Manifest(**data)
    _check_kinds(manifest)
    return manifest


def _check_kinds(manifest: Manifest) -> None:
    """Raise an error unless every value has its type and lies within its shape: sizes become allocations."""
    counts = (
        manifest.step,
        manifest.stage,
        manifest.tokens,
        manifest.vocab_size,
        manifest.corpus_tokens,
        manifest.sound,
    )
    grid = tuple(manifest.grid[axis] for axis in ("data", "tensor", "zero"))
    if not all(_is_count(number) for number in (*counts, *grid)) or 0 in grid[:2] or grid[2] > 3:
        raise ValueError("a count is not one")
    if not all(map(math.isfinite, manifest.losses)):
        raise ValueError("a loss is not finite")
    if manifest.best is not None and not _is_best(manifest.best):
        raise ValueError("its best step is not one")
    if not manifest.vocab_size or not manifest.corpus_tokens:
        raise ValueError("it has no text")
    if not all(_is_count(tokens) for tokens in manifest.source_tokens):
        raise ValueError("the tokens of a source are not a count")
    if sum(manifest.source_tokens) != manifest.corpus_tokens:
        raise ValueError("its sources are not its text")
    _check_history(manifest.history)
    if type(manifest.optimizer) is not str:
        raise ValueError("its optimizer has no name")
    if not all(isinstance(part, dict) for part in (manifest.run, manifest.ds_config, manifest.place)):
        raise ValueError("a section is missing")
    if not all(is_file_name(name) for name in manifest.files) or not manifest.fragments.keys() <= manifest.files.keys():
        raise ValueError("a file is not one of this folder")
    for fragment in itertools.chain.from_iterable(manifest.fragments.values()):
        size = math.prod(manifest.parameters[fragment.param].shard_shape(manifest.grid["tensor"]))
        if not all(_is_count(number) for number in astuple(fragment)[1:]) or fragment.offset + fragment.count > size:
            raise ValueError(f"a fragment of {fragment.param} is not one")
    if problem := gap(manifest):
        raise ValueError(problem)


def _is_best(best: Best) -> bool:
    return _is_count(best.step) and type(best.loss) is float and math.isfinite(best.loss) and type(best[2]) is str


def _check_history(history: tuple[tuple[int, int], ...]) -> None:
    """Raise an error unless the first grid begins at step 0, each further one later, and all of them train tokens."""
    firsts = [first for first, _ in history]
    if not firsts or firsts[0] != 0 or firsts != sorted(firsts) or not all(_is_count(first) for first in firsts):
        raise ValueError("its history does not begin at step 0")
    if not all(_is_count(tokens) and tokens for _, tokens in history):
        raise ValueError("its history has an update without tokens")


def gap(manifest: Manifest) -> str | None:
    """Describe the first part of a parameter that no fragment holds, or more than one, if there is any."""
    held: dict[tuple[str, int], list[Fragment]] = defaultdict(list)
    for file, fragments in manifest.fragments.items():
        for fragment in fragments:
            held[fragment.param, tensor_rank_of(file)].append(fragment)
    ways = manifest.grid["tensor"]
    for (name, layout), rank in itertools.product(manifest.parameters.items(), range(ways)):
        end = 0
        for fragment in sorted(held[name, rank], key=lambda fragment: fragment.offset):
            if fragment.offset != end:
                break
            end += fragment.count
        if end != math.prod(layout.shard_shape(ways)):
            return f"the map has {name} of tensor rank {rank} up to element {end} only"
    return None


def tensor_rank_of(file: str) -> int:
    return int(file.split("mp_rank_")[1].split("_")[0])


def is_file_name(name: str) -> bool:
    """True if the name can only be that of a file in its own folder."""
    return Path(name).name == name and name not in ("", "..") and name.isprintable() and len(name.encode()) < 256


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63


def optimizer_name(in_run_file: str | None, ds_config: Mapping[str, Any]) -> str:
    if "optimizer" in ds_config:
        return str(ds_config["optimizer"]["type"]).lower()
    return in_run_file or DEFAULT_OPTIMIZER


def _written_name(name: str, written: Iterable[str]) -> str:
    """Return the complete name of a file: earlier versions left out the precision that DeepSpeed prefixes."""
    return next((file for file in written if file.endswith(name)), name)


def write_sealed(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON, and its digest in a second line."""
    text = json.dumps(data)
    path.write_text(f"{text}\n{xxhash.xxh3_128(text.encode()).hexdigest()}\n", encoding="utf-8")


def read_sealed(path: Path) -> dict[str, Any]:
    try:
        text, digest = path.read_text(encoding="utf-8").split("\n")[:2]
    except FileNotFoundError:
        raise Damaged(f"it has no {path.name}, so it was never complete") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"its {path.name} cannot be read ({error})") from None
    if xxhash.xxh3_128(text.encode()).hexdigest() != digest:
        raise Damaged(f"its {path.name} has been changed")
    try:
        data: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise Damaged(f"its {path.name} is not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise Damaged(f"its {path.name} holds a {type(data).__name__}")
    return data


def check_file(folder: Path, name: str, size: int, digest: str) -> None:
    path = folder / name
    if not path.is_file():
        raise Damaged(f"{name} is missing")
    if path.stat().st_size != size:
        raise Damaged(f"{name} has {path.stat().st_size} bytes instead of {size}")
    if digest_of(path) != digest:
        raise Damaged(f"{name} has been changed")


def digest_of(path: Path) -> str:
    """Return the file's xxh3 digest, which finds damage as surely as sha256 and is ten times faster than a disk."""
    if path.stat().st_size == 0:  # cannot be mapped
        return xxhash.xxh3_128(b"").hexdigest()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_128(content).hexdigest()
