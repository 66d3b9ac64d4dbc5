"""`convert import-fairseq` as users run it. A checkpoint is untrusted: it is read, never executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_style.convert import main
from megatron_style.data.tokenizer import load_tokenizer
from megatron_style.formats.fairseq import fairseq_names
from tests.support.mutations import Payload
from tests.support.oracle import ORACLE, needs_oracle
from tests.support.tiny import (
    VOCAB_SIZE,
    Done,
    content,
    expect_refusal,
    fairseq_state,
    read_model,
    run_here,
    tiny_config,
    tiny_dictionary,
    tiny_model,
    weights_of,
    write_tiny_model,
)

ROOT = Path(__file__).resolve().parents[2]
Damage = Callable[[Path], object]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a small checkpoint and its dictionary."""
    tiny_dictionary().save(tmp_path)
    torch.save(fairseq_state(), tmp_path / "model.pt")
    return tmp_path


def import_into(folder: Path, name: str = "model.pt", *flags: str) -> Done:
    places = ("--dictionary", folder / "dict.txt", "--output", folder / "out")
    return run_here(main, "import-fairseq", folder / name, *places, *flags)


# What it imports


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
def test_a_checkpoint_becomes_the_same_model(here: Path, kind: str) -> None:
    torch.save(fairseq_state(kind), here / "model.pt")
    done = import_into(here)
    assert (done.code, done.err) == (0, "")
    model, config = read_model(here / "out")
    assert config == tiny_config(kind)
    expected = weights_of(tiny_model(config, torch.float32))
    assert expected.keys() == weights_of(model).keys()
    for name, tensor in weights_of(model).items():
        assert torch.equal(tensor, expected[name]), name
    assert load_tokenizer(here / "out").encode("w7 w0 nonsense") == [11, 4, 3]


def test_half_precision_weights_become_float32(here: Path) -> None:
    state = fairseq_state()
    state["model"] = {name: tensor.half() for name, tensor in state["model"].items()}
    torch.save(state, here / "model.pt")
    assert import_into(here).code == 0
    written = load_file(here / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    for ours, theirs in fairseq_names(tiny_config().model).items():
        assert torch.equal(written[ours], state["model"][theirs].float()), ours


def test_a_checkpoint_in_the_format_before_zip_files_is_read(here: Path) -> None:
    torch.save(fairseq_state(), here / "model.pt", _use_new_zipfile_serialization=False)
    assert import_into(here).code == 0


def test_an_old_model_in_the_same_place_is_replaced_when_asked(here: Path) -> None:
    write_tiny_model(here / "out", tiny_config("tied"))
    expect_refusal(import_into(here), "holds a model of unknown origin; use --overwrite")
    assert import_into(here, "model.pt", "--overwrite").code == 0
    assert read_model(here / "out")[1] == tiny_config()


@needs_oracle
def test_the_result_is_one_json_object(tmp_path: Path) -> None:
    flags = ["--dictionary", ORACLE / "data" / "dict.txt", "--output", tmp_path / "out", "--json"]
    done = run_here(main, "import-fairseq", ORACLE / "ckpt" / "b_final.pt", *flags)
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.out)
    assert (facts["parameters"], facts["vocabulary"], facts["steps"]) == (241_312, 9848, 300)
    assert (tmp_path / "out" / "dict.txt").read_bytes() == (ORACLE / "data" / "dict.txt").read_bytes()


# What it refuses


def rewrite(**settings: Any) -> Damage:
    return lambda folder: torch.save(fairseq_state(**settings), folder / "model.pt")


def with_tensor(name: str, tensor: torch.Tensor | None) -> Damage:
    def damage(folder: Path) -> None:
        state = fairseq_state()
        state["model"].pop(name, None)
        if tensor is not None:
            state["model"][name] = tensor
        torch.save(state, folder / "model.pt")

    return damage


def holding(data: bytes) -> Damage:
    return lambda folder: (folder / "model.pt").write_bytes(data)


def save(value: object) -> Damage:
    return lambda folder: torch.save(value, folder / "model.pt")


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.pt", (folder / "model.pt").stat().st_size // 2)


def corrupted(folder: Path) -> None:
    data = bytearray((folder / "model.pt").read_bytes())
    for at in range(80, 2000, 7):
        data[at] ^= 0x5A
    (folder / "model.pt").write_bytes(data)


def with_a_flipped_bit(folder: Path) -> None:
    data = bytearray((folder / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1  # among the weights
    (folder / "model.pt").write_bytes(data)


def with_a_program(folder: Path) -> None:
    program = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    torch.jit.save(program, str(folder / "model.pt"))


def with_fewer_words(folder: Path) -> None:
    tiny_dictionary(VOCAB_SIZE - 5).save(folder)


SETTINGS, WHOLE = "not a fairseq checkpoint with settings", "truncated, damaged or not a PyTorch file"
BAD_FILES = {
    "no checkpoint": (lambda folder: (folder / "model.pt").unlink(), "model.pt: no such file; a fairseq checkpoint"),
    "no dictionary": (lambda folder: (folder / "dict.txt").unlink(), "dict.txt: no such file; fairseq's dict.txt"),
    "another dictionary": (with_fewer_words, "dict.txt: makes 32 ids, but"),
    "no dictionary but a text": (lambda f: (f / "dict.txt").write_text("It was\n"), "expected `word count`"),
    "a truncated checkpoint": (truncated, WHOLE),
    "a corrupted checkpoint": (corrupted, WHOLE),
    "a flipped bit": (with_a_flipped_bit, WHOLE),
    "an empty file": (holding(b""), WHOLE),
    "a text": (holding(b"It was the best of times, it was the worst of times\n" * 9), WHOLE),
    "random bytes": (holding(random.Random(0).randbytes(500)), WHOLE),
    "a program": (with_a_program, WHOLE),
    "a list": (save([1, 2]), SETTINGS),
    "no settings": (save({"args": None, "model": {}}), SETTINGS),
    "a model that is no dict": (save({"args": fairseq_state()["args"], "model": [1]}), SETTINGS),
    "no tensors": (save({"args": fairseq_state()["args"], "model": {"a": 1}}), SETTINGS),
    "no weights": (save({"args": fairseq_state()["args"], "model": {}}), "lacks 'decoder.embed_tokens.embeddings.0.0"),
    "a final norm": (with_tensor("decoder.layer_norm.weight", torch.ones(16)), "has 'decoder.layer_norm.weight'"),
    "a missing weight": (with_tensor("decoder.layers.1.fc1.bias", None), "lacks 'decoder.layers.1.fc1.bias'"),
    "another shape": (with_tensor("decoder.layers.1.fc1.bias", torch.ones(31)), "1.fc1.bias' is [31], but its settin"),
    "untied tables": (rewrite(tie_adaptive_weights=False), "was trained with tie_adaptive_weights off; only tied"),
    "untied projections": (rewrite(tie_adaptive_proj=False), "was trained with tie_adaptive_proj off; only tied"),
    "tied in name only": (
        with_tensor("decoder.adaptive_softmax.tail.0.2.weight", torch.ones(10, 8)),
        "'decoder.adaptive_softmax.tail.0.2.weight' differs from 'decoder.embed_tokens.embeddings.1.0.weight'",
    ),
    "another activation": (rewrite(activation_fn="gelu"), "was trained with activation_fn gelu; only relu"),
    "norms behind the layers": (rewrite(decoder_normalize_before=False), "only True can be imported"),
    "no positions": (rewrite(no_token_positional_embeddings=True), "only False can be imported"),
    "unscaled vectors": (rewrite(no_scale_embedding=True), "was trained with no_scale_embedding True; only False"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_named_in_one_line(here: Path, damage: Damage, message: str) -> None:
    damage(here)
    before = content(here)
    expect_refusal(import_into(here), here, message)
    assert content(here) == before


@pytest.mark.parametrize("occupant", ["a folder", "a file"])
def test_an_output_that_is_something_else_is_left_alone(here: Path, occupant: str) -> None:
    mine = here / "out" if occupant == "a file" else here / "out" / "thesis.doc"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    before = content(here)
    expect_refusal(import_into(here), here / "out", "exists and is not a model folder; choose another place")
    assert content(here) == before


# What it never runs


def as_pickle(state: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(state, protocol=2))


def as_modern_pickle(state: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(state))


def as_archive(state: object, path: Path) -> None:
    torch.save(state, path)


def as_old_archive(state: object, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("how", ["system", "open", "eval"])
@pytest.mark.parametrize("write", [as_pickle, as_modern_pickle, as_archive, as_old_archive])
def test_code_in_a_checkpoint_is_refused_and_does_not_run(
    here: Path, write: Callable[[object, Path], None], how: str
) -> None:
    marker = here / "marker"
    write({**fairseq_state(), "extra_state": Payload(marker, how)}, here / "model.pt")
    before = content(here)
    expect_refusal(import_into(here), here / "model.pt")
    assert content(here) == before


def test_the_payload_of_these_tests_would_have_worked(here: Path) -> None:
    as_archive({"extra_state": Payload(here / "marker", "eval")}, here / "model.pt")
    torch.load(here / "model.pt", weights_only=False)
    assert (here / "marker").exists()


def test_the_refusal_says_what_wanted_to_run(here: Path) -> None:
    torch.save({**fairseq_state(), "extra_state": Payload(here / "marker", "system")}, here / "model.pt")
    expect_refusal(import_into(here), "wants to run posix.system, so it was not loaded")


@pytest.mark.slow
def test_a_payload_in_a_real_process_is_one_line_without_a_traceback(here: Path) -> None:
    as_modern_pickle({"args": Payload(here / "marker", "system"), "model": {}}, here / "model.pt")
    flags = ["--dictionary", here / "dict.txt", "--output", here / "out"]
    command = [sys.executable, "-m", "megatron_style.convert", "import-fairseq", here / "model.pt", *flags]
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {here}/model.pt: ")
    assert sorted(path.name for path in here.iterdir()) == ["dict.txt", "model.pt"]


def test_what_is_written_holds_no_pickle(here: Path) -> None:
    assert import_into(here).code == 0
    assert sorted(content(here / "out")) == ["certificate.json", "config.json", "dict.txt", "model.safetensors"]
    assert not zipfile.is_zipfile(here / "out" / "model.safetensors")
