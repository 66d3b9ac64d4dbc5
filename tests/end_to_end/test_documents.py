"""A run whose documents do not see each other: prepared, trained, resumed, evaluated, written, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.convert import main as convert
from megatron_style.data.corpus import open_corpus, separate_documents
from megatron_style.evaluate import main as evaluate
from megatron_style.generate import main as generate
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.prepare import main as prepare
from megatron_style.train import train
from tests.support.runs import tiny_run
from tests.support.tiny import read_model, run_here
from tests.support.training import train_on

pytestmark = pytest.mark.slow


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    records = []
    for _ in range(60):
        words = " ".join(f"w{number}" for number in rng.integers(0, 20, rng.integers(1, 30)))
        records.append(json.dumps({"text": words}) + "\n")
    (tmp_path / "x.jsonl").write_text("".join(records))
    inputs = ("--train", tmp_path / "x.jsonl", "--valid", tmp_path / "x.jsonl")
    done = run_here(prepare, *inputs, "--tokenizer", "words", "--end-of-document", "<s>", "--output", tmp_path / "data")
    assert done.code == 0, done.err
    return tmp_path / "data"


def run_of(corpus: Path, output: str = "run", **sections: Any) -> RunConfig:
    data = {"train": str(corpus / "train"), "valid": str(corpus / "valid"), "reset_at_documents": True}
    out = {"path": str(corpus.parent / output), "evaluate_tokens": 100, "sample_tokens": 4}
    sections = {"model": {"vocabulary": {"kind": "tied"}}} | sections
    sections = {"stages": [{"segment_length": 4, "steps": 6}, {"segment_length": 8, "steps": 4}]} | sections
    rate = {"learning_rate": {"peak": 0.1, "period_steps": 10}}  # whatever the number of steps
    return tiny_run(data=data, output=out, optimizer=rate, **sections)


def test_a_run_from_the_corpus_to_the_text(corpus: Path) -> None:
    run_ranks(1, train, run_of(corpus))
    folder = corpus.parent / "run"
    _, config = read_model(folder / "model")
    assert (config.model.document_end, config.eos) == (0, 0)
    losses = []
    for place in (folder / "model", folder):  # the exported model, and the checkpoint
        for mode in ("cached", "token-by-token"):
            words = ("--data", corpus / "valid", "--mode", mode, "--dtype", "float64", "--json")
            done = run_here(evaluate, place, *words)
            assert done.code == 0, done.err
            losses.append(json.loads(done.out)["loss_nats"])
    assert max(losses) - min(losses) < 1e-9
    written = run_here(generate, folder / "model", "--prompt", "w1 w2", "--tokens", 20)
    assert written.code == 0, written.err
    refused = run_here(convert, "export-hf", folder / "model", "--output", corpus.parent / "hf")
    assert refused.code == 2
    assert "model.document_end is 0, which a folder for transformers cannot hold" in refused.err


def test_a_stopped_run_resumes_as_if_it_had_not_been(corpus: Path) -> None:
    saving = {"save_every": 1, "evaluate_tokens": 50, "sample_tokens": 0}
    run_ranks(1, train, run_of(corpus, "straight"))
    stopped = run_of(corpus, "stopped")
    first = stopped.model_copy(
        update={
            "stages": (stopped.stages[0].model_copy(update={"steps": 4}),),
            "output": stopped.output.model_copy(update=saving),
        }
    )
    run_ranks(1, train, first)
    run_ranks(1, train, stopped)
    straight, _ = read_model(corpus.parent / "straight" / "model")
    resumed, _ = read_model(corpus.parent / "stopped" / "model")
    for (name, one), (_, other) in zip(straight.named_parameters(), resumed.named_parameters(), strict=True):
        assert (one == other).all(), name


@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (2, 2)])
def test_any_grid_trains_the_same(corpus: Path, world: int, tensor: int) -> None:
    data_parallel = world // tensor
    sections = {"model": {"vocabulary": {"kind": "tied"}, "document_end": 0}}

    def run(tokens: int, ways: int) -> RunConfig:
        data = {"train": str(corpus / "train"), "valid": str(corpus / "valid"), "reset_at_documents": True}
        return tiny_run(
            stages=[{"segment_length": 4, "steps": 6}],
            tokens_per_batch=tokens,
            data=data,
            parallel={"tensor": ways},
            output={"path": str(corpus.parent / "grid")},
            **sections,
        )

    one = train_on(1, run(24 * data_parallel, 1))
    many = train_on(world, run(24, tensor))
    np.testing.assert_allclose(many.losses, one.losses, atol=1e-5)
    np.testing.assert_allclose(many.norms, one.norms, rtol=1e-4)


def test_a_corpus_that_names_no_end_is_refused(corpus: Path) -> None:
    record = json.loads((corpus / "corpus.json").read_text())
    (corpus / "corpus.json").write_text(json.dumps(record | {"end_of_document": None}))
    run = run_of(corpus)
    with pytest.raises(UserError, match="nothing says which token ends a document"):
        separate_documents(run, open_corpus(run.data))
    (corpus / "corpus.json").unlink()
    with pytest.raises(UserError, match=r"or set model\.document_end"):
        separate_documents(run, open_corpus(run.data))
    named = run_of(corpus, model={"vocabulary": {"kind": "tied"}, "document_end": 3})
    named, found = separate_documents(named, open_corpus(named.data))
    assert (named.model.document_end, found.eos) == (3, 3)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"memory": {"compressed": 4, "rate": 2}}, "data": {"reset_at_documents": True}}, "model.memory"),
        ({"model": {"document_end": 3}}, "model.document_end is 3, but data.reset_at_documents is false"),
    ],
)
def test_settings_that_contradict_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_run(**sections)
