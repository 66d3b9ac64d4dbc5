"""Text is read with the tokenizer it was written with: a run keeps its own, and another one is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_style import convert, evaluate, generate
from megatron_style.data.tokenizer import load_tokenizer
from megatron_style.data.word_dictionary import WordDictionary
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.resuming import make_run, train_until
from tests.support.tiny import expect_refusal, run_here, tiny_dictionary
from tests.support.training import VOCAB_SIZE, write_corpus

OTHER = WordDictionary({f"v{i}": 100 - i for i in range(VOCAB_SIZE - 4)})  # as many words, all of them other ones


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    tiny_dictionary(VOCAB_SIZE).save(tmp_path)
    return tmp_path


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"steps": 4, "vocab_size": None} | more


def test_a_run_keeps_its_tokenizer(folder: Path) -> None:
    run = make_run(folder, **settings(folder))
    run_ranks(1, train, run)
    assert load_tokenizer(run.output.path).digest == tiny_dictionary(VOCAB_SIZE).digest
    OTHER.save(folder)  # the corpus is prepared anew
    shutil.rmtree(run.output.path / "model")
    told = run_here(generate.main, run.output.path, "--prompt", "w1 w2", "--tokens", 3)
    assert told.code == 0, told.err
    assert "v" not in told.out
    assert run_here(convert.main, "export", run.output.path, "--output", folder / "exported").code == 0
    assert load_tokenizer(folder / "exported").digest == tiny_dictionary(VOCAB_SIZE).digest


def test_a_run_does_not_resume_with_another(folder: Path) -> None:
    run_ranks(1, train_until, make_run(folder, **settings(folder)), 2)
    OTHER.save(folder)
    with pytest.raises(Exception, match="the corpus has been prepared with another tokenizer since"):
        run_ranks(1, train, make_run(folder, **settings(folder)))


def test_held_out_text_of_another_is_refused(folder: Path) -> None:
    run = make_run(folder, **settings(folder))
    run_ranks(1, train, run)
    other = folder / "other"
    other.mkdir()
    write_corpus(other)
    OTHER.save(other)
    flags = ("--data", other / "valid", "--mode", "cached")
    expect_refusal(run_here(evaluate.main, run.output.path, *flags), "was prepared with another tokenizer than")
    elsewhere = run.model_copy(update={"data": run.data.model_copy(update={"valid": other / "valid"})})
    elsewhere = elsewhere.model_copy(update={"output": run.output.model_copy(update={"path": folder / "new"})})
    with pytest.raises(Exception, match="was prepared with another tokenizer than"):
        run_ranks(1, train, elsewhere)
