"""The complete estimate of a run, as one value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_style.config.run import CachePlace, RunConfig, StageConfig
from megatron_style.model.shape import count_parameters
from megatron_style.planning.memory import (
    MemoryEstimate,
    StateBytes,
    estimate_activations,
    estimate_memory,
    estimate_states,
    largest_micro_rows,
)
from megatron_style.planning.saving import SavingEstimate
from megatron_style.planning.setup import Setup, Sharding, setup_of
from megatron_style.planning.text import TextFacts
from megatron_style.planning.timing import Machine, StepTime, estimate_time, flops_of_token
from megatron_style.planning.traffic import Traffic, estimate_traffic
from megatron_style.schedule.blend import sources_of
from megatron_style.schedule.stages import Stage, stages_of

Number = TypeVar("Number", int, float)
USABLE = 0.92  # of a GPU's memory: the driver, NCCL and gaps between tensors take the rest


@dataclass(frozen=True)
class Extent:
    """The length of a stage; None where it depends on the size of a corpus that is not there."""

    steps: int | None
    tokens: int | None


@dataclass(frozen=True)
class StageEstimate:
    stage: Stage
    extent: Extent
    memory: MemoryEstimate
    unrecomputed: float  # bytes of activations at the peak if every block kept its own
    recomputed: float  # and if every block were recomputed
    fits: bool
    largest_micro_rows: int | None  # that fits; None: not even one row fits
    flops_per_token: float  # what the model requires, whatever the kernels compute
    dense_flops_per_token: float  # with attention as segment x (cache + segment)
    traffic: Traffic
    time: StepTime
    seconds: float | None  # of the entire stage

    @property
    def flops(self) -> float | None:
        return None if self.extent.tokens is None else self.extent.tokens * self.flops_per_token


@dataclass(frozen=True)
class ScaleEstimate:
    """The slowest stage on some number of GPUs."""

    gpus: int
    stage: int
    step_seconds: float
    communication_seconds: float
    communication_share: float
    tokens_per_second: float
    dominates: bool  # communication takes more than half of the step


@dataclass(frozen=True)
class Totals:
    """Sums over the run; None where they depend on the size of a corpus that is not there."""

    steps: int | None
    tokens: int | None
    flops: float | None
    seconds: float | None
    seconds_at_last_length: float | None  # if all tokens were trained as in the last stage
    saving: float | None  # the share of those seconds that the earlier stages save


@dataclass(frozen=True)
class RunEstimate:
    parameters: int
    text: TextFacts
    sharding: Sharding
    tensor: int
    data: int
    sequence: bool
    recompute: bool
    cache: CachePlace
    gpu: str
    efficiency: float
    memory: int  # of each GPU, in bytes
    stages: tuple[StageEstimate, ...]
    totals: Totals
    zero_stages: tuple[StateBytes, ...]  # the states under ZeRO 0, 1, 2 and 3
    scaling: tuple[ScaleEstimate, ...]
    communication_dominates_from: int | None  # the smallest of the compared numbers of GPUs
    saving: SavingEstimate
    blend: tuple[str, ...] = ()  # how each stage divides its rows among the sources, if there are several


def estimate_run(
    run: RunConfig, text: TextFacts, sharding: Sharding, machine: Machine, *, gpus: Sequence[int], memory: int
) -> RunEstimate:
    """Return the estimate for the first number of GPUs; its `scaling` compares them all."""
    setup = setup_of(run, text, sharding, gpus=gpus[0])
    ranks = [run.on_ranks(count // run.parallel.tensor) for count in gpus]
    run = ranks[0]
    stages = stages_of(run)
    per_step = run.data.tokens_per_batch * setup.data
    extents = extents_of(run.stages, per_step, text.tokens)
    estimates = tuple(
        _estimate_stage(setup, stage, extent, machine, memory) for stage, extent in zip(stages, extents, strict=True)
    )
    scaling = tuple(
        _estimate_scale(setup_of(run, text, sharding, gpus=count), stages_of(divided), machine)
        for count, divided in zip(gpus, ranks, strict=True)
    )
    return RunEstimate(
        parameters=count_parameters(setup.model, text.vocab_size),
        text=text,
        sharding=sharding,
        tensor=setup.tensor,
        data=setup.data,
        sequence=setup.sequence,
        recompute=setup.recompute,
        cache=setup.cache,
        gpu=machine.gpu.name,
        efficiency=machine.efficiency,
        memory=memory,
        stages=estimates,
        totals=_totals(estimates, per_step),
        zero_stages=tuple(estimate_states(_under_zero(setup, zero_stage)) for zero_stage in range(4)),
        scaling=scaling,
        communication_dominates_from=min((scale.gpus for scale in scaling if scale.dominates), default=None),
        saving=SavingEstimate.of(setup, run.output, stages, max(stage.time.total for stage in estimates)),
        blend=tuple(_blends(run, text, stages, setup.data)),
    )


def _blends(run: RunConfig, text: TextFacts, stages: Sequence[Stage], data_parallel: int) -> Iterator[str]:
    """Describe the blend of each stage, or refuse one without rows for a source, as `train` would."""
    if not run.data.is_blend or not text.source_tokens:
        return
    sources = sources_of(run.data, text.source_tokens)
    for stage in stages:
        yield sources.describe(sources.allot(stage.rows * data_parallel, stage.segment_length, f"stages.{stage.index}"))


def extents_of(stages: Sequence[StageConfig], tokens_per_step: int, corpus_tokens: int | None) -> Iterator[Extent]:
    """Yield the extent of each stage. Unlike the schedule, which is exact, a short last step counts as a full one."""
    before: int | None = 0
    for stage in stages:
        extent = _extent(stage, tokens_per_step, corpus_tokens, before)
        before = None if before is None or extent.tokens is None else before + extent.tokens
        yield extent


def _extent(stage: StageConfig, tokens_per_step: int, corpus_tokens: int | None, before: int | None) -> Extent:
    if stage.steps is not None:
        return Extent(stage.steps, stage.steps * tokens_per_step)
    if stage.tokens is not None:
        return Extent(-(-stage.tokens // tokens_per_step), stage.tokens)
    assert stage.epochs is not None
    if corpus_tokens is None or before is None:
        return Extent(None, None)
    rest = -before % corpus_tokens  # of an epoch begun by the stage before, which counts as this stage's first
    full_epochs = stage.epochs - (1 if rest else 0)
    steps = -(-rest // tokens_per_step) + full_epochs * -(-corpus_tokens // tokens_per_step)
    return Extent(steps, rest + full_epochs * corpus_tokens)


def _totals(stages: Sequence[StageEstimate], tokens_per_step: int) -> Totals:
    tokens = _sum([stage.extent.tokens for stage in stages])
    seconds = _sum([stage.seconds for stage in stages])
    at_last = None if tokens is None else tokens / tokens_per_step * stages[-1].time.total
    return Totals(
        steps=_sum([stage.extent.steps for stage in stages]),
        tokens=tokens,
        flops=_sum([stage.flops for stage in stages]),
        seconds=seconds,
        seconds_at_last_length=at_last,
        saving=None if seconds is None or at_last is None else 1 - seconds / at_last,
    )


def _estimate_stage(setup: Setup, stage: Stage, extent: Extent, machine: Machine, memory: int) -> StageEstimate:
    needed = estimate_memory(setup, stage)
    time = estimate_time(setup, stage, machine)
    return StageEstimate(
        stage=stage,
        extent=extent,
        memory=needed,
        unrecomputed=estimate_activations(replace(setup, recompute=False), stage).peak,
        recomputed=estimate_activations(replace(setup, recompute=True), stage).peak,
        fits=needed.total <= USABLE * memory,
        largest_micro_rows=largest_micro_rows(setup, stage, USABLE * memory),
        flops_per_token=flops_of_token(setup, stage),
        dense_flops_per_token=flops_of_token(setup, stage, causal_once=False),
        traffic=estimate_traffic(setup, stage),
        time=time,
        seconds=None if extent.steps is None else extent.steps * time.total,
    )


def _estimate_scale(setup: Setup, stages: Sequence[Stage], machine: Machine) -> ScaleEstimate:
    times = {stage.index: estimate_time(setup, stage, machine) for stage in stages}
    slowest = max(times, key=lambda index: times[index].total)
    time = times[slowest]
    stage = stages[slowest]
    return ScaleEstimate(
        gpus=setup.data * setup.tensor,
        stage=slowest,
        step_seconds=time.total,
        communication_seconds=time.communication,
        communication_share=time.communication_share,
        tokens_per_second=setup.data * stage.rows * stage.segment_length / time.total,
        dominates=time.communication_share > 0.5,
    )


def _under_zero(setup: Setup, zero_stage: int) -> Setup:
    return replace(setup, sharding=replace(setup.sharding, zero_stage=zero_stage))


def _sum(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
