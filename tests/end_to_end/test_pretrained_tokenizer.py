"""An existing tokenizer, from `prepare` to the exported model: everywhere the ids that its own library gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron_style.base.errors import UserError
from megatron_style.convert import main as convert
from megatron_style.data.pretrained import PretrainedTokenizer, import_tokenizer
from megatron_style.data.store import open_store
from megatron_style.data.tokenizer import load_tokenizer
from megatron_style.evaluate import main as evaluate
from megatron_style.generate import main as generate
from megatron_style.prepare import main as prepare
from tests.support.tiny import run_here, tiny_config, write_tiny_model

pytestmark = pytest.mark.slow
END = "<|endoftext|>"
DOCUMENTS = ["The cat sat.\n\nOn the mat, straße 猫.", f"A literal {END} is text.", " leading and trailing \n", "x"]


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Write a folder as `save_pretrained` does, of a tokenizer that adds tokens by itself and has a gap in its ids."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>", END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    model.train_from_iterator(["the cat sat on the mat"] * 30, trainer)
    model.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    folder = tmp_path / "theirs"
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def their_ids(folder: Path, text: str) -> list[int]:
    library = PreTrainedTokenizerFast.from_pretrained(folder)
    ids: list[int] = library(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


@pytest.fixture
def corpus(tmp_path: Path, pretrained: Path) -> Path:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    done = run_here(
        prepare, "--train", path, "--valid", path, "--tokenizer", pretrained, "--output", tmp_path / "out", "--json"
    )
    assert done.code == 0, done.err
    assert json.loads(done.out)["tokenizer"] == "pretrained"
    return tmp_path / "out"


def test_documents_have_the_librarys_ids_and_its_end_token(corpus: Path, pretrained: Path) -> None:
    tokenizer = load_tokenizer(corpus)
    expected = [[*their_ids(pretrained, text), tokenizer.eos] for text in DOCUMENTS]
    store = open_store(corpus / "train", tokenizer.vocab_size)
    assert store.tokens.tolist() == [i for document in expected for i in document]
    assert np.diff(np.load(corpus / "train.documents.npy"), prepend=0).tolist() == list(map(len, expected))
    assert tokenizer.decode(store.tokens) == "".join(f"{text}\n" for text in DOCUMENTS)
    assert tokenizer.vocab_size % 8 == 0
    assert json.loads((corpus / "corpus.json").read_text())["eos"] == tokenizer.eos == 1


def test_a_plain_text_file_is_one_document(tmp_path: Path, pretrained: Path) -> None:
    (tmp_path / "x.txt").write_text("The cat\nsat.\n")
    flags = ("--train", tmp_path / "x.txt", "--valid", tmp_path / "x.txt", "--tokenizer", pretrained / "tokenizer.json")
    assert run_here(prepare, *flags, "--output", tmp_path / "out").code == 0
    expected = [*their_ids(pretrained, "The cat\nsat.\n"), 1]
    assert open_store(tmp_path / "out" / "train").tokens.tolist() == expected


def test_evaluation_generation_and_the_export_use_it(tmp_path: Path, corpus: Path, pretrained: Path) -> None:
    tokenizer = load_tokenizer(corpus)
    config = tiny_config().model_copy(update={"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos})
    write_tiny_model(tmp_path / "model", config, tokenizer)
    measured = run_here(evaluate, tmp_path / "model", "--data", corpus / "valid", "--mode", "cached", "--json")
    assert measured.code == 0, measured.err
    assert json.loads(measured.out)["tokens"] == len(open_store(corpus / "valid"))
    words = ("--prompt", DOCUMENTS[0], "--tokens", 5, "--json")
    written = run_here(generate, tmp_path / "model", *words)
    assert written.code == 0, written.err
    exported = tmp_path / "hf"
    done = run_here(convert, "export-hf", tmp_path / "model", "--output", exported)
    assert done.code == 0, done.err
    library = PreTrainedTokenizerFast.from_pretrained(exported)
    for text in DOCUMENTS:
        assert library(text)["input_ids"] == tokenizer.encode(text) == their_ids(pretrained, text)
        assert library.decode(library(text)["input_ids"]) == text
    assert library.eos_token_id == json.loads((exported / "config.json").read_text())["eos_token_id"] == 1
    assert run_here(convert, "export", exported, "--output", tmp_path / "back").code == 0
    assert load_tokenizer(tmp_path / "back").digest == tokenizer.digest


def test_a_prepared_tokenizer_is_used_again(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "y.txt").write_text("the mat\n")
    flags = ("--train", tmp_path / "y.txt", "--valid", tmp_path / "y.txt", "--dictionary", corpus)
    assert run_here(prepare, *flags, "--output", tmp_path / "again").code == 0
    assert load_tokenizer(tmp_path / "again").digest == load_tokenizer(corpus).digest


def test_ids_with_gaps_are_kept(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9, "</s>": 4, "?": 5}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = import_tokenizer(tmp_path / "tokenizer.json", "</s>")
    assert (tokenizer.vocab_size, tokenizer.encode("b a z"), tokenizer.eos) == (16, [9, 0, 5], 4)
    tokenizer.save(tmp_path)
    assert PretrainedTokenizer.load(tmp_path / "pretrained_tokenizer.json").digest == tokenizer.digest


def test_what_cannot_be_used_is_refused(tmp_path: Path, pretrained: Path, corpus: Path) -> None:
    (tmp_path / "x.txt").write_text("x\n")
    inputs = ("--train", tmp_path / "x.txt", "--valid", tmp_path / "x.txt", "--output", tmp_path / "new")

    def refusal(*flags: object) -> str:
        done = run_here(prepare, *inputs, *flags)
        assert done.code == 2
        return done.err

    assert "no tokenizer.json there; write one with transformers" in refusal("--tokenizer", tmp_path / "nowhere")
    assert "--vocab-size 99 has no effect on --tokenizer" in refusal("--tokenizer", pretrained, "--vocab-size", 99)
    assert "has no token '<end>'" in refusal("--tokenizer", pretrained, "--end-of-document", "<end>")
    assert "use --dictionary" in refusal("--tokenizer", corpus)
    (pretrained / "tokenizer_config.json").write_text("[]")
    assert "holds a list; expected a JSON object" in refusal("--tokenizer", pretrained)
    (pretrained / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    assert import_tokenizer(pretrained).eos == 1
    (pretrained / "tokenizer_config.json").unlink()
    assert "names no end token" in refusal("--tokenizer", pretrained)
    (pretrained / "tokenizer.json").write_text("{}")
    assert "not a tokenizer file" in refusal("--tokenizer", pretrained)
    (tmp_path / "pretrained_tokenizer.json").write_text('{"eos": 3}')
    with pytest.raises(UserError, match="not a tokenizer as `prepare --tokenizer PATH` keeps it"):
        load_tokenizer(tmp_path)
