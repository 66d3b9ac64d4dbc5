"""One writer for what a run has to say: log lines, `metrics.jsonl` and TensorBoard. Only the first rank writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from torch.utils.tensorboard import SummaryWriter

from megatron_style.config.command import log
from megatron_style.config.run import RunConfig, save_run
from megatron_style.inference.perplexity import Score
from megatron_style.parallel.topology import Topology
from megatron_style.runtime.engine import Update
from megatron_style.schedule.stages import Stage, StageSchedule, StepPlan


class Journal:
    def __init__(self, run: RunConfig, schedule: StageSchedule, topology: Topology, *, first_step: int) -> None:
        """Whatever an interrupted run wrote behind its last checkpoint is dropped: those steps will be done again."""
        self._writes, self._schedule = topology.is_first, schedule
        self._skipped, self._stage_seconds = 0, 0.0
        if not self._writes:
            return
        folder = run.output.path
        folder.mkdir(parents=True, exist_ok=True)
        save_run(run, folder / "run.yaml")
        self._file = self._reopen(folder / "metrics.jsonl", first_step)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        if first_step:
            self._say(f"resuming at step {first_step} of {schedule.total_steps}")

    def preflight(self, stage: Stage, peak_bytes: int) -> None:
        self._say(f"preflight: {stage}: peak memory {peak_bytes / 2**30:.2f} GiB on the first rank")

    def stage_opens(self, plan: StepPlan) -> None:
        """Counted to the stage's first step, so that a run resumed right before it records it once."""
        self._stage_seconds = 0.0
        self._record("stage", plan.step + 1, index=plan.stage.index, segment_length=plan.stage.segment_length,
                     rows=plan.stage.rows, micro_rows=plan.stage.micro_rows, tokens=self._tokens(plan.step),
                     opens=str(plan.stage))  # fmt: skip
        self._say(f"step {plan.step}: {plan.stage}")

    def stage_closes(self, plan: StepPlan) -> None:
        """Tokens and time of the stage, over all ranks and resumptions."""
        first, done = self._schedule.first_step_of(plan.stage), plan.step + 1
        tokens, seconds = self._tokens(done) - self._tokens(first), self._stage_seconds
        self._record("stage_end", done, index=plan.stage.index, stage_tokens=tokens, stage_seconds=seconds)
        self._say(f"stage {plan.stage.index + 1} is done: {done - first} steps, {tokens:,} tokens, {seconds:,.0f} s")

    def step(self, plan: StepPlan, loss: float, update: Update, seconds: float, *, show: bool) -> None:
        """Called after every step; only some are shown, and all that were skipped."""
        self._skipped += not update.applied
        self._stage_seconds += seconds
        if not show and update.applied:
            return
        done, total = plan.step + 1, self._schedule.total_steps
        speed = plan.tokens / seconds
        self._record("train", done, loss=loss, grad_norm=update.grad_norm, learning_rate=update.learning_rate,
                     skipped=self._skipped, tokens=self._tokens(done), tokens_per_second=speed,
                     stage_seconds=self._stage_seconds)  # fmt: skip
        note = "" if update.applied else f", skipped: the gradient is not finite ({self._skipped} so far)"
        self._say(
            f"step {done}/{total}, stage {plan.stage.index + 1}: loss {loss:.4f}, "
            f"gradient norm {update.grad_norm:.3f}, learning rate {update.learning_rate:.3g}, "
            f"{speed:,.0f} tokens/s{note}"
        )

    def held_out(self, step: int, score: Score) -> None:
        self._record("valid", step, loss=score.loss, perplexity=score.perplexity, tokens=self._tokens(step))
        self._say(f"step {step}/{self._schedule.total_steps}: held-out perplexity {score.perplexity:.2f}")

    def _reopen(self, path: Path, first_step: int) -> TextIO:
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= first_step]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        trained = [event for event in map(json.loads, kept) if event["kind"] == "train"]
        if trained:
            self._skipped, self._stage_seconds = trained[-1]["skipped"], trained[-1]["stage_seconds"]
        return path.open("a", encoding="utf-8")

    def _tokens(self, step: int) -> int:
        return self._schedule.tokens_before(step)

    def _say(self, line: str) -> None:
        if self._writes:
            log(line)

    def _record(self, kind: str, step: int, **values: float | int | str) -> None:
        """One event: a line of `metrics.jsonl`, and a TensorBoard point for each number."""
        if not self._writes:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, str):
                self._board.add_text(f"{kind}/{name}", value, step)
            else:
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writes:
            self._file.close()
            self._board.close()


def _lines(path: Path) -> list[str]:
    """Whole lines only: the last one of a killed run may be torn."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8").split("\n")[:-1]
