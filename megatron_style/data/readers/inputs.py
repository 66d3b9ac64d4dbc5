"""Files, globs and folders become a list of input files, whose names say their format."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json

FORMATS: Mapping[str, str] = {
    ".txt": "text",
    ".text": "text",
    ".tokens": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",  # of large corpora, one record per line
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS: Mapping[str, str] = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}
_LONGEST_RECORD = 1_000_000  # bytes of a line that are looked at
_STATE_FILE = "state.json"  # of a folder that `datasets` has saved
_SPLITS_FILE = "dataset_dict.json"  # of a folder of such folders


@dataclass(frozen=True)
class InputFile:
    path: Path
    name: str  # in records, which do not name the folder
    format: str = "text"
    compression: str | None = None
    start: int = 0  # the part that is read, in bytes, from one line end to another
    end: int | None = None

    @property
    def size(self) -> int:
        """Return the number of bytes that are read."""
        return (self.path.stat().st_size if self.end is None else self.end) - self.start

    @classmethod
    def at(cls, path: Path, name: str | None = None) -> InputFile:
        """Return the file with the format that its name says; a name that says none is of plain text."""
        inner, compression = _without_compression(path)
        form = FORMATS.get(inner.suffix.lower(), "text")
        if compression and form in ("parquet", "arrow"):
            raise UserError(f"{path}: a {form} file is compressed inside; decompress the file itself")
        return cls(path, name or path.name, form, compression)


def find_inputs(paths: Iterable[Path]) -> list[InputFile]:
    """Return the files that the paths name: files, patterns such as `shards/*.jsonl.zst`, and folders with all that is
    in them. Within a pattern or a folder the order is that of the names."""
    found: list[InputFile] = []
    for path in paths:
        found += _inputs_at(path.expanduser())
    return found


def _inputs_at(path: Path) -> list[InputFile]:
    if path.is_dir():
        return _in_folder(path)
    if path.exists() or not glob.has_magic(str(path)):
        return [InputFile.at(path)]
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207  an absolute pattern, too
    if not matches:
        raise UserError(f"{path}: no file matches this pattern")
    return [InputFile.at(match) for match in matches if match.is_file()]


def warn_of_records(file: InputFile) -> None:
    """Warn of a file that is read as plain text because of its name, but begins with JSON records."""
    if file.format != "text" or file.compression is not None or not file.path.is_file():
        return
    with file.path.open("rb") as opened:
        first = [opened.readline(_LONGEST_RECORD), opened.readline(_LONGEST_RECORD)]
    if all(_is_record(line) for line in first):
        log(
            f"warning: {file.path}: its lines are JSON records, but its name says plain text, so keys and quotes are "
            f"read too; name it {file.path.stem}.jsonl to read the records' text"
        )


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line.decode("utf-8")), dict)
    except ValueError:
        return False


def _in_folder(folder: Path) -> list[InputFile]:
    if (folder / _SPLITS_FILE).is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise UserError(f"{folder}: holds the splits {', '.join(splits)}; name the folder of one, as {folder}/train")
    if (folder / _STATE_FILE).is_file():
        return _saved_dataset(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_hidden(path, folder)]
    known = [path for path in files if _without_compression(path)[0].suffix.lower() in FORMATS]
    if not known:
        raise UserError(f"{folder}: holds no file whose name ends in {', '.join(FORMATS)}; name the files themselves")
    if len(known) < len(files):
        other = next(path for path in files if path not in known)
        log(f"{folder}: {len(files) - len(known)} files of other kinds are left out, {other.relative_to(folder)} first")
    return [InputFile.at(path, path.relative_to(folder).as_posix()) for path in known]


def _saved_dataset(folder: Path) -> list[InputFile]:
    """Return the Arrow files of a folder that `datasets` has saved, in their order."""
    path = folder / _STATE_FILE
    try:
        state = parse_json(path.read_bytes())
        names = [str(entry["filename"]) for entry in state["_data_files"]]
        has_indices = any(state[key] for key in state if "indices" in key)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not the state of a saved dataset ({error!r}); save the dataset again") from error
    if has_indices:
        raise UserError(f"{folder}: its rows are selected by a list of indices; save it after flatten_indices()")
    held = {path.name for path in folder.iterdir() if path.is_file()}
    if missing := [name for name in names if name not in held]:
        raise UserError(f"{path}: names {missing[0]}, which is not in its folder; save the dataset again")
    return [InputFile(folder / name, name, "arrow") for name in names]


def _without_compression(path: Path) -> tuple[Path, str | None]:
    compression = COMPRESSIONS.get(path.suffix.lower())
    return (path.with_suffix("") if compression else path), compression


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
