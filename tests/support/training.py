"""Train a small run for a few steps on any grid, and keep everything that a test may compare."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  what every engine imports, once before ranks are forked
import numpy as np
import torch

from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import Corpus, open_corpus
from megatron_style.data.store import TokenStoreWriter
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.session import distributed_session
from megatron_style.model.memory import Memory
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import buffer_layouts_of, layouts_of
from megatron_style.schedule.learning_rate import learning_rate_at
from megatron_style.schedule.stages import StageSchedule

VOCAB_SIZE = 37  # prime, so that no number of ranks divides it


@dataclass
class History:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    by_source: list[list[float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def write_corpus(folder: Path, *, tokens: int = 1200, vocab_size: int = VOCAB_SIZE, seed: int = 7) -> None:
    """Write random text with some order in it, so that there is something to learn."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    stream = rng.integers(0, vocab_size, tokens)
    stream[1::2] = (stream[::2][: len(stream[1::2])] * 3 + 1) % vocab_size
    for split in ("train", "valid"):
        with TokenStoreWriter(folder / split, vocab_size) as writer:
            writer.append(stream, np.array([len(stream)]))


def write_ds_config(folder: Path, **settings: Any) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(settings))
    return path


def train_on(world: int, run: RunConfig) -> History:
    """Run all steps on `world` ranks and return the history of the first."""
    history: History = run_ranks(world, _train, run)[0]
    return history


def _train(run: RunConfig) -> History:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        corpus: Corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        history = History()
        caches: tuple[Memory, ...] = ()
        for step in range(schedule.total_steps):
            plan = schedule.plan(step)
            loss, caches = accumulate_gradients(engine, corpus, plan, caches, topology, run.seed)
            update = engine.update(learning_rate_at(step, run.optimizer.learning_rate, schedule.total_steps))
            history.losses.append(topology.data.sum(loss.nll).item())
            history.norms.append(float(update.grad_norm))
            history.applied.append(update.applied)
            if loss.by_source is not None:
                history.by_source.append(topology.data.sum(loss.by_source).tolist())
        history.weights = full_weights(engine)
        return history


def full_weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return all unsharded weights on the first rank. All ranks have to call it together."""
    weights = {}
    for name in [*layouts_of(engine.model), *buffer_layouts_of(engine.model)]:
        weight = engine.state.full_weight(name)
        if weight is not None:
            weights[name] = weight.clone()
    return weights
