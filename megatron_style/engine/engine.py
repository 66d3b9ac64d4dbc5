"""DeepSpeed's engine, reduced to a few verbs: forward, accumulate, update, save and load."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any, cast

import deepspeed
import torch
from torch import Tensor, nn

from megatron_style.base.errors import Diverged
from megatron_style.config.run import CachePlace
from megatron_style.engine.saving import Counters, SavedFiles, save
from megatron_style.engine.spikes import Spike
from megatron_style.engine.state import EngineState
from megatron_style.engine.zero_layout import (
    MpuView,
    state_of_first_step,
    without_optimizer,
)
from megatron_style.model.caches import PLACES
from megatron_style.model.memory import Memory, memory_of
from megatron_style.model.shortformer import Output, Shortformer
from megatron_style.parallel.device.phase_times import PhaseTimes
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import (
    layout_of,
)
from megatron_style.parallel.topology import Axis, Topology


@dataclass(frozen=True)
class LossShare:
    """One data-parallel rank's share of a step's losses. They stay on the device, so that no step waits for a loss that
    is not shown."""

    nll: Tensor  # summed over the ranks, it is the mean over all target tokens of the step
    auxiliary: Mapping[str, Tensor]  # further losses by name, each the mean over this rank's micro-batches
    by_source: Tensor | None = None  # [sources] of a blend; summed over the ranks, the mean over each source's tokens


@dataclass(frozen=True)
class Update:
    learning_rate: float
    grad_norm: Tensor | float  # before clipping; on the device, so that the host waits for it only if it is shown
    applied: bool  # false if the gradient was not finite, or the loss spiked
    spike: Spike | None = None


class TrainingEngine:
    def __init__(
        self,
        model: Shortformer,
        optimizer: torch.optim.Optimizer | list[dict[str, Any]],
        ds_config: dict[str, Any],
        topology: Topology,
        *,
        clip_norm: float,
        max_skipped: int,
        cache: CachePlace = "device",
        speaks: bool = False,
    ) -> None:
        """Build DeepSpeed's engine. A list in place of an optimizer holds the parameter groups for the ds_config's own
        optimizer."""
        has_own = isinstance(optimizer, list)
        self._topology = topology
        self._clip_norm = clip_norm
        self._max_skipped = max_skipped
        self.skipped_in_a_row = 0
        self._tally: Tensor | None = None  # of this update's micro-batches so far
        # Without `speaks`, hide even its warning about an optimizer that it has not tested with ZeRO; we have.
        with _at_level("INFO" if speaks else "ERROR"), redirect_stdout(sys.stderr if speaks else StringIO()):
            self._engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=None if has_own else optimizer,
                model_parameters=optimizer if has_own else None,
                config=ds_config,
                mpu=MpuView(topology),
                dist_init_required=False,
            )
        self.state = EngineState(self._engine, topology)
        self.times = PhaseTimes(self.device)
        if speaks:
            deepspeed.utils.logger.setLevel("INFO")
        self.caches = PLACES[cache](self.device)
        if self.zero_stage == 3:
            # The vocabulary is read by methods, not by forward calls, so the model's own forward has to gather it.
            for param in model.vocabulary.parameters():
                deepspeed.zero.register_external_parameter(model, param)

    @property
    def model(self) -> Shortformer:
        return cast(Shortformer, self._engine.module)

    @property
    def device(self) -> torch.device:
        return torch.device(self._engine.device)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def zero_stage(self) -> int:
        return int(self._engine.zero_optimization_stage())

    def forward(
        self, inputs: Tensor, targets: Tensor, memory: Memory, noise: Noise | None, ages: Tensor | None = None
    ) -> Output:
        return self._engine(inputs, targets, memory, noise, ages)  # type: ignore[no-any-return]

    def full_memory(self, rows: int, capacity: int) -> Memory:
        """Return a memory of the size that rows have in the middle of a text."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        kind = memory_of(self.model.config)
        ways = self._topology.tensor.size
        return kind.full(self.model.config, rows=rows, capacity=capacity, like=like, ways=ways)

    def accumulate(self, loss: Tensor, *, is_last: bool, tally: Tensor | None = None) -> None:
        """Add this micro-batch's gradient; the last one triggers the data-parallel mean. A routing model's `tally` is
        added up too: it is to the centroids what the gradient is to the weights."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss)
        if tally is not None:
            self._tally = tally if self._tally is None else self._tally + tally

    def update(self, learning_rate: float | None, *, spike: Spike | None = None) -> Update:
        """Clip, step and clear the gradients; if they are not finite, or the loss spiked, nothing else changes. A
        learning rate of `None` leaves it to the ds_config's scheduler."""
        update = self._step(learning_rate) if spike is None else self._pretend_step(learning_rate)
        if self._tally is not None and update.applied and spike is None:
            self.model.move_centroids(self._topology.data.sum(self._tally))
        self._tally = None
        self.skipped_in_a_row = 0 if update.applied else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == self._max_skipped:
            raise Diverged(
                f"the gradients of {self._max_skipped} steps in a row are not finite (optimizer.max_skipped); resume "
                f"from an earlier checkpoint with a lower learning rate"
            )
        return update if spike is None else replace(update, applied=False, spike=spike)

    def _pretend_step(self, learning_rate: float | None) -> Update:
        """Do all of an update but the optimizer's own step: the gradients are measured and cleared, and weights and
        optimizer state stay the same, bit for bit. DeepSpeed's scheduler pauses, as it does for any skipped step."""
        engine = self._engine
        scheduler = engine.lr_scheduler
        engine.lr_scheduler = None
        with without_optimizer(engine):
            update = self._step(learning_rate)
        engine.lr_scheduler = scheduler
        engine.skipped_steps += update.applied  # DeepSpeed has counted those that are not finite
        return update

    def _step(self, learning_rate: float | None) -> Update:
        groups = self._engine.optimizer.param_groups
        if learning_rate is None:
            learning_rate = max(float(group["lr"]) for group in groups)
        else:
            for group in groups:
                group["lr"] = learning_rate
        norm: Tensor | float
        if self.zero_stage == 0:
            norm, applied = self._step_by_hand()
        else:
            self._engine.step()
            norm = self._engine.get_global_grad_norm()
            applied = self._engine.was_step_applied()
        return Update(learning_rate, norm, applied)

    def _step_by_hand(self) -> tuple[float, bool]:
        """Clip and step without ZeRO, where DeepSpeed reports no norm and checks nothing."""
        norm = gradient_norm(self.model, self._topology.tensor)
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return norm, False
        scale = min(1.0, self._clip_norm / (norm + 1e-6))
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], scale)
        self._engine.step()
        return norm, True

    @contextmanager
    def rehearsed_update(self) -> Iterator[None]:
        """Do all of an update but the optimizer's own step, with the gradients made in this context, which have to be
        zero. The training state stays the same, bit for bit; what the step would allocate is allocated meanwhile."""
        engine = self._engine
        counters = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "lr_scheduler")
        before = {name: getattr(engine, name) for name in counters}
        scaler = copy.deepcopy(getattr(engine.optimizer, "loss_scaler", None))
        monitored = engine.monitor.enabled
        engine.monitor.enabled = False
        engine.lr_scheduler = None
        held = state_of_first_step(engine)
        yield
        with without_optimizer(engine), _at_level("ERROR"):
            self._step(None)
        for name, value in before.items():
            setattr(engine, name, value)
        if scaler is not None:
            engine.optimizer.loss_scaler = scaler
        held.clear()
        engine.monitor.enabled = monitored

    def log_to_monitors(self, values: Mapping[str, float]) -> None:
        """Send values to the monitors of the ds_config (`csv_monitor`, `tensorboard`, `wandb`, `comet`), to which
        DeepSpeed itself sends no loss. They count in samples, as DeepSpeed does: some refuse a count that goes back."""
        if self._engine.monitor.enabled:
            count = self._engine.global_samples
            self._engine.monitor.write_events([(tag, value, count) for tag, value in values.items()])

    def sum_up(self) -> None:
        """Let DeepSpeed show its collectives, if the ds_config's `comms_logger` asked for them. All ranks call it."""
        if self._engine._config.comms_config.comms_logger_enabled:
            deepspeed.comm.log_summary()

    def save(self, files: SavedFiles) -> None:
        """Write DeepSpeed's checkpoint into these files, which may be in memory. All ranks call it."""
        save(self._engine, files)

    def resume(self, counters: Counters) -> None:
        """Restore DeepSpeed's counters, loss scale and scheduler."""
        self._engine.global_steps = counters.global_steps
        self._engine.global_samples = counters.global_samples
        self._engine.skipped_steps = counters.skipped_steps
        if getattr(self._engine.optimizer, "dynamic_loss_scale", False):
            vars(self._engine.optimizer.loss_scaler).update(counters.loss_scaler)
        if self._engine.lr_scheduler is not None:
            self._engine.lr_scheduler.load_state_dict(dict(counters.scheduler))
            for group, rates in zip(self._engine.optimizer.param_groups, counters.rates, strict=True):
                group.update(rates)


@contextmanager
def _at_level(level: str) -> Iterator[None]:
    """Set DeepSpeed's log level for a while."""
    logger = deepspeed.utils.logger
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def gradient_norm(model: nn.Module, axis: Axis) -> float:
    """Return the norm over all unsharded parameters: what every rank holds is counted once."""
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for param in model.parameters():
        if param.grad is not None and (layout_of(param).shard_dim is not None or axis.rank == 0):
            total += torch.linalg.vector_norm(param.grad, dtype=torch.float64).square()
    return math.sqrt(axis.sum(total).item())
