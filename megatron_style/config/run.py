"""The settings of a run: the sections of RUN.yaml, frozen, typed and checked once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from megatron_style.base.errors import UserError
from megatron_style.config.data import DataConfig, Tokens
from megatron_style.config.model import DEFAULT_OPTIMIZER, ModelConfig, OptimizerKind
from megatron_style.config.section import DURATION, Section

Duration = Annotated[str, Field(pattern=DURATION)]
StepsOrTime = Annotated[
    Annotated[PositiveInt, Tag("(steps)")] | Annotated[Duration, Tag("(time)")],
    Discriminator(lambda value: "(time)" if isinstance(value, str) else "(steps)"),
]
CachePlace = Literal["device", "host"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class StageConfig(Section):
    """One stretch of training at a fixed segment length; its extent is in epochs, steps or tokens."""

    segment_length: Tokens  # of every row; it divides data.tokens_per_batch
    cache_length: Tokens | None = None  # default: the segment length, when the model has a cache
    epochs: PositiveInt | None = None  # passes over the training text; one of epochs, steps, tokens
    steps: PositiveInt | None = None  # updates
    tokens: PositiveInt | None = None  # over all data-parallel ranks
    micro_rows: PositiveInt | None = None  # default: as many as parallel.micro_tokens allows

    @model_validator(mode="after")
    def _one_extent(self) -> Self:
        given = [name for name in ("epochs", "steps", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"needs exactly one of epochs, steps, tokens; it has {found}")
        return self


class LearningRateConfig(Section):
    """Linear warm-up, then cosine periods, each `period_growth` times longer and `shrink` times lower."""

    peak: PositiveFloat  # after the warm-up
    floor: NonNegativeFloat = 0.0  # at the end of a period
    warmup_steps: NonNegativeInt = 0  # updates from warmup_from to peak
    warmup_from: NonNegativeFloat = 1e-7  # of the first update, if there is a warm-up
    period_steps: PositiveInt | None = None  # default: one period, up to the last step
    period_growth: float = Field(1.0, ge=1)  # length of a period relative to the one before
    shrink: float = Field(1.0, gt=0, le=1)  # of peak and floor from one period to the next

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.floor > self.peak:
            raise ValueError(f"floor ({self.floor}) must not be above peak ({self.peak})")
        return self


class SpikeConfig(Section):
    """The reaction to a loss above `factor` times the median of the `window` losses before it."""

    factor: float = Field(gt=1)  # times the median
    action: Literal["skip", "stop"]  # skip the update, or stop the run
    window: PositiveInt = 64  # steps whose median loss counts


class OptimizerConfig(Section):
    """Optimizer, schedule and clipping. Each may be in the ds_config instead, never in both."""

    name: OptimizerKind | None = None  # default: nag
    learning_rate: LearningRateConfig | None = None  # required, unless the ds_config has a scheduler
    momentum: Fraction = 0.99  # of nag
    betas: tuple[Fraction, Fraction] = (0.9, 0.98)  # of adamw
    eps: PositiveFloat = 1e-8  # of adamw
    weight_decay: NonNegativeFloat = 0.0  # decoupled from the gradient
    decay: Literal["matrices", "all"] | None = None  # what decays; default: matrices; for nag all, as in the reference
    clip_norm: PositiveFloat | None = None  # largest norm of the gradient; default: 0.1
    max_skipped: PositiveInt = 50  # updates in a row without a finite gradient that end the run
    spike: SpikeConfig | None = None  # default: no loss is too high

    @property
    def kind(self) -> OptimizerKind:
        return self.name or DEFAULT_OPTIMIZER


class ParallelConfig(Section):
    tensor: PositiveInt = 1  # ranks that share each layer; the other ranks are data-parallel
    sequence: bool = False  # vectors between layers are split over these ranks, by position
    recompute: bool = False  # activations of each block in the backward pass, instead of keeping them
    cache: CachePlace = "device"  # where caches are between their uses; host: fetched one micro-batch ahead
    meant_for: PositiveInt | None = None  # ranks: `plan` takes this number, and `train` says if there are others
    micro_tokens: Tokens | None = None  # the most tokens that a rank forwards at once; default: the full batch


class OutputConfig(Section):
    path: Path  # folder of the run: metrics, checkpoints, model
    log_every: PositiveInt = 10  # steps between two lines of the log
    evaluate_every: PositiveInt | None = None  # steps; default: at the end of each stage
    evaluate_tokens: PositiveInt | None = None  # of the held-out text; default: all
    sample_tokens: NonNegativeInt = 40  # generated after the first held-out tokens; 0: none
    save_every: StepsOrTime | None = "30m"  # steps, or a time; null: only at the end of each stage, as always
    keep_last: PositiveInt = 2  # number of checkpoints to keep
    keep_best: bool = True  # save when the held-out loss is the lowest so far, and keep that checkpoint
    keep_every: PositiveInt | None = None  # and those of every n-th step, for good
    save_async: bool = False  # true: copy to host memory, and write while training continues
    save_caches: bool = True  # false: smaller checkpoints, and a resumed run opens its lanes cold
    heartbeat_timeout: float = Field(15.0, ge=1)  # seconds; a rank without a heartbeat for longer is lost
    stop_after: Duration | None = None  # save and exit after this time, such as 90m or 11.5h

    @property
    def save_steps(self) -> int | None:
        return self.save_every if isinstance(self.save_every, int) else None

    @property
    def save_seconds(self) -> float | None:
        return seconds_of(self.save_every) if isinstance(self.save_every, str) else None

    @property
    def stop_seconds(self) -> float | None:
        return seconds_of(self.stop_after) if self.stop_after else None


class WatchConfig(Section):
    wandb: str | None = Field(None, min_length=1)  # project of Weights & Biases, through DeepSpeed's monitor
    by_tokens: bool = False  # true: TensorBoard's points also against tokens, in tensorboard_by_tokens/


def seconds_of(duration: str) -> float:
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


class RunConfig(Section):
    model: ModelConfig  # its architecture
    data: DataConfig  # its text
    stages: tuple[StageConfig, ...] = Field(min_length=1)  # of training, usually short segments first
    optimizer: OptimizerConfig = OptimizerConfig()  # its updates
    parallel: ParallelConfig = ParallelConfig()  # how a replica is split over ranks and micro-batches
    output: OutputConfig  # what is written, and how often
    watch: WatchConfig = WatchConfig()  # where progress is shown, in addition to the console and TensorBoard
    deepspeed: Path | None = None  # a ds_config: ZeRO, precision, offload; default: ZeRO 0 in fp32
    start: Path | None = None  # a model, in any form, to begin with: weights, and step and optimizer if it has them
    seed: NonNegativeInt = 1  # of first weights, order of segments and dropout

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        key, tokens = self.data.batch_key
        ways = self.parallel.tensor
        if problem := self.model.foresight:
            raise ValueError(problem)
        self._check_documents()
        if self.parallel.meant_for and self.parallel.meant_for % ways:
            raise ValueError(
                f"parallel.meant_for ({self.parallel.meant_for}) must be a multiple of parallel.tensor ({ways})"
            )
        for name, size in self.model.split_sizes.items():
            if size % ways:
                raise ValueError(f"model.{name} ({size}) must be a multiple of parallel.tensor ({ways})")
        if self.data.shuffle and self.model.cache:
            raise ValueError("data.shuffle is true, but model.cache is true: a cache needs the text in its order")
        if self.parallel.cache == "host" and not self.model.cache:
            raise ValueError("parallel.cache is host, but model.cache is false: there are no caches; remove it")
        for index, stage in enumerate(self.stages):
            if (self.parallel.micro_tokens or tokens) < stage.segment_length:
                raise ValueError(
                    f"parallel.micro_tokens ({self.parallel.micro_tokens}) must hold at least one row of "
                    f"stages.{index}.segment_length ({stage.segment_length})"
                )
            self.model.check_segment(stage.segment_length, f"stages.{index}.segment_length")
            if stage.epochs and self.data.is_blend:
                raise ValueError(
                    f"stages.{index}.epochs is {stage.epochs}, but data.train is a blend, whose sources have epochs of "
                    f"their own; give steps or tokens instead"
                )
            if stage.cache_length and not self.model.cache:
                raise ValueError(f"stages.{index}.cache_length is {stage.cache_length}, but model.cache is false")
            if tokens % stage.segment_length:
                below, above = nearest_divisors(tokens, stage.segment_length)
                raise ValueError(
                    f"stages.{index}.segment_length ({stage.segment_length}) must divide {key} "
                    f"({tokens}); the nearest lengths that do are {below} and {above}"
                )
            if self.parallel.sequence and stage.segment_length % ways:
                fitting = [length for length in divisors_of(tokens) if length % ways == 0]
                raise ValueError(
                    f"stages.{index}.segment_length ({stage.segment_length}) must be a multiple of parallel.tensor "
                    f"({ways}), because parallel.sequence is true; {_nearest(fitting, stage.segment_length)}"
                )
        return self

    def _check_documents(self) -> None:
        if self.data.reset_at_documents and (problem := self.model.mixes_documents):
            raise ValueError(f"data.reset_at_documents is true, but {problem}")
        if self.model.document_end is not None and not self.data.reset_at_documents:
            raise ValueError(
                f"model.document_end is {self.model.document_end}, but data.reset_at_documents is false; set it to true"
            )

    def on_ranks(self, data_parallel: int) -> Self:
        """Return the run on this number of data-parallel ranks: data.tokens_per_update, if it is set, is divided among
        them."""
        update = self.data.tokens_per_update
        if update is None:
            return self
        longest = max(stage.segment_length for stage in self.stages)
        if update % data_parallel or any(update // data_parallel % stage.segment_length for stage in self.stages):
            fitting = divisors_of(update // math.lcm(*(stage.segment_length for stage in self.stages)))
            near = sorted(sorted(fitting, key=lambda ranks: abs(ranks - data_parallel))[:2])
            raise UserError(
                f"data.tokens_per_update ({update}): its share on {data_parallel} data-parallel ranks is not a number "
                f"of segments of every stage (up to {longest} tokens); the nearest numbers of ranks for which it is: "
                f"{' and '.join(map(str, near))}"
            )
        data = self.data.model_copy(update={"tokens_per_batch": update // data_parallel})
        return self.model_copy(update={"data": data})

    def with_vocabulary(self, vocab_size: int) -> Self:
        """Return the run for a vocabulary of this size."""
        return self.model_copy(update={"model": self.model.with_vocabulary(vocab_size)})

    def with_document_end(self, token: int) -> Self:
        """Return the run with a model in which nothing before this token is seen after it."""
        return self.model_copy(update={"model": self.model.model_copy(update={"document_end": token})})


def _nearest(fitting: Sequence[int], wanted: int) -> str:
    """Advise the nearest of the lengths that fit."""
    below = [length for length in fitting if length < wanted][-1:]
    above = [length for length in fitting if length > wanted][:1]
    if not fitting:
        return "no length that divides data.tokens_per_batch is one; set it to false"
    return f"the nearest lengths that are: {' and '.join(map(str, below + above))}"


def divisors_of(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisors(number: int, wanted: int) -> tuple[int, int]:
    """Return the divisors of `number` next to `wanted`, below and above."""
    divisors = divisors_of(number)
    below = max((d for d in divisors if d < wanted), default=1)
    return below, min((d for d in divisors if d > wanted), default=number)
