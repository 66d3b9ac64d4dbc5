"""Two corpora are distinguished by what makes losses comparable: the held-out tokens and their meaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_style.base.errors import UserError
from megatron_style.config.data import DataConfig, SourceConfig
from megatron_style.data.batch import read_batch
from megatron_style.data.corpus import Corpus, open_corpus
from megatron_style.data.word_dictionary import WordDictionary
from megatron_style.schedule.passes import Reading
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
    tokens = plain.valid[""].tokens
    assert plain.held_out_digest(tokens) == again.held_out_digest(tokens.astype(np.int32))
    digests = {corpus.held_out_digest(tokens) for corpus in (plain, spelled, otherwise)}
    digests.add(plain.held_out_digest(tokens[:-1]))
    assert len(digests) == 4


def test_the_sources_of_a_blend_have_one_tokenizer(tmp_path: Path) -> None:
    """A source without one is accepted, wherever it is in the list."""
    words = {f"w{number}": 1 for number in range(VOCAB_SIZE - 4)}
    others = {f"v{number}": 1 for number in range(VOCAB_SIZE - 4)}
    folders = {"plain": None, "spelled": words, "same": words, "otherwise": others}
    for name, dictionary in folders.items():
        corpus_in(tmp_path / name, dictionary)

    def blend(*names: str) -> Corpus:
        sources = tuple(SourceConfig(path=tmp_path / name / "train", weight=1.0) for name in names)
        return open_corpus(DataConfig(train=sources, valid=tmp_path / "plain" / "valid", vocab_size=VOCAB_SIZE))

    found = blend("plain", "spelled", "same")
    assert found.tokenizer is not None
    assert found.train_tokens == (1200, 1200, 1200)
    with pytest.raises(UserError, match=r"otherwise/train: was prepared with another tokenizer than .*spelled/train"):
        blend("plain", "spelled", "otherwise")


def test_a_row_is_read_from_its_source() -> None:
    streams = [np.arange(100), np.arange(500, 600)]
    places = np.array([[0, 1, 2], [7, 8, 8], [0, 1, 2]])
    batch = read_batch(streams, Reading(places, np.array([3, 2, 3]), np.array([0, 0, 1]), places[:, 0]), eos=9)
    assert batch.inputs.tolist() == [[9, 0, 1], [6, 7, 7], [9, 500, 501]]
    assert batch.targets.tolist() == [[0, 1, 2], [7, 8, 8], [500, 501, 502]]
    assert batch.counted.sum(axis=1).tolist() == [3, 2, 3]
