"""Two corpora are distinguished by what makes losses comparable: the held-out tokens and their meaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_style.config.run import DataConfig
from megatron_style.data.corpus import Corpus, open_corpus
from megatron_style.data.tokenizer import WordDictionary
from tests.support.training import VOCAB_SIZE, write_corpus


def corpus_in(folder: Path, words: dict[str, int] | None = None) -> Corpus:
    folder.mkdir()
    write_corpus(folder)
    if words is not None:
        WordDictionary(words).save(folder)
    return open_corpus(DataConfig(train=folder / "train", valid=folder / "valid", vocab_size=VOCAB_SIZE))


def test_the_digest_is_that_of_text_and_vocabulary(tmp_path: Path) -> None:
    words = {f"w{number}": 1 for number in range(VOCAB_SIZE - 4)}
    others = {f"v{number}": 1 for number in range(VOCAB_SIZE - 4)}
    plain, again = corpus_in(tmp_path / "plain"), corpus_in(tmp_path / "again")
    spelled, otherwise = corpus_in(tmp_path / "spelled", words), corpus_in(tmp_path / "otherwise", others)
    tokens = plain.valid.tokens
    assert plain.held_out_digest(tokens) == again.held_out_digest(tokens.astype(np.int32))
    digests = {corpus.held_out_digest(tokens) for corpus in (plain, spelled, otherwise)}
    digests.add(plain.held_out_digest(tokens[:-1]))
    assert len(digests) == 4
