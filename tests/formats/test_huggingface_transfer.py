"""A folder for transformers is certified, comes back unchanged, and is refused when it is damaged."""

from __future__ import annotations

import json
import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.convert import main
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.formats.formats import open_model
from megatron_style.formats.huggingface import folder as huggingface
from megatron_style.formats.huggingface import modeling_shortformer
from megatron_style.formats.huggingface.modeling_shortformer import ShortformerForCausalLM
from megatron_style.formats.source import ModelSource
from tests.support.exported import (
    KINDS,
    TEXTS,
    VARIANTS,
    byte_pairs,
    export,
    name_of,
    source_of,
    words,
)
from tests.support.tiny import (
    VOCAB_SIZE,
    Done,
    content,
    expect_refusal,
    read_model,
    run_here,
    tiny_config,
    tiny_dictionary,
    tiny_model,
    weights_of,
    write_tiny_model,
)

# There and back


def command(*words: object) -> Done:
    return run_here(main, *words)


@pytest.mark.parametrize("tokenizer", [words(), byte_pairs(), None], ids=["words", "bpe", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, kind: str, tokenizer: Tokenizer | None) -> None:
    """Settings that are not the defaults, too."""
    size = max(VOCAB_SIZE, tokenizer.vocab_size if tokenizer else 0)
    dropout = {"hidden": 0.1, "attention": 0.2, "activation": 0.3, "softmax": 0.05}
    config = tiny_config(kind, positions="added", dropout=dropout)
    config = config.model_copy(update={"vocab_size": size, "eos": 3, "cache_length": 4, "step": 77})
    huggingface.write(tmp_path / "hf", source_of(config, tokenizer))
    assert command("export", tmp_path / "hf", "--output", tmp_path / "back").code == 0
    assert command("export-hf", tmp_path / "back", "--output", tmp_path / "again").code == 0
    model, found = read_model(tmp_path / "back")
    assert found == config
    for name, tensor in weights_of(tiny_model(config, torch.float32)).items():
        assert torch.equal(weights_of(model)[name], tensor), name
    (tmp_path / "again" / "certificate.json").unlink()
    assert content(tmp_path / "again") == content(tmp_path / "hf")
    assert not tokenizer or content_of(tokenizer, tmp_path / "ours") <= content(tmp_path / "back").items()


def content_of(tokenizer: Tokenizer, folder: Path) -> Any:
    folder.mkdir()
    tokenizer.save(folder)
    return content(folder).items()


@pytest.mark.parametrize("tokenizer", [words(), byte_pairs()], ids=["words", "bpe"])
def test_what_the_library_has_saved_again_is_read_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = tiny_config("untied").model_copy(update={"vocab_size": tokenizer.vocab_size})
    export(tmp_path / "hf", config, tokenizer)
    ShortformerForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=False).save_pretrained(tmp_path / "saved")
    source = open_model(tmp_path / "saved")
    found = source.tokenizer()
    assert source.config == config
    assert source.digest() == source_of(config).digest()
    assert found is not None
    assert (found.kind, found.vocab_size) == (tokenizer.kind, tokenizer.vocab_size)
    assert [found.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_the_optimizer_is_left_out(tmp_path: Path) -> None:
    training = {"training": {"optimizer": "nag", "learning_rate": 0.5}}
    config = ModelFolderConfig.parse(tiny_config().as_data() | training, source="test")
    huggingface.write(tmp_path / "hf", source_of(config))
    source = huggingface.read(tmp_path / "hf")
    assert (source.config, source.state) == (tiny_config(), None)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """While one is asked for, the one before may still be there, but no other."""
    weights, alive = weights_of(tiny_model(tiny_config(), torch.float32)), weakref.WeakSet[Tensor]()

    def weight(name: str) -> Tensor:
        assert len(alive) <= 1
        tensor = weights[name].clone()
        alive.add(tensor)
        return tensor

    huggingface.write(tmp_path / "hf", ModelSource(tmp_path, tiny_config(), weight, lambda: None))


# The certificate


def certificate(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return facts


@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
def test_the_library_itself_certifies(tmp_path: Path, config: ModelFolderConfig) -> None:
    write_tiny_model(tmp_path / "model", config)
    for _ in range(2):  # the second one takes the place of the first
        assert command("export-hf", tmp_path / "model", "--output", tmp_path / "hf").code == 0
    found = certificate(tmp_path / "hf")
    assert (found["passed"], found["largest_weight_difference"]) == (True, 0)
    assert re.fullmatch(r"transformers \d+\.\d+\.\d+", found["computed_by"])


def test_long_segments_are_cut_alike_on_both_sides(tmp_path: Path) -> None:
    config = tiny_config().model_copy(update={"segment_length": 150, "cache_length": 140})
    write_tiny_model(tmp_path / "model", config)
    assert command("export-hf", tmp_path / "model", "--output", tmp_path / "hf").code == 0
    assert certificate(tmp_path / "hf")["tokens"] == 3 * 128
    assert huggingface.read(tmp_path / "hf").config == config


def test_code_that_computes_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = modeling_shortformer.sinusoids
    monkeypatch.setattr(modeling_shortformer, "sinusoids", lambda positions, size: shifted(positions + 1, size)[1:])
    write_tiny_model(tmp_path / "model")
    done = command("export-hf", tmp_path / "model", "--output", tmp_path / "hf")
    assert (done.code, "above the tolerance of 1e-09" in done.err) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf.failed", "model"]


def test_without_the_library_the_certificate_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, modeling_shortformer.__name__)
    write_tiny_model(tmp_path / "model")
    assert command("export-hf", tmp_path / "model", "--output", tmp_path / "hf").code == 0
    assert "transformers cannot be imported" in certificate(tmp_path / "hf")["computed_by"]


# What it refuses


def settings_with(**changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))

    return damage


def holding(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 3000)


BAD_FOLDERS = {
    "a missing setting": (settings_with(positions=...), "config.json: lacks 'positions'"),
    "no line end": (settings_with(eos_token_id=...), "config.json: lacks 'eos_token_id'"),
    "another size": (settings_with(ffn_size=31), "up.weight is [32, 16], config.json wants [31, 16]"),
    "another vocabulary": (settings_with(vocabulary={"kind": "tied"}), "its tensors are not those of its config.json"),
    "too few tokens": (settings_with(vocab_size=15), "config.json: vocab_size is 15; it must be above"),
    "a word for a number": (settings_with(layers="two"), 'config.json: model.layers is "two"'),
    "half a file of settings": (holding("config.json", '{"model_type": "shortf'), "config.json: not valid JSON"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "half the weights": (truncated, "model.safetensors: not a complete safetensors file"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS.keys())
def test_a_damaged_folder_is_named_in_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(export(tmp_path / "hf", tiny_config(), tiny_dictionary()))
    expect_refusal(command("export", tmp_path / "hf", "--output", tmp_path / "out"), tmp_path / "hf", message)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE"}}', '{"model": {}}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    export(tmp_path / "hf", tiny_config(), byte_pairs())
    holding("tokenizer.json", text)(tmp_path / "hf")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer file as `"):
        open_model(tmp_path / "hf").tokenizer()


def test_a_folder_of_another_model_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    settings_with(model_type="gpt2")(export(tmp_path / "hf", tiny_config()))
    assert not huggingface.recognises(tmp_path / "hf")
    assert not huggingface.recognises(tmp_path / "nowhere")
