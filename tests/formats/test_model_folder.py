"""A model folder is complete, or does not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from megatron_style.base.errors import UserError
from megatron_style.data.tokenizer import BpeTokenizer, load_tokenizer
from megatron_style.formats import model_folder
from megatron_style.formats.model_folder import read_config
from tests.support.tiny import (
    content,
    read_model,
    tiny_config,
    tiny_dictionary,
    tiny_model,
    weights_of,
    write_model,
    write_tiny_model,
)


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
def test_what_was_written_is_read_back(tmp_path: Path, kind: str) -> None:
    config = tiny_config(kind)
    weights = weights_of(tiny_model(config, torch.float32))
    write_model(tmp_path / "model", config, weights.__getitem__, None)
    model, read = read_model(tmp_path / "model")
    assert read == config
    assert weights.keys() == weights_of(model).keys()
    for name, tensor in weights_of(model).items():
        assert torch.equal(tensor, weights[name]), name


def test_reading_in_double_precision_keeps_every_bit(tmp_path: Path) -> None:
    config = write_tiny_model(tmp_path / "model")
    model, _ = read_model(tmp_path / "model", torch.float64)
    for name, tensor in weights_of(tiny_model(config, torch.float32)).items():
        assert torch.equal(weights_of(model)[name], tensor.double()), name


def test_weights_that_are_views_of_larger_ones_are_written_alone(tmp_path: Path) -> None:
    weights = weights_of(tiny_model(tiny_config(), torch.float32))
    views = {name: torch.cat([tensor, tensor])[: len(tensor)] for name, tensor in weights.items()}
    write_model(tmp_path / "model", tiny_config(), weights.__getitem__, None)
    write_model(tmp_path / "views", tiny_config(), views.__getitem__, None)
    assert content(tmp_path / "views") == content(tmp_path / "model")


def test_the_tokenizer_travels_along(tmp_path: Path) -> None:
    bpe = BpeTokenizer.train(["some text", "some more text"], vocab_size=264)
    for name, tokenizer in (("words", tiny_dictionary()), ("bpe", bpe)):
        write_tiny_model(tmp_path / name, tokenizer=tokenizer)
        loaded = load_tokenizer(tmp_path / name)
        assert (loaded.kind, loaded.vocab_size) == (name, tokenizer.vocab_size)
        assert loaded.encode("w3 w1 some") == tokenizer.encode("w3 w1 some")


def full_disk(*_: object, **__: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_a_crash_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "write_weights", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_tiny_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_crash_while_replacing_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path / "model")
    before = content(tmp_path)
    monkeypatch.setattr(model_folder, "write_weights", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_tiny_model(tmp_path / "model", tiny_config("tied"))
    assert content(tmp_path) == before


def test_an_existing_model_is_replaced_completely(tmp_path: Path) -> None:
    bpe = BpeTokenizer.train(["some text", "some more text"], vocab_size=264)
    write_tiny_model(tmp_path / "model", tiny_config("untied"), bpe)
    write_tiny_model(tmp_path / "model")
    write_tiny_model(tmp_path / "fresh")
    assert content(tmp_path / "model") == content(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "model"]


@pytest.mark.parametrize("names", [["thesis.doc"], ["thesis.doc", "config.json"], ["model.safetensors"]])
def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "model").mkdir()
    for name in names:
        (tmp_path / "model" / name).write_text("{}")
    before = content(tmp_path)
    with pytest.raises(UserError, match="is not a model folder; choose another place"):
        write_tiny_model(tmp_path / "model")
    assert content(tmp_path) == before


def test_a_file_where_the_folder_should_be_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(UserError, match="is not a model folder"):
        write_tiny_model(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert write_tiny_model(tmp_path / "model") == read_config(tmp_path / "model")


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    with pytest.raises(UserError, match="format_version is 2"):
        read_model(tmp_path / "model")
