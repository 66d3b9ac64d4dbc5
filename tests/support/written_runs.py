"""Write folders of runs that were never trained, whose recorded losses fall as real ones do."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

Event = dict[str, object]


@dataclass(frozen=True)
class WrittenStage:
    segment_length: int
    steps: int
    tokens_per_second: float
    memory_bytes: int = 3 * 2**30


@dataclass(frozen=True)
class WrittenRun:
    stages: Sequence[WrittenStage]
    floor: float = 2.9  # the limit of the loss
    log_every: int = 10
    evaluate_every: int = 100
    tokens_per_batch: int = 9216
    flops_per_token: float = 6.4e8
    seed: int = 1
    cache: bool = True
    text_digest: str = ""  # of the held-out text; empty: of a run that did not record it
    slow_rank: int | None = None  # of several; None: of a single rank


SHORTFORMER = WrittenRun((WrittenStage(128, 1200, 21_000), WrittenStage(512, 800, 16_500, 5 * 2**30)), floor=2.86)
BASELINE = WrittenRun((WrittenStage(512, 2000, 12_400, 6 * 2**30),), floor=3.02, seed=2, cache=False)
LONG = WrittenRun(
    (WrittenStage(64, 700, 23_500), WrittenStage(128, 700, 21_000), WrittenStage(1024, 500, 9_100, 9 * 2**30)),
    floor=2.95,
    seed=3,
)


def write_run(folder: Path, run: WrittenRun = SHORTFORMER, *, without: Sequence[str] = ()) -> Path:
    """Write the folder; `without` leaves out keys that older versions did not record."""
    folder.mkdir(parents=True)
    lines = ({key: value for key, value in event.items() if key not in without} for event in events(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stages = [{"segment_length": stage.segment_length, "steps": stage.steps} for stage in run.stages]
    settings = {
        "model": {"layers": 16, "hidden_size": 1024, "cache": run.cache},
        "stages": stages,
        "output": {"path": folder.name, "log_every": run.log_every, "evaluate_every": run.evaluate_every},
        "seed": run.seed,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder


def events(run: WrittenRun) -> Iterator[Event]:
    chance = random.Random(run.seed)
    step = 0
    seconds = 0.0
    for index, stage in enumerate(run.stages):
        opening = {
            "index": index,
            "segment_length": stage.segment_length,
            "cache_length": stage.segment_length * run.cache,
        }
        yield {"kind": "stage", "step": step + 1, **opening, **totals(run, step, seconds)}
        begin = seconds
        first = step
        for step in range(first + 1, first + stage.steps + 1):
            seconds += run.tokens_per_batch / stage.tokens_per_second * chance.uniform(0.97, 1.05)
            is_last = step == first + stage.steps
            if step % run.log_every == 0 or is_last:
                yield train_event(run, stage, step, seconds, seconds - begin, chance)
            if step % run.evaluate_every == 0 or is_last:
                yield from validation(run, step, seconds, chance)
        done = {"stage_tokens": stage.steps * run.tokens_per_batch, "stage_seconds": seconds - begin}
        yield {"kind": "stage_end", "step": step, "index": index, "tokens": step * run.tokens_per_batch, **done}


def train_event(
    run: WrittenRun, stage: WrittenStage, step: int, seconds: float, stage_seconds: float, chance: random.Random
) -> Event:
    total = sum(stage.steps for stage in run.stages)
    ranks: Event = {}
    if run.slow_rank is not None:
        usual = {"data": 0.01, "forward": 0.1, "backward": 0.3, "update": 0.05}
        slow = usual | {"forward": chance.uniform(0.19, 0.21), "backward": 0.2}
        ranks = {"slowest_rank": run.slow_rank, "slowest": slow, "fastest_rank": 0, "fastest": usual}
    return {
        "kind": "train",
        "step": step,
        "loss": loss_at(run, step) + chance.gauss(0, 0.05),
        "grad_norm": (0.3 + 4 / step**0.5) * math.exp(chance.gauss(0, 0.25)),
        "learning_rate": min(step / 100, (1 + math.cos(math.pi * step / total)) / 2) * 2.5e-4,
        "skipped": 0,
        **totals(run, step, seconds),
        "tokens_per_second": stage.tokens_per_second,
        "stage_seconds": stage_seconds,
        "flops_per_second": run.flops_per_token * stage.tokens_per_second,
        "memory_bytes": stage.memory_bytes,
        **ranks,
    }


def validation(run: WrittenRun, step: int, seconds: float, chance: random.Random) -> Iterator[Event]:
    loss = loss_at(run, step) + 0.12 + chance.gauss(0, 0.01)
    early = 0.2 if run.cache else 1.1  # without a cache the first tokens of a segment see nothing
    bands = [loss - early / 6 + early * math.exp(-band / 2) for band in range(16)]
    held_out: Event = {"loss": loss, "perplexity": math.exp(loss), "by_position": bands, "scored_tokens": 20_000}
    if run.text_digest:
        held_out["text_digest"] = run.text_digest
    yield {"kind": "valid", "step": step, **held_out, **totals(run, step, seconds)}
    story = (
        f" after {step} steps < & > the Congress of the United States shall be called upon to consider the condition"
    )
    yield {"kind": "sample", "step": step, "tokens": step * run.tokens_per_batch, "prompt": "The people", "text": story}


def totals(run: WrittenRun, step: int, seconds: float) -> Event:
    tokens = step * run.tokens_per_batch
    return {"tokens": tokens, "seconds": seconds, "flops": tokens * run.flops_per_token}


def loss_at(run: WrittenRun, step: int) -> float:
    return run.floor + 7.2 * math.exp(-0.55 * math.log1p(step / 12))
