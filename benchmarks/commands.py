"""Waiting times of users: for help, for the first step, for a prepared corpus; and the overhead of the training loop.

    python -m benchmarks.commands [--megabytes 60]

Prints seconds on this machine next to the targets; the overhead is a share.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine
from benchmarks.trainers import VOCAB_SIZES, Setting, write_text
from megatron_style.engine.engine import TrainingEngine
from megatron_style.train import train
from tests.support.huge_store import write_huge_store


def seconds_of(*words: object, until: str | None = None) -> float:
    """Return the seconds until the command ends, or until its standard error has a line with `until`."""
    begin = time.perf_counter()
    with subprocess.Popen(
        list(map(str, words)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if until and until in line), None)
        taken = time.perf_counter() - begin
        if line:
            process.terminate()
    assert until is None or line, f"never printed {until!r}"
    return taken


def help_seconds() -> float:
    return min(seconds_of(sys.executable, "-m", "megatron_style.train", "--help") for _ in range(3))


def first_step_seconds(folder: Path, *launcher: object) -> float:
    """Return the seconds from the launch of the quickstart's model on two ranks to its first step."""
    settings = {"data.train": folder / "sotu/train", "data.valid": folder / "sotu/valid", "output.log_every": 1,
                "output.path": folder / "first"}  # fmt: skip
    flags = chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
    taken = seconds_of(*launcher, "run_configs/quickstart.yaml", *flags, until="step 1/")
    shutil.rmtree(folder / "first", ignore_errors=True)  # ranks of a launcher that was ended may still write
    return taken


def first_steps(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield, by launcher, the seconds to the first step; the first launch also checks the store."""
    seconds_of(sys.executable, "-m", "megatron_style.prepare", "--corpus", "sotu", "--output", folder / "sotu")
    # Ended alone, DeepSpeed's launcher would leave its ranks to disturb what is measured next.
    ended_with_ranks = (sys.executable, "-m", "megatron_style.supervision.launch")
    deepspeed = (*ended_with_ranks, Path(sys.executable).with_name("deepspeed"), "--num_accelerators", 2, "--module")
    for _ in range(2):
        yield "launch/local.sh", first_step_seconds(folder, "bash", ROOT / "launch/local.sh")
        yield "deepspeed", first_step_seconds(folder, *deepspeed, "megatron_style.train")


def prepare_rate(folder: Path, megabytes: int) -> tuple[float, float]:
    """Return the MB/s of `prepare --tokenizer words`, over the entire command, and the MB per second of CPU time."""
    text = folder / "text"
    words = "the of and to in a was he that it his her with as had for she not at but be on they have him which said"
    line = " ".join(f"{word} w{number % 5000}" for number, word in enumerate(words.split() * 8)) + "\n"
    text.write_text(line * (megabytes * 10**6 // len(line)))
    flags = ("--train", text, "--valid", text, "--tokenizer", "words", "--output", folder / "words")
    seconds, cpu_seconds = cost_of(sys.executable, "-m", "megatron_style.prepare", *flags)
    prepared = 2 * text.stat().st_size / 1e6
    return prepared / seconds, prepared / cpu_seconds


def byte_pair_ratio(folder: Path) -> tuple[float, float]:
    """Return the time of `prepare` with existing byte pairs over that of the bare library on the same text, and the
    same ratio of CPU time. Both use all cores and write the ids to a file."""
    text = folder / "text"
    learnt = folder / "learnt"
    run = (sys.executable, "-m", "megatron_style.prepare", "--tokenizer", "bpe", "--vocab-size", 8192)
    sample = folder / "sample"
    sample.write_bytes(text.read_bytes()[:4_000_000])
    seconds_of(*run, "--train", sample, "--valid", sample, "--output", learnt)
    tokenizer = learnt / "tokenizer.json"
    bare = cost_of(sys.executable, "-c", BARE, tokenizer, text, folder / "ids")
    flags = ("--train", text, "--valid", sample, "--dictionary", tokenizer, "--output", folder / "pairs")
    ours = cost_of(sys.executable, "-m", "megatron_style.prepare", *flags)
    return ours[0] / bare[0], ours[1] / bare[1]


BARE = """
import sys
import numpy as np
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as text, open(sys.argv[3], "wb") as out:
    while lines := text.readlines(4 << 20):
        for encoding in tokenizer.encode_batch_fast([line[:-1] for line in lines], add_special_tokens=False):
            out.write(np.array([*encoding.ids, 2], np.uint16).tobytes())
"""


def cost_of(*words: object) -> tuple[float, float]:
    """Return the seconds of a command, and the CPU seconds of it and its children."""
    before = os.times()
    taken = seconds_of(*words)
    after = os.times()
    return taken, after.children_user + after.children_system - before.children_user - before.children_system


def open_huge_store(folder: Path) -> tuple[float, float]:
    """Return the seconds from opening a store of 10**12 tokens to the first plan and batch, and the MB that took: the
    worst of four processes that do it at the same time."""
    write_huge_store(folder / "huge", 10**12)
    command = [sys.executable, "-c", HUGE, str(folder / "huge")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = [tuple(map(float, rank.communicate()[0].split())) for rank in ranks]
    return max(seconds for seconds, _ in found), max(megabytes for _, megabytes in found)


HUGE = """
import sys, time
from pathlib import Path
from megatron_style.data.batch import read_batch
from megatron_style.data.store import open_store
from megatron_style.schedule.stages import StageSchedule
from tests.support.runs import tiny_run
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
begin, before = time.perf_counter(), peak()
store = open_store(sys.argv[1], vocab_size=40)
run = tiny_run(stages=[{"segment_length": 128, "epochs": 1}], tokens_per_batch=9216, cache=False)
plan = StageSchedule(run, corpus_tokens=len(store), data_parallel=4).plan(10**6)
read_batch([store.tokens], plan.read(data_rank=3, micro=0), eos=2)
print(time.perf_counter() - begin, peak() - before)
"""


def overhead(folder: Path) -> float:
    """Return the share of the loop that is not forward, backward or update: plans, reading, journal, heartbeat."""
    spent: list[tuple[float, float]] = []
    for name in ("forward", "accumulate", "update"):
        setattr(TrainingEngine, name, timed(getattr(TrainingEngine, name), spent))
    setting = Setting("medium", 128, cached=True)
    run = setting.run(folder, stages=[{"segment_length": 128, "steps": 8}])
    train(run)
    loop = spent[-24:]  # 8 steps; what comes before is the preflight
    return 1 - sum(end - begin for begin, end in loop) / (loop[-1][1] - loop[0][0])


def timed(verb: Callable[..., Any], spent: list[tuple[float, float]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = verb(*args, **kwargs)
        spent.append((begin, time.perf_counter()))
        return result

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60)
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        print(json.dumps(machine()))
        print(f"train --help: {help_seconds():.2f} s, target: below 1")
        for launcher, taken in first_steps(folder):
            print(f"first step after the launch by {launcher}: {taken:.1f} s, target: at most 8")
        rate, cpu_rate = prepare_rate(folder, args.megabytes)
        print(
            f"prepare, words: {rate:.1f} MB/s ({cpu_rate:.1f} per second of CPU time), target: at least 25 on 2 cores"
        )
        wall, cpu = byte_pair_ratio(folder)
        print(f"prepare, byte pairs over the bare library: {wall:.2f} (CPU time {cpu:.2f}), target: at most 1.25")
        seconds, megabytes = open_huge_store(folder)
        print(
            f"opening 10^12 tokens, to the first batch, 4 ranks: {seconds:.2f} s, {megabytes:.0f} MB, target: seconds"
        )
        write_text(folder, VOCAB_SIZES["medium"])
        print(f"overhead of the loop: {overhead(folder):.2%}, target: below 3%")


if __name__ == "__main__":
    main()
