"""The prepared text of a run: its token stores, their vocabulary and their tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.data import DataConfig
from megatron_style.config.model import ModelConfig
from megatron_style.config.run import RunConfig
from megatron_style.data.index import BLOCK
from megatron_style.data.store import TokenStore, open_store
from megatron_style.data.tokenizer import BPE_FILE, DICTIONARY_FILE, EOS, TOKENIZER_FILES, Tokenizer, load_tokenizer

RECORD_FILE = "corpus.json"  # of `prepare`, next to the stores
END_OF_DOCUMENT = "end_of_document"  # in it, the id that follows each document


@dataclass(frozen=True)
class Corpus:
    train: tuple[TokenStore, ...]  # one for each source
    valid: Mapping[str, TokenStore]  # by name, the main one first
    vocab_size: int
    tokenizer: Tokenizer | None  # the stores of other tools may have none
    eos: int = EOS  # the token before the first

    @property
    def main_valid(self) -> str:
        """Return the name of the held-out text by which runs are compared."""
        return next(iter(self.valid))

    @property
    def train_tokens(self) -> tuple[int, ...]:
        return tuple(len(store) for store in self.train)

    def held_out_digest(self, tokens: NDArray[Any]) -> str:
        """Return a digest of held-out tokens and their vocabulary: losses can be compared only if it is the same."""
        digest = hashlib.sha256(self._vocabulary.encode())
        for first in range(0, len(tokens), BLOCK):
            digest.update(tokens[first : first + BLOCK].astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def _vocabulary(self) -> str:
        return f"{self.vocab_size} {self.tokenizer.digest if self.tokenizer else 'ids'}"


def open_corpus(data: DataConfig, *, check_ids: bool = True) -> Corpus:
    prefixes = [source.path for source in data.sources]
    train = tuple(open_store(prefix, check=check_ids) for prefix in prefixes)
    valid = {name: open_store(prefix, check=check_ids) for name, prefix in data.held_out.items()}
    owner, tokenizer = _first_tokenizer(prefixes)
    vocab_size = data.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if vocab_size is None:
        raise UserError(
            f"{owner.parent}: no {DICTIONARY_FILE} or {BPE_FILE} next to the token store; "
            f"set data.vocab_size to the number of token ids"
        )
    for prefix in data.prefixes:
        if prefix.parent != owner.parent:
            check_same_tokenizer(tokenizer, prefix, f"{owner}")
    if check_ids:
        for store in (*train, *valid.values()):
            store.check_ids(vocab_size)
    return Corpus(train, valid, vocab_size, tokenizer, tokenizer.eos if tokenizer else EOS)


def open_text(run: RunConfig, *, check_ids: bool = True) -> tuple[RunConfig, Corpus]:
    """Open the corpus of a run, and return the run with what its text decides: cutoffs and the end of documents."""
    corpus = open_corpus(run.data, check_ids=check_ids)
    return separate_documents(run.with_vocabulary(corpus.vocab_size), corpus)


def separate_documents(run: RunConfig, corpus: Corpus) -> tuple[RunConfig, Corpus]:
    """If documents must not see each other, return the run with the token that ends them, and the corpus with a text
    that begins as if a document had just ended."""
    if not run.data.reset_at_documents:
        return run, corpus
    token = run.model.document_end
    if token is None:
        token = _recorded_document_end(run.data.prefixes)
    if token >= corpus.vocab_size:
        raise UserError(f"model.document_end: is {token}, outside the vocabulary of {corpus.vocab_size}")
    return run.with_document_end(token), replace(corpus, eos=token)


def _recorded_document_end(prefixes: Sequence[Path]) -> int:
    """Return the token that ends the documents of all these stores."""
    found = {prefix: _end_of_documents_in(prefix.parent / RECORD_FILE) for prefix in prefixes}
    for prefix, token in found.items():
        if token is None:
            raise UserError(
                f"data.reset_at_documents: is true, but nothing says which token ends a document of {prefix}; "
                "prepare it with --end-of-document TOKEN, or set model.document_end to its id"
            )
        if token != found[prefixes[0]]:
            raise UserError(
                f"data.reset_at_documents: documents of {prefix} end with token {token}, those of {prefixes[0]} with "
                f"{found[prefixes[0]]}; prepare them alike"
            )
    token = found[prefixes[0]]
    assert token is not None
    return token


def _end_of_documents_in(path: Path) -> int | None:
    try:
        found = parse_json(path.read_text(encoding="utf-8")).get(END_OF_DOCUMENT)
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not the record of a corpus ({error}); prepare the corpus again") from None
    return found if isinstance(found, int) else None


def first_token(model: ModelConfig, tokenizer: Tokenizer | None) -> int:
    """Return the token before the first one of a text: it begins as if a document or a line had just ended."""
    if model.document_end is not None:
        return model.document_end
    return tokenizer.eos if tokenizer else EOS


def check_same_tokenizer(tokenizer: Tokenizer | None, prefix: Path, owner: str) -> None:
    """Refuse a store of another tokenizer: its ids are other words, even if they are in range. A store without a
    tokenizer is accepted. `owner` says in the message whose tokenizer is expected."""
    found = tokenizer_beside(prefix)
    if tokenizer is not None and found is not None and tokenizer.digest != found.digest:
        raise UserError(f"{prefix}: was prepared with another tokenizer than {owner}; prepare it with --dictionary")


def keep_tokenizer(corpus: Corpus, folder: Path) -> None:
    """Save a copy of the tokenizer in the run's folder, which outlives the corpus. A changed tokenizer is refused."""
    if corpus.tokenizer is None:
        return
    if (kept := tokenizer_beside(RunFolder(folder).run_file)) is None:
        corpus.tokenizer.save(folder)
    elif kept.digest != corpus.tokenizer.digest:
        raise UserError(
            f"{folder}: the corpus has been prepared with another tokenizer since; prepare it with --dictionary "
            f"{folder}, or choose another output.path"
        )


def tokenizer_of_run(folder: Path, data: DataConfig) -> Tokenizer | None:
    """Return the copy in the run's folder, or else the tokenizer of its corpus."""
    return tokenizer_beside(RunFolder(folder).run_file) or tokenizer_of(data)


def tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of the training text; None if no source has one."""
    return _first_tokenizer([source.path for source in data.sources])[1]


def _first_tokenizer(prefixes: Sequence[Path]) -> tuple[Path, Tokenizer | None]:
    """Return the first store with a tokenizer next to it; without any, the first store and None."""
    for prefix in prefixes:
        if (tokenizer := tokenizer_beside(prefix)) is not None:
            return prefix, tokenizer
    return prefixes[0], None


def tokenizer_beside(prefix: Path) -> Tokenizer | None:
    folder = prefix.parent
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return load_tokenizer(folder)
    return None
