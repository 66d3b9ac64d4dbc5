"""The two sides of the training benchmark, on the same text and from the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plain.model import PlainModel
from benchmarks.plain.optimizer import PlainNAG
from megatron_style.config.run import RunConfig
from megatron_style.data.batch import read_batch
from megatron_style.data.corpus import open_corpus
from megatron_style.data.store import TokenStoreWriter
from megatron_style.engine.build import build_engine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.parallel.topology import Topology
from megatron_style.planning.timing import training_flops_per_token
from megatron_style.schedule.stages import StageSchedule

RATE = 1e-3
MODELS: dict[str, dict[str, Any]] = {
    "medium": {"layers": 6, "hidden_size": 512, "heads": 8, "ffn_size": 2048, "cutoffs": [5_000, 15_000]},
    "paper": {"layers": 16, "hidden_size": 1024, "heads": 8, "ffn_size": 4096, "cutoffs": [20_000, 60_000]},
}
VOCAB_SIZES = {"medium": 40_000, "paper": 267_744}


@dataclass(frozen=True)
class Setting:
    """One column of the benchmark: a segment length, as the paper uses it."""

    model: str
    length: int
    cached: bool
    tokens: int = 9_216

    def __str__(self) -> str:
        return f"L={self.length}{' cached' if self.cached else ''}"

    def run(self, folder: Path, **more: Any) -> RunConfig:
        sizes = MODELS[self.model]
        model = {key: value for key, value in sizes.items() if key != "cutoffs"} | {
            "positions": "infused" if self.cached else "added",
            "cache": self.cached,
            "vocabulary": {"kind": "adaptive", "cutoffs": sizes["cutoffs"]},
        }
        data = {
            "model": model,
            "data": {"train": str(folder / "train"), "valid": str(folder / "train"), "tokens_per_batch": self.tokens,
                     "vocab_size": VOCAB_SIZES[self.model]},
            "stages": [{"segment_length": self.length, "steps": 1000}],
            "optimizer": {"learning_rate": {"peak": RATE, "floor": RATE, "warmup_steps": 0}},
            "output": {"path": str(folder / "run"), "sample_tokens": 0, "evaluate_tokens": self.length + 1},
        }  # fmt: skip
        return RunConfig.parse(data | more, source="benchmark")

    @property
    def flops_per_token(self) -> float:
        """Return what the model requires: products that the causal mask hides do not count."""
        run = self.run(Path())
        cache = self.length if self.cached else 0
        return training_flops_per_token(
            run.model, VOCAB_SIZES[self.model], segment_length=self.length, cache_length=cache
        )


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def write_text(folder: Path, vocab_size: int, tokens: int = 2_000_000) -> None:
    """Write random tokens that are as frequent as Zipf's law says."""
    shares = 1 / np.arange(1, vocab_size + 1)
    text = np.random.default_rng(0).choice(vocab_size, tokens, p=shares / shares.sum())
    with TokenStoreWriter(folder / "train", vocab_size) as writer:
        writer.append(text, np.array([tokens]))


class Ours:
    """The trainer's own step: reading, forward, backward, update."""

    def __init__(self, run: RunConfig, topology: Topology) -> None:
        self._corpus = open_corpus(run.data)
        self._topology = topology
        self._seed = run.seed
        self._schedule = StageSchedule(run, corpus_tokens=self._corpus.train_tokens, data_parallel=topology.data.size)
        self.engine = build_engine(run, self._schedule, self._corpus.vocab_size, topology)
        self._caches: tuple[Any, ...] = ()
        self._step = 0

    def __call__(self) -> torch.Tensor:
        plan = self._schedule.plan(self._step)
        loss, self._caches = accumulate_gradients(
            self.engine, self._corpus, plan, self._caches, self._topology, self._seed
        )
        self.engine.update(RATE)
        self._step += 1
        return loss.nll


class Plain:
    """The step of the paper's code, on the batches that ours reads."""

    def __init__(self, run: RunConfig, weights: dict[str, torch.Tensor] | None = None) -> None:
        self._corpus = open_corpus(run.data)
        self._schedule = StageSchedule(run, corpus_tokens=self._corpus.train_tokens, data_parallel=1)
        self._cached = run.model.cache
        self._model = PlainModel(run.model, self._corpus.vocab_size)
        if weights:
            self._model.load_state_dict(weights)
        self._optimizer = PlainNAG(self._model.parameters(), momentum=0.99, clip_norm=0.1)
        self._caches: list[torch.Tensor] = []
        self._step = 0

    def __call__(self) -> torch.Tensor:
        plan = self._schedule.plan(self._step)
        batch = read_batch([self._corpus.train[0].tokens], plan.read(data_rank=0, micro=0), eos=self._corpus.eos)
        inputs = torch.from_numpy(batch.inputs)
        targets = torch.from_numpy(batch.targets)
        if plan.opens_lanes or not self._cached:
            self._caches = self._model.empty_caches(len(inputs))
        loss, self._caches = self._model(inputs, targets, self._caches)
        loss.backward()
        self._optimizer.step(RATE)
        self._step += 1
        return loss.detach()
