"""The training speeds of the paper's systems at some scale, measured in turns in one process.

    python -m benchmarks.tables --corpus runs/tables/corpus [--scale tiny] [--table 5] [--rounds 8] \
        --output runs/tables/speeds.json

Speeds that `reproduce` sees during its runs are those of a machine with other work. In a folder with `speeds.json` it
uses these instead. A speed is that of the median of the rounds: a complete step (reading, forward, backward, update),
with the scale's model, batch and dropout. The systems take turns, so that other work slows all of them alike. With one
thread (OMP_NUM_THREADS=1) the clock is the process's CPU time, which stands still while the process waits for other
work; with several it is wall time, and the machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.trainers import Ours
from megatron_style.base.files import write_atomic
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import tokenizer_beside
from megatron_style.engine.session import distributed_session
from megatron_style.paper.runs import Model, PreparedText, RunSpec, run_config
from megatron_style.paper.scale import SCALES, ExperimentScale
from megatron_style.paper.speeds import speed_key
from megatron_style.paper.tables import table
from megatron_style.parallel.topology import Topology

WARM_UP_STEPS = 2
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def clock_name() -> str:
    return "cpu" if torch.get_num_threads() == 1 else "wall"


def stages_of(numbers: Sequence[int], scale: ExperimentScale) -> Iterator[tuple[Model, int]]:
    """Yield every model with every segment length (the paper's) that the runs of the tables train."""
    seen = set()
    for spec in (spec for number in numbers for spec in table(number).at(scale).needs()):
        for length in filter(None, (spec.first_length, spec.length)):
            if (spec.model, length) not in seen:
                seen.add((spec.model, length))
                yield spec.model, length


def run_of(model: Model, length: int, scale: ExperimentScale, corpus: Path) -> RunConfig:
    tokenizer = tokenizer_beside(corpus / "train")
    assert tokenizer is not None, f"{corpus} has no dictionary"
    text = PreparedText(corpus / "train", corpus / "valid", tokenizer.vocab_size)
    return run_config(RunSpec(model, length), scale, text, Path("unused"))


def measure(trainers: dict[str, Ours], tokens: int, rounds: int) -> dict[str, float]:
    clock = CLOCKS[clock_name()]
    seconds: dict[str, list[float]] = {key: [] for key in trainers}
    for number in range(WARM_UP_STEPS + rounds):
        for key, step in trainers.items():
            begin = clock()
            step()
            if number >= WARM_UP_STEPS:
                seconds[key].append(clock() - begin)
    return {key: tokens / statistics.median(each) for key, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, metavar="DIR", help="a prepared corpus")
    add("--scale", choices=[name for name, scale in SCALES.items() if not scale.is_paper], default="tiny")
    add("--table", type=int, nargs="+", default=[5], metavar="N")
    add("--rounds", type=int, default=8)
    add("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    scale = SCALES[args.scale]
    with distributed_session(tensor=1) as topology:
        found = measure(make_trainers(args.table, scale, args.corpus, topology), scale.tokens_per_batch, args.rounds)
    record = {
        "scale": scale.name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": clock_name(),
        "rounds": args.rounds,
        "tokens_per_second": found,
    }
    write_atomic(args.output, json.dumps(record, indent=1) + "\n")
    for key, speed in found.items():
        print(f"{key:32}{speed:10,.0f} tokens/s")


def make_trainers(numbers: Sequence[int], scale: ExperimentScale, corpus: Path, topology: Topology) -> dict[str, Ours]:
    trainers = {}
    for model, length in stages_of(numbers, scale):
        trainers[speed_key(model, scale.length(length))] = Ours(run_of(model, length, scale, corpus), topology)
    return trainers


if __name__ == "__main__":
    main()
