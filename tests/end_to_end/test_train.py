"""`train` as users run it: alone, under the deepspeed launcher, twice, and with wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_style.config.run_file import load_run
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import main
from tests.support.launch import launch
from tests.support.runs import tiny_run
from tests.support.tiny import read_model, run_here
from tests.support.training import VOCAB_SIZE, write_corpus, write_ds_config

ROOT = Path(__file__).resolve().parents[2]
STAGES = [{"segment_length": 8, "steps": 3}, {"segment_length": 24, "steps": 3}]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Six steps through two stages, over all data-parallel ranks 192 tokens each."""
    write_corpus(tmp_path)
    return write_run(tmp_path, tokens_per_batch=192)


def write_run(folder: Path, **changes: Any) -> Path:
    run = tiny_run(
        stages=changes.pop("stages", STAGES),
        tokens_per_batch=changes.pop("tokens_per_batch"),
        data={"train": str(folder / "train"), "valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        output={"path": str(folder / "run"), "log_every": 1},
        **changes,
    )
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run.as_data()))
    return path


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


@pytest.mark.slow
def test_a_run_leaves_everything_it_promises(run_file: Path) -> None:
    result = launch("train", run_file)
    assert result.returncode == 0, result.stderr
    assert not set(result.stderr) & {"\r", "\x1b"}  # a file is no terminal
    folder = run_file.parent
    run = folder / "run"
    assert (run / "checkpoints" / "latest").read_text() == "global_step6"
    assert load_run(run / "run.yaml") == load_run(run_file)
    assert [event["segment_length"] for event in events(folder, "stage")] == [8, 24]
    assert [event["stage_tokens"] for event in events(folder, "stage_end")] == [576, 576]
    assert [event["step"] for event in events(folder, "train")] == [1, 2, 3, 4, 5, 6]
    assert all(word in result.stderr for word in ("preflight: stage 2", "step 3: stage 2", "stage 2 is done"))

    board = EventAccumulator(str(run / "tensorboard" / run.name))
    board.Reload()
    shown = {(event.step, np.float32(event.value)) for event in board.Scalars("loss/train")}
    assert shown == {(event["step"], np.float32(event["loss"])) for event in events(folder, "train")}

    model, config = read_model(run / "model")
    tokens = np.fromfile(folder / "valid.bin", np.uint16)
    held_out = score(model, tokens, Protocol("cached", 24, 24), eos=config.eos)
    assert held_out.loss == pytest.approx(events(folder, "valid")[-1]["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_finished_run_is_left_alone_and_a_longer_one_resumes(run_file: Path) -> None:
    folder = run_file.parent
    short = (main, run_file, "--set", "stages.1.steps=1")
    (done,) = run_ranks(1, run_here, *short)
    assert done.code == 0, done.err
    first = events(folder, "train")
    (again,) = run_ranks(1, run_here, *short)
    assert again.code == 0, again.err
    assert events(folder, "train") == first
    (longer,) = run_ranks(1, run_here, main, run_file)
    assert "resuming at step 4 of 6" in longer.err
    assert [event["step"] for event in events(folder, "train")] == [1, 2, 3, 4, 5, 6]


BAD = {
    "heads do not divide": (["parallel.tensor=3"], {}, "model.heads (4) must be a multiple of parallel.tensor (3)"),
    "world does not fit": (["parallel.tensor=2"], {}, "parallel.tensor (2) must divide the 1 processes of this launch"),
    "unknown key": (["model.head=2"], {}, "model.head: unknown key; did you mean 'heads'?"),
    "no such corpus": (["data.train=nowhere/train"], {}, "nowhere/train"),
    "cutoffs above the vocabulary": (
        ["model.vocabulary.cutoffs=[10, 37]"],
        {},
        "must stay below the corpus's vocabulary",
    ),
    "ids outside the vocabulary": (["data.vocab_size=30"], {}, "train.bin"),
    "corpus smaller than a batch": (["data.tokens_per_batch=2400"], {}, "less than one segment of 8"),
    "a stage longer than a lane": (
        ["stages.1.segment_length=1536", "data.tokens_per_batch=1536"],
        {},
        "less than one segment",
    ),
    "length does not divide": (["stages.0.segment_length=7"], {}, "the nearest lengths that do are 6 and 8"),
    "batch triple fights": ([], {"train_batch_size": 7}, "train_batch_size is 7, but stage 1 of the run"),
    "optimizer in both": (
        ["optimizer.name=nag"],
        {"optimizer": {"type": "Adam"}},
        "has an optimizer, and so has the run file",
    ),
    "unknown ds key": ([], {"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
    "fp16 on a CPU": ([], {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "fp16 is not available"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_reported_in_one_line_and_writes_nothing(run_file: Path, case: str) -> None:
    settings, ds, told = BAD[case]
    flags = [word for setting in settings for word in ("--set", setting)]
    if ds:
        flags += ["--deepspeed_config", str(write_ds_config(run_file.parent, **ds))]
    (done,) = run_ranks(1, run_here, main, run_file, *flags)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if "error" in line]
    assert told in line
    assert not (run_file.parent / "run").exists()


@pytest.mark.slow
def test_wrong_input_in_a_real_process_is_one_line_without_a_traceback(run_file: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megatron_style.train", run_file, "--set", "model.head=2"]
    result = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    imports = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    (told,) = set(result.stderr.splitlines()) - set(imports)
    assert told.startswith("error: ")
    assert not [line for line in imports if line.endswith(" torch")], "it is told before the imports that take seconds"
