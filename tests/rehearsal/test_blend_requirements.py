"""What is checked without a launch knows every source of a blend."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_style.config.run import RunConfig
from megatron_style.data.store import TokenStoreWriter, store_files
from megatron_style.planning.text import text_facts
from megatron_style.rehearsal.findings import judge_corpus
from megatron_style.rehearsal.rehearsal import _typical_ids
from megatron_style.rehearsal.requirements import demands_of, judge_run
from tests.support.blends import blend_in, with_data, write_blend
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE


def blend_run(folder: Path) -> RunConfig:
    write_blend(folder)
    texts = {"news": str(folder / "news" / "valid"), "books": str(folder / "books" / "valid")}
    run = tiny_run(stages=[{"segment_length": 8, "steps": 7}], tokens_per_batch=96)
    return with_data(run, train=blend_in(folder), valid=texts, vocab_size=VOCAB_SIZE)


def test_all_stores_are_demanded_and_a_missing_one_is_named(tmp_path: Path) -> None:
    run = blend_run(tmp_path)
    stores = [tmp_path / source / split for split in ("train", "valid") for source in ("news", "books")]
    wanted = {path for store in stores for path in store_files(store)}
    assert set(demands_of(run).files) == wanted
    assert judge_run(run, 2).message == "7 steps on 2 process(es)"
    (tmp_path / "books" / "train.bin").unlink()
    assert f"cannot read {tmp_path / 'books' / 'train.bin'};" in judge_corpus(run, 2).message


def test_a_rehearsal_has_ids_of_all_sources(tmp_path: Path) -> None:
    """And a plan the vocabulary shares of their blend, not of their sum."""
    run = blend_run(tmp_path)
    for name, first in (("news", 0), ("books", 20)):  # the third band is that of books alone
        with TokenStoreWriter(tmp_path / name / "train", VOCAB_SIZE) as writer:
            size = 1200 if name == "news" else 260
            writer.append(first + np.arange(size) % 10, np.array([size]))
    facts = text_facts(run)
    ids = _typical_ids(run, facts)
    assert len(ids) == 96
    assert (ids >= 20).sum() == 32
    assert (ids[:48] >= 20).any()  # of which a micro-batch takes the first
    np.testing.assert_allclose(facts.band_shares, (2 / 3, 0, 1 / 3))
