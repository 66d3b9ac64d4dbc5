"""Text to token ids and back: a word dictionary in fairseq's format, and byte-level BPE.

Both number their tokens by descending frequency, because adaptive embeddings give the low ids the wide vectors.
Both begin with the same four specials, and end every line, blank ones too, with </s>.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, groupby, repeat
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.base.files import write_atomic
from megatron_style.data.text import lines_of

BOS, PAD, EOS, UNK = range(4)
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MULTIPLE = 8  # vocabularies are padded to it, for matrix units and tensor-parallel shards

LINE_END = "\0"  # among words: no text holds it
_LINE_END_ID = -1
_PIECE = 1 << 15  # characters whose words are looked up at once, few enough for the processor's cache

DICTIONARY_FILE = "dict.txt"
BPE_FILE = "tokenizer.json"
PRETRAINED_FILE = "pretrained_tokenizer.json"
TOKENIZER_FILES = (DICTIONARY_FILE, BPE_FILE, PRETRAINED_FILE)
DEFAULT_BPE_VOCAB = 8192
SMALLEST_BPE_VOCAB = len(SPECIALS) + 256  # every byte must have a token, or some text could not be encoded


@dataclass(frozen=True)
class Encoded:
    """The ids of several texts in sequence."""

    ids: NDArray[np.int32]
    line_sizes: NDArray[np.int32]  # the number of ids of each line
    text_lines: NDArray[np.int64]  # the number of lines of each text
    words: int  # separated by white space, whatever the tokenizer: perplexity per word needs them


class Tokenizer(Protocol):
    """The interface of every tokenizer."""

    @property
    def kind(self) -> str:
        """Return `words`, `bpe` or `pretrained`."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, including specials and padding."""

    @property
    def eos(self) -> int:
        return EOS

    @property
    def unk(self) -> int | None:
        return UNK

    def encode_line(self, line: str) -> list[int]:
        """Return the ids of one line and </s>."""

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of texts of any number of lines. A newline at the end of a text begins no further line."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt: its lines, with </s> between them but not after the last."""
        return list(chain.from_iterable(self.encode_line(line) for line in text.split("\n")))[:-1]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; </s> becomes a newline."""

    def count_words(self, ids: Iterable[int]) -> int:
        """Return the number of words and line ends, by which a perplexity per word divides, whatever the tokens are."""
        text = self.decode(ids)
        return len(text.split()) + text.count("\n")

    def tokens(self) -> list[str]:
        """Return the token of each id, in the order of the ids."""

    @property
    def digest(self) -> str:
        """Return a digest that is the same for tokenizers that give the same ids."""
        return hashlib.sha256(json.dumps([self.kind, *self.tokens()]).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write the one file that `load_tokenizer` reads back."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a folder, or of one of the files that `save` writes."""
    if path.name == PRETRAINED_FILE or (path / PRETRAINED_FILE).is_file():
        from megatron_style.data.pretrained import PretrainedTokenizer  # which needs this module

        return PretrainedTokenizer.load(path if path.is_file() else path / PRETRAINED_FILE)
    if path.is_file():
        return BpeTokenizer.load(path) if path.suffix == ".json" else WordDictionary.load(path)
    found = [path / name for name in (DICTIONARY_FILE, BPE_FILE) if (path / name).is_file()]
    if not found:
        raise UserError(f"{path}: no tokenizer here; expected {DICTIONARY_FILE} (words) or {BPE_FILE} (bpe)")
    if len(found) > 1:
        raise UserError(f"{path}: holds both {DICTIONARY_FILE} and {BPE_FILE}; name the one that is meant")
    return load_tokenizer(found[0])


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
        return cls({word: words[word] for word in kept} | dict.fromkeys(_padding(kept), 0))

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


class BpeTokenizer(Tokenizer):
    """Byte-level BPE: no text is unknown, and decoding restores the exact line."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self._model = model
        # A `</s>` in the text is text, or a document could forge line ends. The file does not store this setting.
        self._model.encode_special_tokens = True

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int = DEFAULT_BPE_VOCAB) -> BpeTokenizer:
        """Learn the merges. The ids are in the trainer's order; `sorted_by` numbers them by frequency."""
        if vocab_size < SMALLEST_BPE_VOCAB:
            raise UserError(f"--vocab-size {vocab_size} is too small for bpe: at least {SMALLEST_BPE_VOCAB}")
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIALS),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(lines, trainer)
        tokens = _tokens_by_id(model)
        return cls(_renumbered(model, [*tokens, *_padding(tokens[len(SPECIALS) :])]))

    def sorted_by(self, counts: NDArray[np.int64]) -> BpeTokenizer:
        """Return a tokenizer with the same merges, numbered by descending count; ties by the token's string."""
        tokens = _tokens_by_id(self._model)
        frequency = dict(zip(tokens, counts.tolist(), strict=True))
        ordinary = sorted(tokens[len(SPECIALS) :], key=lambda token: (-frequency[token], token))
        return BpeTokenizer(_renumbered(self._model, [*SPECIALS, *ordinary]))

    @classmethod
    def load(cls, path: Path, convert: Callable[[str], str] = str) -> BpeTokenizer:
        """Load a file as `save` writes it; `convert` makes that content from another format."""
        model = read_model(path.read_bytes(), path, convert)
        for index, special in enumerate(SPECIALS):
            if model.id_to_token(index) != special:
                raise UserError(f"{path}: id {index} is {model.id_to_token(index)!r}; it must be {special!r}")
        if None in _tokens_by_id(model):
            raise UserError(f"{path}: its ids have gaps; they must run from 0 to {model.get_vocab_size() - 1}")
        return cls(model)

    @property
    def kind(self) -> str:
        return "bpe"

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_vocab_size())

    def tokens(self) -> list[str]:
        return _tokens_by_id(self._model)

    def encode_line(self, line: str) -> list[int]:
        ids: list[int] = self._model.encode(line, add_special_tokens=False).ids
        return [*ids, EOS]

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        lines = list(chain.from_iterable(map(lines_of, texts)))
        ids = array("i")  # four bytes per id; a list would take ten times as much
        sizes = array("i")
        for encoding in self._model.encode_batch_fast(lines, add_special_tokens=False):
            ids.extend(encoding.ids)
            ids.append(EOS)
            sizes.append(len(encoding) + 1)
        words = sum(len(text.split()) for text in texts)
        return Encoded(np.frombuffer(ids, np.int32), np.frombuffer(sizes, np.int32), _lines_of_each(texts), words)

    def decode(self, ids: Iterable[int]) -> str:
        return "\n".join(self._model.decode(line, skip_special_tokens=False) for line in split_at(EOS, ids))

    def save(self, folder: Path) -> None:
        write_atomic(folder / BPE_FILE, self._model.to_str(pretty=True))


def read_model(content: bytes, path: Path, convert: Callable[[str], str] = str) -> tokenizers.Tokenizer:
    """Parse the content of a tokenizer file; `path` is for messages."""
    try:
        return tokenizers.Tokenizer.from_str(convert(content.decode()))
    except (OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception for a file it cannot read, or panics
        raise UserError(f"{path}: not a tokenizer file as `prepare` writes it ({error})") from error


def encode_words(texts: Sequence[str], ids_of: Callable[[Sequence[str]], Iterable[int]], *, line_end: int) -> Encoded:
    """Encode words by a function, which is also asked for the id of `LINE_END`, and answers `line_end` to that only."""
    marked = "".join(text.removesuffix("\n").replace("\n", f" {LINE_END} ") + f" {LINE_END} " for text in texts)
    parts = [np.fromiter(ids_of(words), np.int32, len(words)) for words in _words_in_pieces(marked)]
    ids = np.concatenate([np.empty(0, np.int32), *parts])
    ends = np.flatnonzero(ids == line_end)
    sizes = np.diff(ends, prepend=-1).astype(np.int32)
    return Encoded(ids, sizes, _lines_of_each(texts), len(ids) - len(ends))


def _words_in_pieces(marked: str) -> Iterator[list[str]]:
    """Yield the words of a text whose lines end in `LINE_END`, in pieces of complete lines."""
    start = 0
    while start < len(marked):
        end = marked.find(LINE_END, start + _PIECE) + 1 or len(marked)
        yield marked[start:end].split()
        start = end


def _lines_of_each(texts: Sequence[str]) -> NDArray[np.int64]:
    counts = [text.removesuffix("\n").count("\n") + 1 for text in texts]
    return np.array(counts, np.int64)


def _padding(words: Sequence[str]) -> list[str]:
    """Return names for the ids that pad the vocabulary to the next multiple; names in the text are skipped."""
    missing = -(len(SPECIALS) + len(words)) % MULTIPLE
    taken = set(words)
    free = (name for number in count() if (name := f"madeupword{number:04d}") not in taken)
    return [next(free) for _ in range(missing)]


def _dictionary_entry(line: str, *, where: str) -> tuple[str, int]:
    """Split a line from the right, as fairseq does: only the last field is the count."""
    word, _, number = line.rstrip().rpartition(" ")
    if not word or not (number.isascii() and number.isdigit()):
        raise UserError(f"{where}: holds {line[:60]!r}; expected `word count`")
    return word, int(number)


def split_at(end: int, ids: Iterable[int]) -> list[list[int]]:
    """Return lines of ids; a final end gives an empty last line, so that the lines joined by newlines end in one."""
    lines: list[list[int]] = [[]]
    for is_end, group in groupby(map(int, ids), key=lambda i: i == end):
        if is_end:
            lines.extend([] for _ in group)
        else:
            lines[-1].extend(group)
    return lines


def _tokens_by_id(model: tokenizers.Tokenizer) -> list[Any]:
    return [model.id_to_token(index) for index in range(model.get_vocab_size())]


def _renumbered(model: tokenizers.Tokenizer, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return the model with these tokens as ids 0, 1, ...; merges refer to tokens by string and do not change."""
    content = json.loads(model.to_str())
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    return tokenizers.Tokenizer.from_str(json.dumps(content))
