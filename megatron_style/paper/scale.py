"""Scales of an experiment, relative to the paper's: lengths, training, text and model.

All other modules use the paper's own numbers (L = 3072, 50 epochs), which are scaled here, so that a row of a table
means the same at every scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_style.base.errors import UserError


@dataclass(frozen=True)
class ModelSize:
    layers: int
    hidden_size: int
    heads: int
    ffn_size: int


@dataclass(frozen=True)
class ExperimentScale:
    name: str
    shrink: int  # the paper's segment length divided by the one here
    lengths: tuple[int, ...]  # those of the paper's segment lengths that are run
    first_epochs: tuple[int, ...]  # those of the paper's first stages that are run, in its epochs
    steps: int
    steps_of_50_epochs: int
    tokens_per_batch: int
    evaluate_every: int
    save_every: int
    held_out_tokens: int | None  # scored per split; None: all
    watched_tokens: int | None  # scored at each validation during training
    short_tokens: int  # scored one token at a time, where only speed and equality are of interest
    windows: int | None  # a sliding window scores 1/windows of its tokens; None: its last one only, as in the paper
    seeds: int
    probe: int | None = None  # the lists of the datastore's index that a kNN-LM searches; None: exact search
    processes: int = 1
    model: ModelSize | None = None  # None: the paper's model and optimizer, as the run files have them
    peak_rate: float = 0.003
    band_factor: int = 1  # each band of rarer words has embeddings narrower by this factor

    @property
    def is_paper(self) -> bool:
        return self.model is None

    def length(self, paper_length: int) -> int:
        return paper_length // self.shrink

    def stride(self, paper_length: int, paper_stride: int) -> int:
        """Return the stride. A stride of 1, a window per token, cannot shrink: it becomes a share of the window."""
        if paper_stride > 1:
            return max(1, paper_stride // self.shrink)
        return 1 if self.windows is None else max(1, self.length(paper_length) // self.windows)

    def first_steps(self, paper_epochs: int) -> int:
        return paper_epochs * self.steps_of_50_epochs // 50

    @property
    def keep_every(self) -> int:
        """Return the interval of kept checkpoints: those at which a first stage may end, where other runs begin."""
        return self.first_steps(self.first_epochs[0])


_LENGTHS = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 3072)
_EPOCHS = (25, 50, 75, 100, 125, 150, 175, 200)

_MINIATURE = ExperimentScale(
    "miniature", shrink=32, lengths=(128, 384, 512, 3072), first_epochs=(50, 100), steps=20, steps_of_50_epochs=5,
    tokens_per_batch=192, evaluate_every=5, save_every=5, held_out_tokens=600, watched_tokens=300, short_tokens=96,
    windows=4, seeds=1, model=ModelSize(layers=2, hidden_size=32, heads=2, ffn_size=64), peak_rate=0.01,
)  # fmt: skip
# About 0.9M tokens per run: 15 minutes per table on two cores, with two seeds.
_TINY = ExperimentScale(
    "tiny", shrink=8, lengths=(64, 128, 384, 512, 3072), first_epochs=(50, 100, 150), steps=1200,
    steps_of_50_epochs=300, tokens_per_batch=768, evaluate_every=100, save_every=300, held_out_tokens=24_576,
    watched_tokens=8192, short_tokens=512, windows=8, seeds=2,
    model=ModelSize(layers=4, hidden_size=128, heads=4, ffn_size=512),
)  # fmt: skip
# Five epochs of WikiText-2, 10M tokens per run. The longest segments have eight rows in a batch.
_SMALL = ExperimentScale(
    "small", shrink=8, lengths=(64, 128, 384, 512, 1024, 3072), first_epochs=(50, 100), steps=3400,
    steps_of_50_epochs=850, tokens_per_batch=3072, evaluate_every=170, save_every=170, held_out_tokens=None,
    watched_tokens=32_768, short_tokens=1024, windows=16, seeds=2, probe=32,
    model=ModelSize(layers=4, hidden_size=96, heads=4, ffn_size=384), peak_rate=0.006, band_factor=2,
)  # fmt: skip
_PAPER = ExperimentScale(
    "paper", shrink=1, lengths=_LENGTHS, first_epochs=_EPOCHS, steps=286_000, steps_of_50_epochs=70_050,
    tokens_per_batch=9216, evaluate_every=1401, save_every=7005, held_out_tokens=None, watched_tokens=None,
    short_tokens=4096, windows=None, seeds=1, probe=32, processes=8,
)  # fmt: skip
SCALES: Mapping[str, ExperimentScale] = MappingProxyType(
    {scale.name: scale for scale in (_MINIATURE, _TINY, _SMALL, _PAPER)}
)


def scale_named(name: str) -> ExperimentScale:
    if name not in SCALES:
        raise UserError(f"--scale {name}: unknown scale; choose one of {', '.join(SCALES)}")
    return SCALES[name]
