"""`generate` as users run it: text on standard output, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_style.data.tokenizer import BpeTokenizer
from megatron_style.generate import main
from tests.support.tiny import (
    Done,
    L,
    content,
    expect_refusal,
    run_here,
    tiny_config,
    tiny_dictionary,
    write_tiny_model,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def generate(model: Path, *flags: object, prompt: str = "w1 w2 w3") -> Done:
    return run_here(main, model, "--prompt", prompt, *flags)


def text_of(model: Path, *flags: object) -> str:
    text = json.loads(generate(model, "--json", *flags).out)["text"]
    assert isinstance(text, str)
    return text


def test_the_result_is_one_json_object(model: Path) -> None:
    done = generate(model, "--tokens", 12, "--json")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    facts = json.loads(done.out)
    assert (facts["prompt"], facts["tokens"]) == ("w1 w2 w3", 12)
    known = {f"w{i}" for i in range(33)} | {"<s>", "<pad>", "<unk>"}
    assert set(facts["text"].split()) <= known


def test_the_text_on_a_terminal_is_the_same(model: Path) -> None:
    done = generate(model, "--tokens", 40)
    assert (done.code, done.err) == (0, "")
    assert done.out == text_of(model, "--tokens", 40) + "\n"


@pytest.mark.parametrize("seed", range(8))
def test_characters_spread_over_tokens_are_written_whole_and_none_is_lost(tmp_path: Path, seed: int) -> None:
    bpe = BpeTokenizer.train(["größer", "größe", "€ 5"], vocab_size=264)
    config = tiny_config("tied").model_copy(update={"vocab_size": bpe.vocab_size})
    write_tiny_model(tmp_path / "model", config, bpe)
    flags = ["--tokens", 7, "--seed", seed]
    assert generate(tmp_path / "model", *flags).out == text_of(tmp_path / "model", *flags) + "\n"


def test_a_seed_repeats_and_another_seed_does_not(model: Path) -> None:
    assert text_of(model, "--seed", 4) == text_of(model, "--seed", 4) != text_of(model, "--seed", 5)


def test_the_narrowest_choices_are_greedy(model: Path) -> None:
    greedy = text_of(model, "--temperature", 0)
    assert greedy == text_of(model, "--temperature", 0, "--seed", 9)
    assert greedy == text_of(model, "--top-k", 1) == text_of(model, "--top-p", 1e-9)
    assert greedy != text_of(model)


def test_text_goes_on_through_many_segments(model: Path) -> None:
    assert json.loads(generate(model, "--tokens", 10 * L, "--json").out)["tokens"] == 10 * L


def test_a_prompt_may_be_longer_than_a_segment_and_have_unknown_words_and_lines(model: Path) -> None:
    assert generate(model, "--tokens", 3, prompt="w1 nonsense\nw2 w3 " * 10).code == 0


def test_a_model_without_a_cache_can_write_too(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", tiny_config(positions="added", cache=False))
    assert generate(tmp_path / "model", "--tokens", 3 * L).code == 0


BAD_FLAGS = {
    "an empty prompt": (["--prompt", " \n"], "--prompt is empty; give it at least one word"),
    "no tokens": (["--tokens", "0"], "--tokens is 0; it must be at least 1"),
    "a negative temperature": (["--temperature", "-1"], "--temperature is -1.0; it must be 0 (greedy) or more"),
    "no temperature": (["--temperature", "nan"], "--temperature is nan; it must be 0 (greedy) or more"),
    "an endless temperature": (["--temperature", "inf"], "--temperature is inf; it must be 0 (greedy) or more"),
    "no candidates": (["--top-k", "0"], "--top-k is 0; it must be at least 1"),
    "no mass": (["--top-p", "0"], "--top-p is 0.0; it must be above 0 and at most 1"),
    "too much mass": (["--top-p", "1.1"], "--top-p is 1.1; it must be above 0 and at most 1"),
    "a negative seed": (["--seed", "-1"], "--seed is -1; it must be at least 0"),
    "too large a seed": (["--seed", str(2**63)], "it must be at least 0 and below 2^63"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_a_bad_flag_is_named_in_one_line(model: Path, flags: list[str], message: str) -> None:
    expect_refusal(generate(model, *flags), message)


@pytest.mark.parametrize("flags", [["--tokens", "many"], ["--temperature", "hot"], ["--topk", "3"]])
def test_a_flag_of_another_kind_is_refused(model: Path, flags: list[str]) -> None:
    done = generate(model, *flags)
    assert (done.code, done.out) == (2, "")
    assert flags[0] in done.err.splitlines()[-1]


def test_a_model_without_a_tokenizer_is_refused(model: Path) -> None:
    (model / "dict.txt").unlink()
    expect_refusal(generate(model), model, "no tokenizer here; expected dict.txt")


def test_a_tokenizer_of_another_model_is_refused(model: Path) -> None:
    tiny_dictionary(50).save(model)
    before = content(model)
    expect_refusal(generate(model), model, "its tokenizer makes 50 ids, but the model knows 37")
    assert content(model) == before


def test_a_missing_model_in_a_real_process_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_style.generate", str(tmp_path / "nowhere"), "--prompt", "w1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {tmp_path}/nowhere: neither a model folder")
