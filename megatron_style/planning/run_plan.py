"""Everything a plan says about a run, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_style.config.run import RunConfig
from megatron_style.model.shape import count_parameters
from megatron_style.planning.communication import Traffic, plan_traffic
from megatron_style.planning.corpus import TextFacts
from megatron_style.planning.extent import Extent, extents_of
from megatron_style.planning.memory import MemoryPlan, StateBytes, largest_micro_rows, plan_memory, plan_states
from megatron_style.planning.setup import Setup
from megatron_style.planning.sharding import Sharding
from megatron_style.planning.timing import Machine, StepTime, flops_of_token, plan_time
from megatron_style.schedule.stages import Stage, resolve_stage

Number = TypeVar("Number", int, float)
USABLE = 0.92  # of a GPU's memory: the driver, NCCL and gaps between tensors take the rest


@dataclass(frozen=True)
class StagePlan:
    stage: Stage
    extent: Extent
    memory: MemoryPlan
    unrecomputed: float  # bytes of activations at the peak if every block kept its own
    recomputed: float  # and if every block were computed again
    fits: bool
    largest_micro_rows: int | None  # that fit; None: not even one row does
    flops_per_token: float  # the model's
    dense_flops_per_token: float  # with attention as segment x (cache + segment)
    traffic: Traffic
    time: StepTime
    seconds: float | None  # of the whole stage


@dataclass(frozen=True)
class ScalePlan:
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
    """Of the whole run; None where it takes the size of the corpus to know."""

    steps: int | None
    tokens: int | None
    flops: float | None
    seconds: float | None
    seconds_at_last_length: float | None  # if all tokens were trained as in the last stage
    saving: float | None  # the share of those seconds that the earlier stages save


@dataclass(frozen=True)
class RunPlan:
    parameters: int
    text: TextFacts
    sharding: Sharding
    tensor: int
    data: int
    recompute: bool
    gpu: str
    efficiency: float
    memory: int  # of each GPU, in bytes
    stages: tuple[StagePlan, ...]
    totals: Totals
    zero_stages: tuple[StateBytes, ...]  # the states under ZeRO 0, 1, 2 and 3
    scaling: tuple[ScalePlan, ...]
    communication_dominates_from: int | None  # so many of the GPUs compared


def setup_of(run: RunConfig, text: TextFacts, sharding: Sharding, *, gpus: int) -> Setup:
    tensor = run.parallel.tensor
    return Setup(
        model=run.model,
        vocab_size=text.vocab_size,
        band_shares=text.band_shares,
        sharding=sharding,
        tensor=tensor,
        data=gpus // tensor,
        recompute=run.parallel.recompute,
    )


def plan_run(
    run: RunConfig, text: TextFacts, sharding: Sharding, machine: Machine, *, gpus: Sequence[int], memory: int
) -> RunPlan:
    """The plan is for the first number of GPUs; `scaling` compares them all."""
    setup = setup_of(run, text, sharding, gpus=gpus[0])
    stages = tuple(resolve_stage(run, index) for index in range(len(run.stages)))
    per_step = run.data.tokens_per_batch * setup.data
    extents = extents_of(run.stages, per_step, text.tokens)
    plans = tuple(
        _plan_stage(setup, stage, extent, machine, memory) for stage, extent in zip(stages, extents, strict=True)
    )
    scaling = tuple(_plan_scale(setup_of(run, text, sharding, gpus=count), stages, machine) for count in gpus)
    return RunPlan(
        parameters=count_parameters(run.model, text.vocab_size),
        text=text,
        sharding=sharding,
        tensor=setup.tensor,
        data=setup.data,
        recompute=setup.recompute,
        gpu=machine.gpu.name,
        efficiency=machine.efficiency,
        memory=memory,
        stages=plans,
        totals=_totals(plans, per_step),
        zero_stages=tuple(plan_states(_under_zero(setup, zero_stage)) for zero_stage in range(4)),
        scaling=scaling,
        communication_dominates_from=min((scale.gpus for scale in scaling if scale.dominates), default=None),
    )


def _totals(plans: Sequence[StagePlan], tokens_per_step: int) -> Totals:
    steps, tokens = _sum([plan.extent.steps for plan in plans]), _sum([plan.extent.tokens for plan in plans])
    seconds = _sum([plan.seconds for plan in plans])
    at_last = None if tokens is None else tokens / tokens_per_step * plans[-1].time.total
    return Totals(
        steps=steps,
        tokens=tokens,
        flops=_sum([None if p.extent.tokens is None else p.extent.tokens * p.flops_per_token for p in plans]),
        seconds=seconds,
        seconds_at_last_length=at_last,
        saving=None if seconds is None or at_last is None else 1 - seconds / at_last,
    )


def _plan_stage(setup: Setup, stage: Stage, extent: Extent, machine: Machine, memory: int) -> StagePlan:
    plan, time = plan_memory(setup, stage), plan_time(setup, stage, machine)
    peaks = (plan_memory(replace(setup, recompute=again), stage).activations.peak for again in (False, True))
    unrecomputed, recomputed = peaks
    return StagePlan(
        stage=stage,
        extent=extent,
        memory=plan,
        unrecomputed=unrecomputed,
        recomputed=recomputed,
        fits=plan.total <= USABLE * memory,
        largest_micro_rows=largest_micro_rows(setup, stage, USABLE * memory),
        flops_per_token=flops_of_token(setup, stage),
        dense_flops_per_token=flops_of_token(setup, stage, causal_once=False),
        traffic=plan_traffic(setup, stage),
        time=time,
        seconds=None if extent.steps is None else extent.steps * time.total,
    )


def _plan_scale(setup: Setup, stages: Sequence[Stage], machine: Machine) -> ScalePlan:
    times = {stage.index: plan_time(setup, stage, machine) for stage in stages}
    slowest = max(times, key=lambda index: times[index].total)
    time, stage = times[slowest], stages[slowest]
    return ScalePlan(
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
