"""`evaluate` as users run it: the reference's numbers, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import megatron_style.engine.session  # noqa: F401  once, before ranks are forked
from megatron_style.convert import main as convert
from megatron_style.data.store import TokenStoreWriter
from megatron_style.data.tokenizer import UNK, BpeTokenizer
from megatron_style.evaluate import main
from megatron_style.parallel.local_ranks import run_ranks
from tests.support.launch import launch
from tests.support.oracle import ORACLE, needs_oracle
from tests.support.tiny import VOCAB_SIZE, L, content, expect_refusal, run_here, tiny_config, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
Damage = Callable[[Path], object]
TOKENS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 50)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference's models as model folders."""
    folder = tmp_path_factory.mktemp("imported")
    for name in ("a_final", "b_final", "c_final", "d_final"):
        flags = ["--dictionary", ORACLE / "data" / "dict.txt", "--output", folder / name]
        assert run_here(convert, "import-fairseq", ORACLE / "ckpt" / f"{name}.pt", *flags).code == 0
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a small model and a small token store."""
    write_tiny_model(tmp_path / "model")
    write_store(tmp_path / "valid", TOKENS)
    return tmp_path


def write_store(prefix: Path, tokens: NDArray[np.int64], vocab_size: int = VOCAB_SIZE) -> None:
    with TokenStoreWriter(prefix, vocab_size) as writer:
        writer.append(tokens, np.array([len(tokens)]))


# What it measures


REFERENCE = {
    "b_cached": ("b_final", ["--mode", "cached"], 1e-9),
    "b_cache16": ("b_final", ["--mode", "cached", "--cache-length", "16"], 1e-9),
    "c_cached": ("c_final", ["--mode", "cached"], 1e-9),
    "a_nonoverlap": ("a_final", ["--mode", "nonoverlapping"], 1e-9),
    "d_cached": ("d_final", ["--mode", "cached"], 1e-5),  # recorded in float32
}


@pytest.mark.slow
@needs_oracle
@pytest.mark.parametrize(
    "record",  # tests/model/test_reference_parity.py has all of them, without the command
    ["a_nonoverlap", "b_cache16", *(pytest.param(name, marks=pytest.mark.sweep) for name in REFERENCE)],
)
def test_every_token_costs_what_it_cost_the_reference(tmp_path: Path, imported: Path, record: str) -> None:
    model, mode, tolerance = REFERENCE[record]
    flags = ["--data", ORACLE / "data" / "valid", *mode, "--dtype", "float64", "--nll", tmp_path / "out.npz", "--json"]
    done = run_here(main, imported / model, *flags)
    assert (done.code, done.err) == (0, "")
    written, expected = np.load(tmp_path / "out.npz"), np.load(ORACLE / "nll" / f"{record}.npz")
    nll = expected["nll_f64"] if "nll_f64" in expected else expected["nll_f32"]
    assert (written["nll"].dtype, written["tokens"].dtype) == (np.float64, np.int32)
    assert np.abs(written["nll"] - nll).max() < tolerance
    np.testing.assert_array_equal(written["tokens"], np.load(ORACLE / "nll" / "valid_targets.npz")["tokens"])
    assert json.loads(done.out)["loss_nats"] == pytest.approx(nll.mean(), abs=tolerance)


def test_the_result_is_one_json_object(tiny: Path) -> None:
    done = run_here(main, tiny / "model", "--data", tiny / "valid", "--mode", "cached", "--json")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    facts = json.loads(done.out)
    assert facts["perplexity"] == pytest.approx(math.exp(facts["loss_nats"]))
    assert facts["loss_bits"] == pytest.approx(facts["loss_nats"] / math.log(2))
    assert (facts["tokens"], facts["context_min"], facts["context_max"]) == (50, L + 1, 2 * L)
    assert facts["tokens_per_second"] > 0


def test_without_a_mode_the_models_own_is_used(tiny: Path) -> None:
    with_cache = json.loads(run_here(main, tiny / "model", "--data", tiny / "valid", "--json").out)
    assert with_cache["mode"] == "cached"
    shutil.rmtree(tiny / "model")
    config = tiny_config()
    plain = config.model.model_copy(update={"cache": False})
    write_tiny_model(tiny / "model", config.model_copy(update={"model": plain, "cache_length": 0}))
    without = json.loads(run_here(main, tiny / "model", "--data", tiny / "valid", "--json").out)
    assert without["mode"] == "nonoverlapping"


def test_the_share_of_unknown_tokens_is_reported(tiny: Path) -> None:
    write_store(tiny / "strange", np.array([5, UNK, 6, UNK, 7, 8, 9, 2]))
    facts = json.loads(run_here(main, tiny / "model", "--data", tiny / "strange", "--json").out)
    assert facts["unknown_share"] == 0.25


def test_without_json_the_same_numbers_are_lines_for_people(tiny: Path) -> None:
    done = run_here(main, tiny / "model", "--data", tiny / "valid", "--mode", "nonoverlapping")
    assert (done.code, done.err) == (0, "")
    names = {line.split("  ")[0] for line in done.out.splitlines()}
    assert {"loss nats", "loss bits", "perplexity", "tokens", "context min", "tokens per second"} <= names


@pytest.mark.parametrize("length", [1, L - 1, L])
@pytest.mark.parametrize("mode", ["cached", "nonoverlapping"])
def test_a_text_of_one_segment_at_most_is_scored_the_same_in_every_mode(tiny: Path, mode: str, length: int) -> None:
    write_store(tiny / "short", TOKENS[:length])
    flags = ["--mode", mode, "--nll", tiny / "short.npz"]
    assert run_here(main, tiny / "model", "--data", tiny / "short", *flags).code == 0
    assert run_here(main, tiny / "model", "--data", tiny / "valid", "--mode", "cached", "--nll", tiny / "all").code == 0
    np.testing.assert_allclose(np.load(tiny / "short.npz")["nll"], np.load(tiny / "all")["nll"][:length], rtol=1e-5)


def test_a_text_shorter_than_a_segment_is_scored_with_a_note(tiny: Path) -> None:
    write_store(tiny / "short", TOKENS[: L - 1])
    done = run_here(main, tiny / "model", "--data", tiny / "short", "--mode", "cached", "--json")
    assert done.code == 0
    assert done.err == f"note: the text has {L - 1} tokens, less than a segment of {L}, so no prediction sees more\n"
    assert (json.loads(done.out)["context_min"], json.loads(done.out)["context_max"]) == (1, L - 1)


def test_words_and_tokens_are_two_counts(tiny: Path) -> None:
    """Two byte pairs a word: the loss of a word is that of its tokens."""
    text = ["one two three"] * 50
    tokenizer = BpeTokenizer.train(text, 264)
    ids = np.array([i for line in text[:3] for i in tokenizer.encode_line(line)])
    config = tiny_config().model_copy(update={"vocab_size": tokenizer.vocab_size})
    shutil.rmtree(tiny / "model")
    write_tiny_model(tiny / "model", config, tokenizer)
    write_store(tiny / "bpe", ids, tokenizer.vocab_size)
    facts = json.loads(run_here(main, tiny / "model", "--data", tiny / "bpe", "--mode", "cached", "--json").out)
    assert facts["words"] == 3 * 4 < facts["tokens"] == len(ids)  # three words and a line end, three times
    assert math.log(facts["perplexity_per_word"]) * 12 == pytest.approx(math.log(facts["perplexity"]) * len(ids))


@pytest.mark.parametrize("mode", [["nonoverlapping"], ["cached"], ["sliding", "--stride", "2"]])
def test_the_loss_by_position_is_a_table_and_a_picture(tiny: Path, mode: list[str]) -> None:
    flags = ["--mode", *mode, "--by-position", tiny / "places.png"]
    done = run_here(main, tiny / "model", "--data", tiny / "valid", *flags, "--nll", tiny / "nll.npz", "--json")
    nll, facts = np.load(tiny / "nll.npz")["nll"], json.loads(done.out)
    if mode[0] == "sliding":  # behind the first window, only its last two positions count
        places = [*range(L), *(L - 2 + i % 2 for i in range(len(nll) - L))]
    else:
        places = [i % L for i in range(len(nll))]
    expected = [nll[[place == wanted for place in places]].mean() for wanted in range(L)]
    assert facts["by_position"] == pytest.approx(expected)
    assert (tiny / "places.png").read_bytes().startswith(b"\x89PNG")
    table = run_here(main, tiny / "model", "--data", tiny / "valid", *flags).out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["position", "1", "2", "3-4", f"5-{L}"]


def test_half_precision_comes_close(tiny: Path) -> None:
    losses = []
    for dtype in ("float32", "bfloat16"):
        flags = ["--mode", "cached", "--dtype", dtype, "--json"]
        losses.append(json.loads(run_here(main, tiny / "model", "--data", tiny / "valid", *flags).out)["loss_nats"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)


# What it refuses


def without_config(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def with_config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def with_torn_config(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(path.read_text()[:40])


def a_file_for_a_model(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    (folder / "model").write_text("a model")


def without_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def cut(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 10)


def with_another_shape(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    save_file(load_file(path) | {"blocks.1.up.bias": torch.zeros(33)}, path)


def with_another_tensor(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    save_file(load_file(path) | {"blocks.1.sideways": torch.zeros(3)}, path)


def without_store(folder: Path) -> None:
    (folder / "valid.bin").unlink()


def index_of(data: bytes) -> Damage:
    return lambda folder: (folder / "valid.idx").write_bytes(data)


def with_a_foreign_id(folder: Path) -> None:
    write_store(folder / "valid", np.array([1, 2, 40]), vocab_size=50)


def with_added_positions(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    write_tiny_model(folder / "model", tiny_config(positions="added", cache=False))


def nothing(folder: Path) -> None:
    """The flags alone are wrong."""


DAMAGED = {
    "no model folder": (
        lambda folder: shutil.rmtree(folder / "model"),
        ["model: no such file or folder; a model is expected: "],
    ),
    "a file": (a_file_for_a_model, ["model: is not a model in any known form"]),
    "no config": (without_config, ["model: is not a model in any known form"]),
    "an unknown key": (with_config(segment_lenght=3), ["config.json: segment_lenght", "did you mean 'segment_length'"]),
    "a config that is no object": (lambda f: (f / "model/config.json").write_text("[]"), ["config.json"]),
    "a torn config": (with_torn_config, ["config.json: not valid JSON"]),
    "cutoffs beyond the vocabulary": (with_config(vocab_size=15), ["config.json: vocab_size is 15", "[10, 20]"]),
    "an eos beyond the vocabulary": (with_config(eos=37), ["config.json: vocab_size is 37", "eos (37)"]),
    "no weights": (without_weights, ["model.safetensors: no such file"]),
    "truncated weights": (cut("model/model.safetensors"), ["model.safetensors: not a complete safetensors file"]),
    "weights of another shape": (with_another_shape, ["model.safetensors: blocks.1.up.bias is [33]", "wants [32]"]),
    "another tensor": (with_another_tensor, ["model.safetensors", "'blocks.1.sideways' is in one only"]),
    "no data": (without_store, ["valid.bin: no such file; a token store is"]),
    "truncated tokens": (cut("valid.bin"), ["valid.bin: has 90 bytes, its index says 100 or 400: truncated"]),
    "a truncated index": (cut("valid.idx"), ["valid.idx", "truncated or of another kind"]),
    "random bytes for an index": (index_of(np.random.default_rng(0).bytes(60)), ["valid.idx: is not a token index"]),
    "a text for an index": (index_of(b"It was the best of times\n"), ["valid.idx: is not a token index", "MMIDIDX"]),
    "a foreign id": (with_a_foreign_id, ["valid.bin: token 2 is id 40, outside the vocabulary of 37"]),
    "a model that a cache would ruin": (with_added_positions, ["model: was trained with added", "41.59", "--mode non"]),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_bad_file_is_named_in_one_line(tiny: Path, damage: Damage, words: list[str]) -> None:
    damage(tiny)
    before = content(tiny)
    flags = ["--data", tiny / "valid", "--mode", "cached", "--nll", tiny / "out.npz", "--json"]
    expect_refusal(run_here(main, tiny / "model", *flags), *words)
    assert content(tiny) == before


BAD_FLAGS = {
    "no segment": (
        ["--mode", "cached", "--segment-length", "0"],
        "--segment-length: '0' is not a whole number",
    ),
    "no cache": (
        ["--mode", "cached", "--cache-length", "0"],
        "--cache-length: '0' is not a whole number",
    ),
    "no rows": (
        ["--mode", "nonoverlapping", "--batch-rows", "-1"],
        "--batch-rows: '-1' is not a whole number",
    ),
    "a stride nobody takes": (["--mode", "cached", "--stride", "4"], "--stride 4 needs --mode sliding, not cached"),
    "no stride": (["--mode", "sliding"], "--mode sliding needs --stride S"),
    "a stride above the segment": (
        ["--mode", "sliding", "--stride", "99"],
        "--stride 99 must not be above the segment",
    ),
    "a cache nobody reads": (["--mode", "nonoverlapping", "--cache-length", "4"], "--cache-length 4 needs --mode cach"),
    "rows of a decoder": (
        ["--mode", "token-by-token", "--batch-rows", "2"],
        "--batch-rows 2: token-by-token mode walks in one row; use --mode cached",
    ),
    "no lanes": (["--mode", "cached", "--lanes", "0"], "--lanes: '0' is not a whole number"),
    "lanes of windows": (["--mode", "nonoverlapping", "--lanes", "2"], "--lanes 2 needs --mode cached"),
    "more lanes than segments": (["--mode", "cached", "--lanes", "10"], "the text has only 9 segments of 6"),
    "a tensor axis that does not divide": (["--mode", "cached", "--tensor", "3"], "must divide the model's heads (4)"),
    "a tensor axis without processes": (["--mode", "cached", "--tensor", "2"], "start it with a launcher"),
    "a picture nowhere": (["--mode", "cached", "--by-position", "{dir}/no/x.png"], "no/x.png must be a file in a"),
    "no folder for the output": (["--mode", "cached", "--nll", "{dir}/no/out.npz"], "no/out.npz must be a file in a"),
    "a folder as output": (["--mode", "cached", "--nll", "{dir}/model"], "model must be a file in a folder that ex"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_a_bad_flag_is_named_in_one_line(tiny: Path, flags: list[str], message: str) -> None:
    before = content(tiny)
    done = run_here(main, tiny / "model", "--data", tiny / "valid", *(flag.format(dir=tiny) for flag in flags))
    expect_refusal(done, message)
    assert content(tiny) == before


# In a process of its own


@pytest.mark.slow
def test_a_real_process_says_the_same(tiny: Path) -> None:
    flags = [tiny / "model", "--data", tiny / "valid", "--mode", "cached", "--json"]
    real, here = launch("evaluate", *flags), run_here(main, *flags)
    assert (real.returncode, real.stderr) == (0, "")
    assert json.loads(real.stdout)["loss_nats"] == pytest.approx(json.loads(here.out)["loss_nats"])


@pytest.mark.slow
def test_bad_input_in_a_real_process_is_one_line_without_a_traceback(tiny: Path) -> None:
    done = launch("evaluate", tiny / "nowhere", "--data", tiny / "valid", "--mode", "cached")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tiny}/nowhere: no such file or folder; a model is expected: ")


def facts_of(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


@pytest.mark.parametrize("flags", [["--mode", "cached", "--lanes", "3"], ["--mode", "cached", "--tensor", "2"]])
def test_two_ranks_say_what_one_says(tiny: Path, flags: list[str]) -> None:
    common = [tiny / "model", "--data", tiny / "valid", "--json"]
    first, second = run_ranks(2, run_here, main, *common, *flags)
    assert (first.code, second.code, second.out) == (0, 0, "")
    one = run_here(main, *common, *flags[: 2 if "--tensor" in flags else None])
    assert facts_of(first.out)["processes"] == 2
    assert facts_of(first.out)["loss_nats"] == pytest.approx(facts_of(one.out)["loss_nats"], rel=1e-6)


@pytest.mark.slow
def test_the_deepspeed_launcher_says_the_same(tiny: Path) -> None:
    common = [tiny / "model", "--data", tiny / "valid", "--mode", "cached", "--lanes", "3", "--json"]
    two = launch("evaluate", *common, processes=2)
    assert two.returncode == 0, two.stderr
    assert facts_of(two.stdout)["processes"] == 2
    assert facts_of(two.stdout)["loss_nats"] == pytest.approx(
        facts_of(run_here(main, *common).out)["loss_nats"], rel=1e-6
    )
