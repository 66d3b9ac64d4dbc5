"""`reproduce` as users run it, at a scale of seconds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_style.config.run_file import load_run
from megatron_style.data.store import open_store
from megatron_style.prepare import main as prepare
from megatron_style.reproduce import main
from tests.support.launch import ROOT
from tests.support.tiny import content, expect_refusal, run_here

MINIATURE = ("--scale", "miniature", "--jobs", "1")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    folder, words = tmp_path / "texts", [f"word{i}" for i in range(200)]
    folder.mkdir()
    for name, lines in (("train.txt", 900), ("valid.txt", 100), ("test.txt", 100)):
        draw = random.Random(name).choices
        (folder / name).write_text("".join(" ".join(draw(words, k=10)) + "\n" for _ in range(lines)))
    return folder


def start(*argv: object) -> subprocess.Popen[str]:
    """In a session of its own, so that no signal to the tests reaches it."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_style.reproduce", *map(str, argv)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """Its result, and the jobs it did."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, [line.split("] ", 1)[1] for line in err.splitlines() if line.startswith("[")]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.slow
def test_a_table_is_measured_and_what_is_done_is_never_done_again(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "out"
    command = ("--table", 4, *MINIATURE, "--corpus", texts, "--output", output)
    steady, staged = "pia_cache-L16x20-seed1", "pia_cache-L4x10-L16x10-seed1"

    killed = start(*command)
    wait_for(output / "runs", killed)
    names = {path.name.rsplit("-", 1)[0]: path for path in _run_folders(output, 2, killed)}
    assert set(names) == {steady, staged}
    wait_for(names[steady] / "checkpoints" / "global_step5" / "manifest.json", killed)
    orphan = training_of(names[steady])
    os.kill(orphan, signal.SIGSTOP)  # it will never end by itself: who waits for it waits forever
    killed.kill()
    killed.communicate()
    assert not (names[steady] / "model").exists()
    done_before = (names[staged] / "model" / "model.safetensors").stat().st_mtime_ns

    out, jobs = finish(start(*command, "--json"))
    assert not Path(f"/proc/{orphan}").exists()
    assert jobs == [f"train {names[steady].name}", f"evaluate {names[steady].name}: valid-cached"]
    assert (names[staged] / "model" / "model.safetensors").stat().st_mtime_ns == done_before
    assert "resuming at step" in (names[steady] / "train.log").read_text()
    steps = [event["step"] for event in _events(names[steady]) if event["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 20

    again = run_here(main, *command, "--json")
    assert (again.code, again.out, again.err) == (0, out, "")
    _check_results(json.loads(out), output, names[steady])

    _check_that_records_stand_for_a_run(command[:-1], output, json.loads(out))

    kept = names[steady] / "evaluations" / "valid-cached.json"
    kept.write_text(kept.read_text().replace('"model": "', '"model": "0'))  # as if it were of another model
    assert run_here(main, *command).err == f"[1/1] evaluate {names[steady].name}: valid-cached\n"


def _check_that_records_stand_for_a_run(command: tuple[object, ...], first: Path, found: dict[str, Any]) -> None:
    second = first.with_name("second")
    done = run_here(main, *command, second, "--kept", first, "--json")
    assert json.loads(done.out)["tables"] == found["tables"]
    lines = done.err.splitlines()
    assert lines[0] == "[1/1] prepare the corpus"
    assert len(lines) == 3
    assert all(line.endswith(f"its records are complete in {first}; not trained again") for line in lines[1:])
    assert not list(second.glob("runs/*/model"))
    assert "first" not in (second / "results.md").read_text().replace("first L=128", "").replace("first stage", "")
    for kept in second.glob("results/runs/*/run.yaml"):
        assert str(first.parent) not in kept.read_text()
    next(second.glob("runs/pia_cache-L16x20*/evaluations/*.json")).unlink()
    collected = json.loads(run_here(main, *command, second, "--collect", "--json").out)
    assert [row["figures"]["ppl"]["here"] is None for row in collected["tables"][0]["rows"]] == [False, True]
    assert (
        "**incomplete**: measured completely with no seed yet: L=512 all through."
        in (second / "results.md").read_text()
    )


def training_of(run: Path) -> int:
    """Return the pid of the process that trains a run."""
    commands = ((path, path.read_bytes()) for path in Path("/proc").glob("[0-9]*/cmdline"))
    (found,) = (int(path.parent.name) for path, command in commands if f"{run}/run.yaml".encode() in command)
    return found


def _run_folders(output: Path, count: int, process: subprocess.Popen[str]) -> list[Path]:
    while len(found := [path.parent for path in output.glob("runs/*/run.yaml")]) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return found


def _events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _check_results(result: dict[str, object], output: Path, steady: Path) -> None:
    (table,) = result["tables"]  # type: ignore[misc]
    figures = {row["row"]: row["figures"] for row in table["rows"]}
    assert set(figures) == {"first L=128", "L=512 all through"}
    assert figures["L=512 all through"]["ppl"]["paper"] == 17.85
    said = json.loads((steady / "evaluations" / "valid-cached.json").read_text())["result"]
    assert figures["L=512 all through"]["ppl"]["here"] == [said["perplexity_per_word"] or said["perplexity"]]
    assert {claim["state"] for claim in table["claims"]} <= {"holds", "does not hold", "not tested"}
    page = (output / "results.md").read_text()
    assert "## Table 4" in page
    assert "## Table 1:" not in page  # nothing of it was asked for
    for kept in ("table4.svg", "table4.json", f"runs/{steady.name}/metrics.jsonl", f"runs/{steady.name}/run.yaml"):
        assert (output / "results" / kept).is_file()


@pytest.mark.sweep
def test_first_stages_are_shared_and_tables_too(tmp_path: Path, texts: Path) -> None:
    common = (*MINIATURE, "--corpus", texts, "--output", tmp_path / "out")
    _, jobs = finish(start("--table", 8, *common))
    assert (
        len([job for job in jobs if job.startswith("train ")]) == 5
    )  # two lengths for 50 and 100 epochs, the baseline
    assert len(list((tmp_path / "out" / "runs").glob("*/taken_over.json"))) == 2  # 50 epochs begin with those of 100
    out, jobs = finish(start("--table", 2, 6, 7, "--json", *common))
    assert {job.split()[0] for job in jobs} == {"evaluate"}
    assert [table["table"] for table in json.loads(out)["tables"]] == [2, 6, 7]


@pytest.mark.slow
def test_asked_to_leave_it_asks_its_runs(tmp_path: Path, texts: Path) -> None:
    asked = start("--table", 4, *MINIATURE, "--corpus", texts, "--output", tmp_path / "out")
    (run,) = {path.parent for path in _first_lines(tmp_path / "out", asked)}
    asked.terminate()
    _, err = asked.communicate(timeout=120)
    assert asked.returncode == 130, err
    assert err.endswith("interrupted\n")
    assert "stopped after step" in (run / "train.log").read_text()  # it has saved, and is not left behind


def _first_lines(output: Path, process: subprocess.Popen[str]) -> list[Path]:
    while not (found := list(output.glob("runs/*/metrics.jsonl"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return found


def test_emitted_commands_are_ordinary_and_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = run_here(main, "--table", 5, "--scale", "paper", "--emit", "--output", tmp_path / "out")
    prepare, *trainings = done.out.splitlines()
    assert prepare.endswith(f"megatron_style.prepare --corpus wikitext-103 --output {tmp_path}/out/corpus")
    assert len(trainings) == 11
    for line in trainings:
        assert "deepspeed --num_gpus 8 --module megatron_style.train" in line
        assert load_run(Path(line.split()[-1])).data.train == tmp_path / "out" / "corpus" / "train"
    assert {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()} == {"run.yaml", "reproduction.json"}
    again = run_here(main, "--table", 5, "--scale", "paper", "--emit", "--json", "--output", tmp_path / "out")
    assert json.loads(again.out)["commands"] == done.out.splitlines()


def test_emitted_commands_find_their_text(tmp_path: Path, texts: Path) -> None:
    files = [word for split in ("train", "valid", "test") for word in (f"--{split}", texts / f"{split}.txt")]
    emit = ("--table", 4, *MINIATURE, "--emit", "--output", tmp_path / "out", "--corpus")
    expect_refusal(run_here(main, *emit, texts), "--emit", "must be prepared first", "--train", "--tokenizer words")
    run_here(prepare, *files, "--tokenizer", "words", "--output", tmp_path / "corpus", "--workers", 1)
    lines = run_here(main, *emit, tmp_path / "corpus").out.splitlines()
    assert len(lines) == 2
    for line in lines:
        run = load_run(Path(line.split()[-1]))
        assert len(open_store(run.data.train)) == 9900
        assert len(open_store(run.data.valid)) == 600
    assert not list((tmp_path / "out").rglob("metrics.jsonl"))
    for seed in (1, 2):
        lines = run_here(main, *emit, tmp_path / "corpus", "--seeds", 2, "--only-seed", seed).out.splitlines()
        assert [load_run(Path(line.split()[-1])).seed for line in lines] == [seed, seed]


def test_bad_input_is_named_in_one_line_and_leaves_nothing(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "untested").mkdir()
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "untested" / name).write_text("some words\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "reproduction.json").write_text('{"scale": "small", "corpus": "sotu"}')
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu" / "reproduction.json").write_text('{"scale": "tiny", "corpus": "sotu"}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "reproduction.json").write_text("{")
    before = content(tmp_path)
    new = ("--output", tmp_path / "new")
    for argv, *words in (
        (("--table", 13, *new), "13", "--help"),
        (("--table", 1, "--scale", "huge", *new), "--scale huge", "tiny"),
        (("--table", 1, "--seeds", 0, *new), "--seeds: '0'", "at least 1"),
        (("--table", 1, "--jobs", 0, *new), "--jobs: '0'", "at least 1"),
        (("--table", 1, "--seeds", 2, "--only-seed", 3, *new), "--only-seed 3", "seeds are 1 to 2"),
        (("--table", 1, "--only-seed", 1, "--collect", "--output", tmp_path / "other"), "--collect", "--only-seed"),
        (("--table", 1, "--output", tmp_path / "file"), "is a file"),
        (("--table", 1, "--corpus", tmp_path / "no", *new), "no such folder"),
        (("--table", 1, "--corpus", tmp_path / "empty", *new), "no file with `train`"),
        (("--table", 5, "--corpus", tmp_path / "untested", *new), "no test split"),
        (("--table", 1, "--output", tmp_path / "other"), "at scale small, not tiny", "--scale small"),
        (("--table", 1, "--corpus", texts, "--output", tmp_path / "sotu"), "on another corpus", "--corpus"),
        (("--table", 1, "--output", tmp_path / "torn"), "not the record of an experiment"),
        (("--table", 1, "--scale", "paper", *new), "needs 8 GPUs", "--emit"),
        (("--table", 11, "--scale", "paper", *new), "--corpus: missing", "Toronto Books"),
        (("--table", 1, 11, "--scale", "paper", "--corpus", texts, *new), "give each text an --output"),
    ):
        expect_refusal(run_here(main, *argv), *words)
    monkeypatch.setitem(sys.modules, "faiss", None)  # as if it were not installed
    expect_refusal(run_here(main, "--table", 5, "--scale", "small", *new), "kNN-LM", "pip install faiss-cpu")
    assert content(tmp_path) == before
