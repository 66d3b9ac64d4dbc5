"""`generate` as users run it: text on standard output, and what it refuses."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatron_style.data.store import TokenStoreWriter
from megatron_style.data.tokenizer import BpeTokenizer
from megatron_style.formats.formats import open_model
from megatron_style.generate import main
from megatron_style.inference.next_token import by_model
from megatron_style.inference.sampling import open_walk, stacked
from megatron_style.neighbours import main as neighbours
from megatron_style.parallel.local_ranks import run_ranks
from tests.support.launch import launch
from tests.support.tiny import (
    VOCAB_SIZE,
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
def test_characters_spread_over_tokens_are_written_completely_and_none_is_lost(tmp_path: Path, seed: int) -> None:
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


def test_text_continues_through_many_segments(model: Path) -> None:
    assert json.loads(generate(model, "--tokens", 10 * L, "--json").out)["tokens"] == 10 * L


def test_a_prompt_may_be_longer_than_a_segment_and_have_unknown_words_and_lines(model: Path) -> None:
    assert generate(model, "--tokens", 3, prompt="w1 nonsense\nw2 w3 " * 10).code == 0


def test_a_model_without_a_cache_can_write_too(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", tiny_config(positions="added", cache=False))
    assert generate(tmp_path / "model", "--tokens", 3 * L).code == 0


# Several prompts


def test_several_prompts_are_one_object_and_each_text_is_its_own(model: Path, tmp_path: Path) -> None:
    prompts = ["w1 w2 w3", "w4", " ".join(f"w{i % 30}" for i in range(5 * L)), "w7 w8"]
    (tmp_path / "prompts.txt").write_text("\r\n".join(prompts[2:]) + "\n")
    flags = ["--prompt", prompts[1], "--prompts", tmp_path / "prompts.txt", "--tokens", 20, "--json"]
    samples = json.loads(generate(model, *flags, prompt=prompts[0]).out)["samples"]
    assert [(sample["prompt"], sample["tokens"]) for sample in samples] == [(prompt, 20) for prompt in prompts]
    assert json.loads(generate(model, *flags, "--batch-rows", 1, prompt=prompts[0]).out)["samples"] == samples
    assert samples[0] == json.loads(generate(model, "--tokens", 20, "--json").out)


@pytest.mark.parametrize("search", [["--temperature", 0], ["--beams", 3]], ids=str)
def test_greedy_and_searched_texts_are_those_of_each_prompt_alone(model: Path, search: list[object]) -> None:
    done = generate(model, "--prompt", "w4", "--json", *search)
    texts = [sample["text"] for sample in json.loads(done.out)["samples"]]
    assert texts == [json.loads(generate(model, "--json", *search, prompt=p).out)["text"] for p in ("w1 w2 w3", "w4")]


def test_several_texts_for_people_are_under_their_prompts(model: Path) -> None:
    flags = ["--tokens", 8, "--prompt", "w4\nw5"]
    first, second = json.loads(generate(model, *flags, "--json").out)["samples"]
    done = generate(model, *flags)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"== w1 w2 w3\n{first['text']}\n\n== w4 w5\n{second['text']}\n"


# Beams, stops


def test_beam_search_is_deterministic_and_one_beam_is_greedy(model: Path) -> None:
    greedy, one, four = text_of(model, "--temperature", 0), text_of(model, "--beams", 1), text_of(model, "--beams", 4)
    assert greedy == one
    assert four == text_of(model, "--beams", 4, "--seed", 7)
    assert generate(model, "--beams", 4).out == four + "\n"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_text_ends_before_a_stop_or_with_its_line(model: Path, seed: int) -> None:
    flags = ["--tokens", 200, "--seed", seed]
    whole = text_of(model, *flags)
    assert "\n" in whole
    for stop in (whole[30:36], " ".join(whole.split(" ")[9:12]), "\n"):
        assert text_of(model, *flags, "--stop", "never", "--stop", stop) == whole[: whole.index(stop)]
        assert generate(model, *flags, "--stop", stop).out == whole[: whole.index(stop)] + "\n"
    assert text_of(model, *flags, "--stop-at-line-end") == whole[: whole.index("\n")]


def test_texts_of_a_batch_end_each_at_its_own_stop(model: Path) -> None:
    flags = ["--tokens", 60, "--json", "--prompt", "w4"]
    both = [sample["text"] for sample in json.loads(generate(model, *flags).out)["samples"]]
    stops = [text[40:46] for text in both]
    expected = [text[: min(text.index(stop) for stop in stops if stop in text)] for text in both]
    stopped = json.loads(generate(model, *flags, "--stop", stops[0], "--stop", stops[1]).out)["samples"]
    assert [sample["text"] for sample in stopped] == expected
    assert all(sample["tokens"] < 60 for sample in stopped)


def test_a_searched_text_ends_at_a_stop_too(model: Path) -> None:
    whole = text_of(model, "--beams", 1, "--tokens", 20)
    stop = " ".join(whole.split(" ")[1:3])
    assert text_of(model, "--beams", 1, "--tokens", 20, "--stop", stop) == whole[: whole.index(stop)]
    assert stop not in text_of(model, "--beams", 4, "--tokens", 20, "--stop", stop)


# Words that the dictionary lacks


def test_words_outside_the_dictionary_are_named_once(model: Path) -> None:
    done = generate(model, "--prompt", "w2 nonsense <unk>", "--tokens", 3, prompt="w1 nonsense\nodd w2")
    assert done.code == 0
    assert done.err == "note: not in the model's dictionary, so read as <unk>: nonsense, odd\n"


def test_a_prompt_without_any_known_word_is_refused(model: Path) -> None:
    expect_refusal(generate(model, "--prompt", "Hello there"), "'Hello there'", "has none of its words; use words")


# Line by line


def talk(model: Path, typed: str, *flags: object) -> Done:
    with patch.object(sys, "stdin", io.StringIO(typed)):
        return run_here(main, model, "--interactive", "--tokens", 9, *flags)


def test_a_typed_line_is_continued_like_a_prompt(model: Path) -> None:
    done = talk(model, "w1 w2 w3\n")
    assert (done.code, done.err) == (0, "")
    assert done.out == generate(model, "--tokens", 9).out


def test_what_was_said_is_context_until_it_is_reset(model: Path) -> None:
    greedy = ["--temperature", 0]
    first = json.loads(generate(model, "--tokens", 9, "--json", *greedy).out)["text"]
    said = f"w1 w2 w3 {first}\nw4"
    second = json.loads(generate(model, "--tokens", 9, "--json", *greedy, prompt=said).out)["text"]
    alone = json.loads(generate(model, "--tokens", 9, "--json", *greedy, prompt="w4").out)["text"]
    assert second != alone
    assert talk(model, "w1 w2 w3\nw4\n", *greedy).out == f"{first}\n{second}\n"
    assert talk(model, "w1 w2 w3\n/reset\nw4", *greedy).out == f"{first}\n{alone}\n"


def test_help_is_shown_and_quit_leaves(model: Path) -> None:
    done = talk(model, "/help\nw1 w2 w3\n/quit\nw4\n")
    assert done.err.count("/reset forgets the text so far") == 1
    assert done.out == generate(model, "--tokens", 9).out


def test_a_conversation_on_a_terminal_begins_with_a_greeting(model: Path) -> None:
    with patch.object(sys, "stdin", io.StringIO("")) as stdin, patch.object(stdin, "isatty", return_value=True):
        done = run_here(main, model, "--interactive")
    assert done.err.startswith("The model continues each line that you type.")


def test_a_dash_reads_the_prompt_from_standard_input(model: Path) -> None:
    with patch.object(sys, "stdin", io.StringIO("w1 w2 w3\n")):
        done = generate(model, "--tokens", 9, prompt="-")
    assert (done.code, done.out) == (0, generate(model, "--tokens", 9).out)


@pytest.mark.parametrize("flags", [["--interactive"], ["--prompt", "-"]])
def test_a_closed_standard_input_is_refused(model: Path, flags: list[str]) -> None:
    with patch.object(sys, "stdin", None):
        expect_refusal(run_here(main, model, *flags), "standard input: is closed")


def test_an_empty_line_continues(model: Path) -> None:
    longer = json.loads(generate(model, "--tokens", 27, "--json").out)["text"]
    assert " ".join(talk(model, "w1 w2 w3\n\n\n").out.split()) == " ".join(longer.split())


def test_a_line_without_known_words_is_named_and_not_read(model: Path) -> None:
    done = talk(model, "Hello\nw1 w2 w3\n")
    assert done.code == 0
    assert done.err.startswith("error: prompt 'Hello': the model's dictionary has none of its words")
    assert done.out == talk(model, "w1 w2 w3\n").out


class Process:
    """The command as a process of its own, with text to read from it and signals to send."""

    def __init__(self, *argv: object) -> None:
        command = [sys.executable, "-m", "megatron_style.generate", *map(str, argv)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)

    def type(self, line: str) -> None:
        print(line, file=self._process.stdin, flush=True)

    def read(self, characters: int) -> str:
        text: str = self._process.stdout.read(characters)
        return text

    def ctrl_c(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def leave(self) -> Done:
        """Ctrl-D; what is still to read."""
        with self._process as process:
            process.stdin.close()
            return Done(process.wait(60), process.stdout.read(), process.stderr.read())


@pytest.mark.slow
def test_ctrl_c_ends_the_text_and_keeps_what_is_there(model: Path) -> None:
    process = Process(model, "--prompt", "w1", "--tokens", 10**9, "--seed", 2)
    begun = process.read(50)
    process.ctrl_c()
    done = process.leave()
    assert (done.code, done.err) == (130, "interrupted\n")
    text = begun + done.out
    assert text.endswith("\n")
    tokens = len(text.replace("\n", " \n ").split(" "))
    assert generate(model, "--tokens", tokens, "--seed", 2, prompt="w1").out.startswith(text[:-1])


@pytest.mark.slow
def test_ctrl_c_in_a_conversation_ends_one_continuation_only(model: Path) -> None:
    greedy = ["--temperature", 0]
    assert "\n" not in text_of(model, "--tokens", 300, *greedy)
    process = Process(model, "--interactive", "--tokens", 10**9, *greedy)
    for line in ("w1 w2 w3", "/reset\nw1 w2 w3"):
        process.type(line)
        begun = process.read(50)
        process.ctrl_c()
        while not begun.endswith("\n"):
            begun += process.read(1)
    assert process.leave() == Done(0, "", "")


@pytest.mark.slow
def test_the_command_does_without_deepspeed_and_without_the_compiler() -> None:
    """Each takes a second to import."""
    code = "import sys, megatron_style.generate; sys.exit(not {'deepspeed', 'torch._dynamo'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# Precisions


def test_float64_writes_what_float32_writes(model: Path) -> None:
    flags = ("--temperature", 0, "--tokens", 40)
    assert text_of(model, *flags, "--dtype", "float64") == text_of(model, *flags)


def test_each_word_of_a_greedy_text_in_bfloat16_is_nearly_the_likeliest_in_float32(model: Path) -> None:
    written = text_of(model, "--temperature", 0, "--tokens", 40, "--dtype", "bfloat16")
    source = open_model(model)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    prompt = tokenizer.encode("w1 w2 w3")
    tokens = tokenizer.encode(written)
    assert len(tokens) == 40
    exact = source.load()
    walk = open_walk(
        exact, rows=1, segment_length=source.config.segment_length, cache_length=source.config.cache_length
    )
    predict = by_model(exact)
    reading = walk.read([tokenizer.eos, *prompt])
    for token in tokens:
        (following,) = predict(stacked([reading]))
        log_probs, ids = following.everything()
        assert log_probs.max() - log_probs[list(ids).index(token)] < 0.1
        reading = walk.read([token])


# Tensor-parallel ranks


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", 0, "--prompt", "w4"],
        ["--seed", 3, "--prompt", "w4 w5 w6 w7 w8 w9 w10", "--batch-rows", 1],
        ["--beams", 3],
    ],
    ids=str,
)
def test_two_ranks_write_what_one_process_writes(model: Path, flags: list[object]) -> None:
    words = [model, "--prompt", "w1 w2 w3", "--tokens", 20, *flags]
    for form in ([], ["--json"]):
        first, second = run_ranks(2, run_here, main, *words, *form, "--tensor", 2)
        assert (first.code, second.code, second.out) == (0, 0, "")
        assert first.out == run_here(main, *words, *form).out


def test_ranks_share_the_search_for_neighbours(model: Path, tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path / "text", VOCAB_SIZE) as store:
        store.append(np.random.default_rng(0).integers(4, VOCAB_SIZE, 300), np.array([300]))
    build = ["build", model, "--data", tmp_path / "text", "--output", tmp_path / "store"]
    assert run_here(neighbours, *build).code == 0
    words = [model, "--prompt", "w1 w2 w3", "--tokens", 20, "--neighbours", tmp_path / "store", "--k", 8]
    first, second = run_ranks(2, run_here, main, *words, "--tensor", 2)
    assert (first.out, second.out) == (run_here(main, *words).out, "")


@pytest.mark.slow
def test_the_deepspeed_launcher_starts_ranks_that_write_the_same(model: Path) -> None:
    words = [model, "--prompt", "w1 w2 w3", "--tokens", 20, "--json"]
    two = launch("generate", *words, "--tensor", 2, processes=2)
    assert two.returncode == 0, two.stderr
    assert run_here(main, *words).out in two.stdout.splitlines(keepends=True)


def test_processes_that_are_not_part_of_the_model_are_refused(model: Path) -> None:
    first, second = run_ranks(2, run_here, main, model, "--prompt", "w1")
    assert (first.code, second.code, first.out, second.out) == (2, 2, "", "")
    assert "error: --tensor is 1, but this launch has 2 processes, all of which share one model; give" in first.err


# What is refused

AT_LEAST_1 = "is not a whole number of at least 1; "
BAD_FLAGS = {
    "an empty prompt": (["--prompt", " \n"], "--prompt is empty; give it at least one word"),
    "a prompt that is no text": (["--prompt", "w1 \udcff"], "--prompt: is not UTF-8 text"),
    "no tokens": (["--tokens", "0"], f"--tokens: '0' {AT_LEAST_1}"),
    "fewer than no tokens": (["--tokens", "-5"], f"--tokens: '-5' {AT_LEAST_1}"),
    "a negative temperature": (["--temperature", "-1"], "--temperature is -1.0; it must be 0 (greedy) or more"),
    "no temperature": (["--temperature", "nan"], "--temperature is nan; it must be 0 (greedy) or more"),
    "an endless temperature": (["--temperature", "inf"], "--temperature is inf; it must be 0 (greedy) or more"),
    "no candidates": (["--top-k", "0"], f"--top-k: '0' {AT_LEAST_1}"),
    "no mass": (["--top-p", "0"], "--top-p is 0.0; it must be above 0 and at most 1"),
    "too much mass": (["--top-p", "1.1"], "--top-p is 1.1; it must be above 0 and at most 1"),
    "no beams": (["--beams", "0"], f"--beams: '0' {AT_LEAST_1}"),
    "no rows": (["--batch-rows", "0"], f"--batch-rows: '0' {AT_LEAST_1}"),
    "a negative seed": (["--seed", "-1"], "--seed is -1; it must be at least 0"),
    "too large a seed": (["--seed", str(2**63)], "it must be at least 0 and below 2^63"),
    "an empty stop": (["--stop", ""], "--stop is empty; give it the text to end before"),
    "beams and a temperature": (
        ["--beams", "3", "--temperature", "0"],
        "--beams 3 does not sample; leave out --temperature",
    ),
    "beams and candidates": (["--beams", "3", "--top-k", "5"], "leave out --top-k"),
    "beams and mass": (["--beams", "3", "--top-p", "0.5"], "leave out --top-p"),
    "a conversation with a prompt": (["--interactive"], "--interactive reads lines and writes as it goes"),
    "ranks that do not divide": (["--tensor", "3"], "--tensor 3: must divide the model's heads (4)"),
    "ranks without processes": (["--tensor", "2"], "--tensor 2 needs that many processes; start it with a launcher"),
    "one input of several ranks": (
        ["--tensor", "2", "--prompt", "-"],
        "--prompt - reads standard input, which --tensor 2 processes cannot share; give --prompts FILE",
    ),
    "no prompts file": (["--prompts", "/nowhere.txt"], "/nowhere.txt: no such file; expected a UTF-8 text file"),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_a_bad_flag_is_named_in_one_line(model: Path, flags: list[str], message: str) -> None:
    expect_refusal(generate(model, *flags), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected at least one line of text"),
        (b"w1\n\nw2\n", ":2 is empty; give it at least one word"),
        (b"w1\n\xff\n", "byte 3 is not UTF-8"),
        (b"w1\0\n", "is NUL, so this is a binary file"),
    ],
)
def test_a_bad_prompts_file_is_named_in_one_line(model: Path, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "prompts").write_bytes(content)
    expect_refusal(run_here(main, model, "--prompts", tmp_path / "prompts"), tmp_path / "prompts", message)


def test_a_folder_of_prompts_is_refused(model: Path) -> None:
    expect_refusal(run_here(main, model, "--prompts", model), f"{model}: is not a regular file")


def test_nothing_to_continue_is_refused(model: Path) -> None:
    expect_refusal(run_here(main, model), "give --prompt TEXT, --prompts FILE or --interactive")


@pytest.mark.parametrize("flags", [["--prompt", "w1"], ["--prompts", "file"], ["--json"], ["--beams", "2"]])
def test_a_conversation_with_what_it_has_no_use_for_is_refused(model: Path, flags: list[str]) -> None:
    expect_refusal(
        talk(model, "w1\n", *flags), f"--interactive reads lines and writes as it goes; leave out {flags[0]}"
    )


def test_a_conversation_with_several_ranks_is_refused(model: Path) -> None:
    expect_refusal(talk(model, "w1\n", "--tensor", 2), "--interactive reads lines, which --tensor 2 processes cannot")


def test_typed_bytes_that_are_no_text_are_refused(model: Path) -> None:
    with patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1 \xff\n"), encoding="utf-8")):
        expect_refusal(run_here(main, model, "--interactive"), "standard input: is not UTF-8 text")
    expect_refusal(talk(model, "w1 \udcff\n"), "standard input: is not UTF-8 text")


@pytest.mark.parametrize("flags", [["--tokens", "many"], ["--temperature", "hot"], ["--topk", "3"]])
def test_a_flag_of_another_kind_is_refused(model: Path, flags: list[str]) -> None:
    done = generate(model, *flags)
    assert (done.code, done.out) == (2, "")
    assert flags[0] in done.err.splitlines()[-1]


def test_a_model_without_a_tokenizer_is_refused(model: Path) -> None:
    (model / "dict.txt").unlink()
    expect_refusal(generate(model), model, "has no tokenizer (dict.txt or tokenizer.json or")


def test_a_tokenizer_of_another_model_is_refused(model: Path) -> None:
    tiny_dictionary(50).save(model)
    before = content(model)
    expect_refusal(generate(model), model, "its tokenizer makes 50 ids, but the model knows 37")
    assert content(model) == before


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    expect_refusal(
        generate(tmp_path / "nowhere"), f"error: {tmp_path}/nowhere: no such file or folder; a model is expected: "
    )
