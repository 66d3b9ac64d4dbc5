"""Write the record of a run to the console, `metrics.jsonl` and TensorBoard. Only the first rank writes; the others
only help to sum the loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

import torch

from megatron_style.base.command import log
from megatron_style.base.events import (
    Event,
    SampleEvent,
    SaveEvent,
    SpikeEvent,
    StageEndEvent,
    StageEvent,
    TrainEvent,
    ValidEvent,
)
from megatron_style.base.launches import append_launch
from megatron_style.base.run_folder import RunFolder
from megatron_style.base.terminal import Terminal
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import keep_older, save_run
from megatron_style.engine.engine import LossShare, TrainingEngine, Update
from megatron_style.engine.preflight import preflight_line
from megatron_style.inference.held_out import HeldOut
from megatron_style.journal.console import Console, ProgressLine, grid_lines, held_out_line
from megatron_style.journal.farewell import farewell
from megatron_style.journal.metrics_file import MetricsFile
from megatron_style.journal.opening import launch_of, opening_of
from megatron_style.journal.profile import open_profile
from megatron_style.journal.stragglers import Spread, gather_times, spread_of
from megatron_style.journal.tensorboard import TensorBoardWriter, scalars_of
from megatron_style.journal.work import FlopCounter, Totals, peak_flops
from megatron_style.parallel.device.peak_memory import forget_peak, peak_bytes
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import Stage, StageSchedule, StepPlan

_NEWEST_SHARE = 0.3  # weight of the newest line in the speed that predicts the time left


class _Figures(NamedTuple):
    """The figures of a step that are read from the device."""

    loss: float
    grad_norm: float
    auxiliary: dict[str, float]
    by_source: dict[str, float]  # of a blend
    spread: Spread | None  # of several ranks


class Journal:
    """The record of one launch of a run. Every rank has one, and calls it at the same steps."""

    def __init__(
        self,
        run: RunConfig,
        schedule: StageSchedule,
        engine: TrainingEngine,
        topology: Topology,
        *,
        first_step: int,
        terminal: Terminal | None = None,
        profile_steps: int | None = None,
    ) -> None:
        """Open the record. `terminal` shows a progress bar; without one, progress is logged."""
        self._schedule = schedule
        self._engine = engine
        self._topology = topology
        self._work = FlopCounter(run.model, engine.model.vocab_size, schedule)
        self._totals = Totals(schedule.tokens_before(first_step), self._work.before(first_step))
        self._all_flops = self._work.before(schedule.total_steps)
        self._run = run
        self._skipped = 0
        self._stage_seconds = 0.0
        self._seconds_per_flop: float | None = None
        self._peak = peak_flops(engine.device, engine.dtype, ranks=topology.data.size * topology.tensor.size)
        self._writes = topology.is_first
        if self._writes:
            self._open(run, first_step, terminal)
        self._profile = open_profile(
            run, engine.device, profile_steps, of=schedule.total_steps - first_step, writes=self._writes
        )
        self._shown = self._totals  # as they were at the last line
        self._steps = 0  # since then

    def _open(self, run: RunConfig, first_step: int, terminal: Terminal | None) -> None:
        """Open all files. Totals resume from the last line, which every step that saves has."""
        folder = RunFolder(run.output.path)
        folder.path.mkdir(parents=True, exist_ok=True)
        if first_step:
            keep_older(folder.run_file, run, first_step)
        save_run(run, folder.run_file)
        self._metrics = MetricsFile(folder.metrics, last_step=first_step)
        if last := self._metrics.last:  # an older version may have recorded less
            self._skipped = last.skipped or 0
            self._stage_seconds = last.stage_seconds or 0.0
            self._totals = self._totals.plus(0, 0, last.seconds or 0.0)
        launch = launch_of(run, self._schedule, self._engine, self._topology, first_step)
        append_launch(folder.launches, launch)
        opening = opening_of(run, self._schedule, launch)
        self._board = TensorBoardWriter(folder, opening, self._metrics, by_tokens=run.watch.by_tokens)
        self._console = Console(self._schedule.total_steps, terminal)
        if first_step:
            self._say(f"resuming at step {first_step} of {self._schedule.total_steps}")
        for line in grid_lines(run, self._topology):
            self._say(line)
        if run.data.is_blend:
            for stage in self._schedule.stages_from(first_step):
                self._say(f"stage {stage.index + 1}: {self._schedule.shares_of(stage)}")

    def preflight(self, stage: Stage, peak: int) -> None:
        self._say(preflight_line(stage, peak))

    def stage_opens(self, plan: StepPlan) -> None:
        """Record the stage at its first step, so that a run resumed just before it records it once."""
        self._stage_seconds = 0.0
        stage = plan.stage
        totals = self._totals
        self._record(
            StageEvent(
                step=plan.step + 1,
                index=stage.index,
                segment_length=stage.segment_length,
                cache_length=stage.cache_length,
                rows=stage.rows,
                micro_rows=stage.micro_rows,
                tokens=totals.tokens,
                seconds=totals.seconds,
                flops=totals.flops,
                flops_per_token=self._work.per_token[stage.index],
                opens=str(stage),
            )
        )
        self._say(f"step {plan.step}: {stage}")

    def stage_closes(self, plan: StepPlan) -> None:
        """Record tokens and time of the stage, over all ranks and resumptions."""
        first = self._schedule.first_step_of(plan.stage)
        done = plan.step + 1
        tokens = self._totals.tokens - self._schedule.tokens_before(first)
        seconds = self._stage_seconds
        self._record(
            StageEndEvent(
                step=done,
                index=plan.stage.index,
                tokens=self._totals.tokens,
                stage_tokens=tokens,
                stage_seconds=seconds,
            )
        )
        self._say(f"stage {plan.stage.index + 1} is done: {done - first} steps, {tokens:,} tokens, {seconds:,.0f} s")

    def step(self, plan: StepPlan, loss: LossShare, update: Update, seconds: float, *, show: bool) -> None:
        """Record a step; all ranks call this after every one. Skipped steps are always shown, others only with `show`:
        between them the loss is not even summed, so that no rank waits for it."""
        flops = plan.tokens * self._work.per_token[plan.stage.index]
        self._totals = self._totals.plus(plan.tokens, flops, seconds)
        self._skipped += not update.applied
        self._stage_seconds += seconds
        self._steps += 1
        self._profile.step()
        if show or not update.applied:
            figures = self._read(loss, update)
            if spike := update.spike:
                self._record(SpikeEvent(step=plan.step + 1, tokens=self._totals.tokens, loss=spike.loss,
                                        median=spike.median, action=spike.action))  # fmt: skip
            if self._writes:
                self._show(plan, figures, update)
        elif self._writes:
            self._console.after(plan.step + 1)

    def flush(self, step: int) -> None:
        """Flush before a checkpoint, so that a run that resumes there finds everything up to this step recorded."""
        if self._writes:
            self._board.flush(step)

    def saved(self, step: int, found: Iterable[SaveEvent]) -> None:
        """Record checkpoints that are complete, at the step that begins. A run that resumes before that step drops what
        belongs to it, so that no line or point is later than what was flushed."""
        for event in found:
            self._record(replace(event, step=step, tokens=self._schedule.tokens_before(step)))

    def held_out(self, step: int, found: HeldOut, name: str = "", *, is_main: bool = True) -> None:
        """Record an evaluation. A text has a name if data.valid has."""
        totals = self._totals
        self._record(
            ValidEvent(
                step=step,
                loss=found.loss,
                perplexity=found.perplexity,
                tokens=totals.tokens,
                seconds=totals.seconds,
                flops=totals.flops,
                by_position=tuple(found.by_position),
                text_digest=found.text_digest,
                scored_tokens=found.scored_tokens,
                name=name or None,
                is_main=is_main if name else None,
            )
        )
        if found.text:
            self._record(SampleEvent(step=step, tokens=totals.tokens, prompt=found.prompt, text=found.text))
        self._say(held_out_line(step, self._schedule.total_steps, name, found.perplexity))

    def finished(self, best_step: int | None) -> None:
        if self._writes:
            log(farewell(self._run, self._metrics, best_step))

    def _read(self, loss: LossShare, update: Update) -> _Figures:
        """Return the losses over all ranks, the gradient norm and the ranks' times, with one wait for the device."""
        data = self._topology.data
        norm = torch.as_tensor(update.grad_norm, dtype=torch.float64, device=loss.nll.device)
        further = [data.sum(share) / data.size for share in loss.auxiliary.values()]
        values = [value.double() for value in (data.sum(loss.nll), norm, *further)]
        by_source = [] if loss.by_source is None else list(data.sum(loss.by_source).double())
        times = gather_times(self._engine.times.take(), self._steps, self._topology, loss.nll.device)
        self._steps = 0
        mean, grad_norm, *more = torch.stack([*values, *by_source, *times.flatten()]).tolist()
        auxiliary = dict(zip(loss.auxiliary, more, strict=False))
        sources = self._schedule.sources.names if by_source else ()
        del more[: len(auxiliary)]
        losses = dict(zip(sources, more, strict=False))
        return _Figures(mean, grad_norm, auxiliary, losses, spread_of(more[len(losses) :]))

    def _show(self, plan: StepPlan, figures: _Figures, update: Update) -> None:
        totals = self._totals
        device = self._engine.device
        lately = totals.since(self._shown)
        self._shown = totals
        memory = peak_bytes(device)
        forget_peak(device)
        speed = lately.flops / lately.seconds
        event = TrainEvent(
            step=plan.step + 1,
            stage=plan.stage.index,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            learning_rate=update.learning_rate,
            skipped=self._skipped,
            tokens=totals.tokens,
            tokens_per_second=lately.tokens / lately.seconds,
            stage_seconds=self._stage_seconds,
            seconds=totals.seconds,
            flops=totals.flops,
            flops_per_second=speed,
            memory_bytes=memory,
            auxiliary=figures.auxiliary or None,
            by_source=figures.by_source or None,
        )
        if figures.spread is not None:
            event = figures.spread.added_to(event)
        self._record(event)
        reason = update.spike or "the gradient is not finite"
        note = "" if update.applied else f", skipped: {reason} ({self._skipped} so far)"
        note += figures.spread.note if figures.spread else ""
        self._console.show(
            ProgressLine(
                event,
                total_steps=self._schedule.total_steps,
                stages=len(self._schedule.stages),
                share_done=totals.flops / self._all_flops,
                seconds_left=self._seconds_left(lately),
                peak_share=self._peak and speed / self._peak,
                note=note,
            )
        )

    def _seconds_left(self, lately: Totals) -> float:
        """Return the time that the FLOPs left will take, so that a stage of longer segments counts with its cost."""
        newest = lately.seconds / lately.flops
        before = newest if self._seconds_per_flop is None else self._seconds_per_flop
        self._seconds_per_flop = before + _NEWEST_SHARE * (newest - before)
        return (self._all_flops - self._totals.flops) * self._seconds_per_flop

    def _say(self, line: str) -> None:
        if self._writes:
            log(line)

    def _record(self, event: Event) -> None:
        if self._writes:
            self._metrics.write(event)
            self._board.add(event)
            self._engine.log_to_monitors(scalars_of(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writes:
            self._console.close()
            self._metrics.close()
            self._board.close(finished=kind is None)
