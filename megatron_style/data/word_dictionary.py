"""A dictionary of words, in fairseq's format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.base.files import write_atomic
from megatron_style.data.tokenizer import (
    DICTIONARY_FILE,
    EOS,
    SPECIALS,
    UNK,
    Encoded,
    Tokenizer,
    lines_of_each,
    padding,
    split_at,
)

LINE_END = "\0"  # among words: no text holds it
_LINE_END_ID = -1
_PIECE = 1 << 15  # characters whose words are looked up at once, few enough for the processor's cache


class WordDictionary(Tokenizer):
    """A vocabulary of words, numbered in the order of dict.txt; id = line + 4."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)
        self._words = [*SPECIALS, *self._counts]
        self._ids = {word: index for index, word in enumerate(self._words)}
        assert len(self._ids) == len(self._words), "a special among the words"

    @classmethod
    def build(cls, counts: Mapping[str, int], *, threshold: int = 0, vocab_size: int | None = None) -> WordDictionary:
        """Keep the most frequent words, ties in code point order, and pad with words that never occur."""
        words = {word: n for word, n in counts.items() if word not in SPECIALS}
        if not words:
            raise UserError("the training text holds no words; a dictionary needs at least one")
        kept = sorted((word for word, n in words.items() if n >= threshold), key=lambda word: (-words[word], word))
        if not kept:
            most = max(words.values())
            raise UserError(f"--threshold {threshold} leaves no words: the most frequent one occurs {most} times")
        if vocab_size is not None:
            if vocab_size <= len(SPECIALS):
                raise UserError(f"--vocab-size {vocab_size} leaves no words: {len(SPECIALS)} ids are specials")
            kept = kept[: vocab_size - len(SPECIALS)]
        return cls({word: words[word] for word in kept} | dict.fromkeys(padding(kept), 0))

    @classmethod
    def load(cls, path: Path) -> WordDictionary:
        try:
            lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start} is not UTF-8; expected lines of `word count`") from error
        counts: dict[str, int] = {}
        for number, line in enumerate(lines, start=1):
            word, word_count = _dictionary_entry(line, where=f"{path}:{number}")
            if word in counts or word in SPECIALS:
                what = "is one of the four specials, which are implied" if word in SPECIALS else "occurs twice"
                raise UserError(f"{path}:{number}: `{word}` {what}; every word must be listed once")
            counts[word] = word_count
        return cls(counts)

    @property
    def kind(self) -> str:
        return "words"

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    def tokens(self) -> list[str]:
        return self._words

    def encode_line(self, line: str) -> list[int]:
        # str.split splits at the same characters as fairseq's regular expression \s+
        return [*(self._ids.get(word, UNK) for word in line.split()), EOS]

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        ids_of = self._ids_and_line_end.get
        encoded = encode_words(texts, lambda words: map(ids_of, words, repeat(UNK)), line_end=_LINE_END_ID)
        encoded.ids[encoded.ids == _LINE_END_ID] = EOS
        return encoded

    @cached_property
    def _ids_and_line_end(self) -> dict[str, int]:
        return self._ids | {LINE_END: _LINE_END_ID}

    def ids_of(self, words: Iterable[str]) -> NDArray[np.int32]:
        return np.fromiter(map(self._ids.get, words, repeat(UNK)), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return "\n".join(map(self._decode_line, split_at(EOS, ids)))

    def _decode_line(self, ids: Iterable[int]) -> str:
        return " ".join(self._words[i] for i in ids)

    def save(self, folder: Path) -> None:
        write_atomic(folder / DICTIONARY_FILE, "".join(f"{word} {n}\n" for word, n in self._counts.items()))


def encode_words(texts: Sequence[str], ids_of: Callable[[Sequence[str]], Iterable[int]], *, line_end: int) -> Encoded:
    """Encode words by a function, which is also asked for the id of `LINE_END`, and answers `line_end` to that only."""
    marked = "".join(text.removesuffix("\n").replace("\n", f" {LINE_END} ") + f" {LINE_END} " for text in texts)
    parts = [np.fromiter(ids_of(words), np.int32, len(words)) for words in _words_in_pieces(marked)]
    ids = np.concatenate([np.empty(0, np.int32), *parts])
    ends = np.flatnonzero(ids == line_end)
    sizes = np.diff(ends, prepend=-1).astype(np.int32)
    return Encoded(ids, sizes, lines_of_each(texts), len(ids) - len(ends))


def _words_in_pieces(marked: str) -> Iterator[list[str]]:
    """Yield the words of a text whose lines end in `LINE_END`, in pieces of complete lines."""
    start = 0
    while start < len(marked):
        end = marked.find(LINE_END, start + _PIECE) + 1 or len(marked)
        yield marked[start:end].split()
        start = end


def _dictionary_entry(line: str, *, where: str) -> tuple[str, int]:
    """Split a line from the right, as fairseq does: only the last field is the count."""
    word, _, number = line.rstrip().rpartition(" ")
    if not word or not (number.isascii() and number.isdigit()):
        raise UserError(f"{where}: holds {line[:60]!r}; expected `word count`")
    return word, int(number)
