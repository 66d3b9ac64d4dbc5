"""Text to token ids and back: what every tokenizer does, how one is loaded, and byte-level BPE.

Tokenizers that are built here, of words or byte pairs, number their tokens by descending frequency, because adaptive
embeddings give the low ids the wide vectors. They begin with the same four specials, and end every line, blank ones
too, with </s>.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count, groupby
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
    # Both need this module.
    from megatron_style.data.pretrained import PretrainedTokenizer
    from megatron_style.data.word_dictionary import WordDictionary

    if path.name == PRETRAINED_FILE or (path / PRETRAINED_FILE).is_file():
        return PretrainedTokenizer.load(path if path.is_file() else path / PRETRAINED_FILE)
    if path.is_file():
        return BpeTokenizer.load(path) if path.suffix == ".json" else WordDictionary.load(path)
    found = [path / name for name in (DICTIONARY_FILE, BPE_FILE) if (path / name).is_file()]
    if not found:
        raise UserError(f"{path}: no tokenizer here; expected {DICTIONARY_FILE} (words) or {BPE_FILE} (bpe)")
    if len(found) > 1:
        raise UserError(f"{path}: holds both {DICTIONARY_FILE} and {BPE_FILE}; name the one that is meant")
    return load_tokenizer(found[0])


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
        return cls(_renumbered(model, [*tokens, *padding(tokens[len(SPECIALS) :])]))

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
        return Encoded(np.frombuffer(ids, np.int32), np.frombuffer(sizes, np.int32), lines_of_each(texts), words)

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


def lines_of_each(texts: Sequence[str]) -> NDArray[np.int64]:
    counts = [text.removesuffix("\n").count("\n") + 1 for text in texts]
    return np.array(counts, np.int64)


def padding(words: Sequence[str]) -> list[str]:
    """Return names for the ids that pad the vocabulary to the next multiple; names in the text are skipped."""
    missing = -(len(SPECIALS) + len(words)) % MULTIPLE
    taken = set(words)
    free = (name for number in count() if (name := f"madeupword{number:04d}") not in taken)
    return [next(free) for _ in range(missing)]


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
