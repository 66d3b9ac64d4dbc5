"""The speeds of the paper's systems at some scale, measured in turns in one process.

    python -m benchmarks.tables --corpus runs/tables/corpus [--scale tiny] [--table 5] [--rounds 8] \
        --output runs/tables/speeds.json

Speeds that `reproduce` sees during its runs are those of a machine with other work. In a folder with `speeds.json` it
uses these instead. A speed is that of the median of the rounds: a complete step of training (reading, forward,
backward, update) with the scale's model, batch and dropout, or an evaluation of the beginning of the held-out text, by
the protocol of the table. Weights are random, which no speed depends on; kNN-LM needs a datastore and is left out. The
systems take turns, so that other work slows all of them alike. With one thread (OMP_NUM_THREADS=1) the clock is the
process's CPU time, which stands still while the process waits for other work; with several it is wall time, and the
machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.trainers import Ours
from megatron_style.base.files import write_atomic
from megatron_style.config.model import ModelConfig
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus, tokenizer_beside
from megatron_style.data.store import open_store
from megatron_style.engine.session import distributed_session
from megatron_style.formats.model_folder import folder_config
from megatron_style.inference import measure as scoring
from megatron_style.inference.arguments import add_protocol_flags, request_of
from megatron_style.inference.scoring.modes import make_protocol
from megatron_style.inference.scoring.protocol import Request
from megatron_style.model.shortformer import Shortformer
from megatron_style.paper.measures import Evaluated, Evaluation, speed_of
from megatron_style.paper.runs import Model, PreparedText, RunSpec, run_config
from megatron_style.paper.scale import SCALES, ExperimentScale
from megatron_style.paper.speeds import OF_SCORING, OF_TRAINING, scoring_key, speed_key
from megatron_style.paper.tables import all_tables, table
from megatron_style.paper.work.evaluations import protocol_flags
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis, Topology
from megatron_style.schedule.stages import StageSchedule

WARM_UP_TURNS = 2
SCORED_TOKENS = 4096  # per evaluation, unless the text is `short`
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
Turn = Callable[[], float]  # returns the tokens per second of one turn


def clock_name() -> str:
    return "cpu" if torch.get_num_threads() == 1 else "wall"


def clock() -> float:
    return CLOCKS[clock_name()]()


def stages_of(numbers: Sequence[int], scale: ExperimentScale) -> Iterator[tuple[Model, int]]:
    """Yield every model with every segment length (the paper's) that the runs of the tables train."""
    seen = set()
    for spec in (spec for number in numbers for spec in table(number).at(scale).needs()):
        for length in filter(None, (spec.first_length, spec.length)):
            if (spec.model, length) not in seen:
                seen.add((spec.model, length))
                yield spec.model, length


def evaluations_of(numbers: Sequence[int], scale: ExperimentScale) -> Iterator[tuple[Model, int, Evaluation]]:
    """Yield what the tables evaluate and whose speed any table shows, which may be another one, with its model and the
    length of the model's last stage."""
    shown = set()
    for subject, measure in (each for every in all_tables() for each in every.at(scale).measured()):
        if isinstance(subject, RunSpec) and isinstance(measure, Evaluated) and measure.is_speed_of_model:
            shown.add((subject.model, subject.length, measure.evaluation))
    for spec, evaluations in (each for number in numbers for each in table(number).at(scale).needs().items()):
        for evaluation in sorted(evaluations, key=lambda each: each.name):
            if (found := (spec.model, spec.length, evaluation)) in shown:
                shown.remove(found)
                yield found


def run_of(model: Model, length: int, scale: ExperimentScale, corpus: Path) -> RunConfig:
    tokenizer = tokenizer_beside(corpus / "train")
    assert tokenizer is not None, f"{corpus} has no dictionary"
    text = PreparedText(corpus / "train", corpus / "valid", tokenizer.vocab_size)
    return run_config(RunSpec(model, length), scale, text, Path("unused"))


def trainer(run: RunConfig, topology: Topology) -> Turn:
    step = Ours(run, topology)

    def turn() -> float:
        begin = clock()
        step()
        return run.data.tokens_per_batch / (clock() - begin)

    return turn


def scorer(run: RunConfig, spec: RunSpec, evaluation: Evaluation, scale: ExperimentScale) -> Turn:
    corpus = open_corpus(run.data)
    config = folder_config(run, corpus, StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=1))
    model = Shortformer(config.model, config.vocab_size)
    initialise(model, 1, Axis())
    model.eval()
    assert isinstance(run.data.valid, Path)
    tokens = open_store(run.data.valid).tokens[: scale.short_tokens if evaluation.split == "short" else SCORED_TOKENS]
    flags = protocol_flags(scale, spec, evaluation, Path())
    protocol = make_protocol(request(flags, config.model), config, tokens=len(tokens), where="benchmark")

    def turn() -> float:
        begin = clock()
        measured = scoring.measure(model, tokens, protocol, eos=config.eos, topology=Topology())
        return speed_of(replace(measured, seconds=clock() - begin).facts(None))

    return turn


def request(flags: Sequence[str], model: ModelConfig) -> Request:
    """Return what the flags of `evaluate` ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode")
    add_protocol_flags(parser, lanes="1")
    return request_of(parser.parse_args(flags), model)


def measure(turns: Mapping[str, Turn], rounds: int) -> dict[str, float]:
    speeds: dict[str, list[float]] = {key: [] for key in turns}
    for number in range(WARM_UP_TURNS + rounds):
        for key, turn in turns.items():
            speed = turn()
            if number >= WARM_UP_TURNS:
                speeds[key].append(speed)
    return {key: statistics.median(each) for key, each in speeds.items()}


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
        training = measure(make_trainers(args.table, scale, args.corpus, topology), args.rounds)
    with torch.inference_mode():
        inference = measure(make_scorers(args.table, scale, args.corpus), args.rounds)
    record = {
        "scale": scale.name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": clock_name(),
        "rounds": args.rounds,
        OF_TRAINING: training,
        OF_SCORING: inference,
    }
    write_atomic(args.output, json.dumps(record, indent=1) + "\n")
    for key, speed in (training | inference).items():
        print(f"{key:48}{speed:10,.0f} tokens/s")


def make_trainers(numbers: Sequence[int], scale: ExperimentScale, corpus: Path, topology: Topology) -> dict[str, Turn]:
    return {
        speed_key(model, scale.length(length)): trainer(run_of(model, length, scale, corpus), topology)
        for model, length in stages_of(numbers, scale)
    }


def make_scorers(numbers: Sequence[int], scale: ExperimentScale, corpus: Path) -> dict[str, Turn]:
    turns = {}
    for model, length, evaluation in evaluations_of(numbers, scale):
        run = run_of(model, length, scale, corpus)
        key = scoring_key(model, scale.length(length), evaluation.name)
        turns[key] = scorer(run, RunSpec(model, length), evaluation, scale)
    return turns


if __name__ == "__main__":
    main()
