"""The prepared text of a run: two token stores and the facts that belong to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_style.config.errors import UserError
from megatron_style.config.run import DataConfig
from megatron_style.data.store import TokenStore, open_store
from megatron_style.data.tokenizer import BPE_FILE, DICTIONARY_FILE, EOS, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Corpus:
    train: TokenStore
    valid: TokenStore
    vocab_size: int
    tokenizer: Tokenizer | None  # stores of other tools may come without one
    eos: int = EOS


def open_corpus(data: DataConfig, *, check_ids: bool = True) -> Corpus:
    train, valid = open_store(data.train), open_store(data.valid)
    tokenizer = tokenizer_beside(data.train)
    vocab_size = data.vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if vocab_size is None:
        raise UserError(
            f"{data.train.parent}: no {DICTIONARY_FILE} or {BPE_FILE} beside the token store; "
            f"set data.vocab_size to the number of token ids"
        )
    if check_ids:
        train.check_ids(vocab_size)
        valid.check_ids(vocab_size)
    return Corpus(train, valid, vocab_size, tokenizer)


def tokenizer_beside(prefix: Path) -> Tokenizer | None:
    folder = prefix.parent
    if any((folder / name).is_file() for name in (DICTIONARY_FILE, BPE_FILE)):
        return load_tokenizer(folder)
    return None
