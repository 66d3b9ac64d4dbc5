"""Waiting times of users: for help, for the first step, for a prepared corpus; and the overhead of the training loop.

    python -m benchmarks.commands [--megabytes 60]

Prints seconds on this machine next to the targets; the overhead is a share.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.trainers import VOCAB_SIZES, Setting, write_text
from megatron_style.engine.engine import TrainingEngine
from megatron_style.train import train


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


def first_step_seconds(folder: Path) -> float:
    """Return the seconds from the launch of the quickstart's model on two ranks to its first step."""
    prepare = (sys.executable, "-m", "megatron_style.prepare", "--corpus", "sotu", "--output", folder / "sotu")
    seconds_of(*prepare)
    settings = {"data.train": folder / "sotu/train", "data.valid": folder / "sotu/valid", "output.log_every": 1,
                "output.path": folder / "first"}  # fmt: skip
    flags = chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
    launcher = (
        Path(sys.executable).with_name("deepspeed"),
        "--num_accelerators",
        2,
        "--module",
        "megatron_style.train",
    )
    return seconds_of(*launcher, "run_configs/quickstart.yaml", *flags, until="step 1/")


def prepare_rate(folder: Path, megabytes: int) -> float:
    """Return the MB/s of `prepare --tokenizer words`, over the entire command."""
    text = folder / "text"
    words = "the of and to in a was he that it his her with as had for she not at but be on they have him which said"
    line = " ".join(f"{word} w{number % 5000}" for number, word in enumerate(words.split() * 8)) + "\n"
    text.write_text(line * (megabytes * 10**6 // len(line)))
    flags = ("--train", text, "--valid", text, "--tokenizer", "words", "--output", folder / "words")
    return 2 * text.stat().st_size / 1e6 / seconds_of(sys.executable, "-m", "megatron_style.prepare", *flags)


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
        print(f"train --help: {help_seconds():.2f} s, target: below 1")
        print(f"first step after the launch: {first_step_seconds(folder):.1f} s, target: at most 20")
        print(f"prepare, words: {prepare_rate(folder, args.megabytes):.1f} MB/s, target: at least 15")
        write_text(folder, VOCAB_SIZES["medium"])
        print(f"overhead of the loop: {overhead(folder):.2%}, target: below 3%")


if __name__ == "__main__":
    main()
