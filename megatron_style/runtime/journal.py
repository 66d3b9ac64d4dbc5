"""One writer for what a run has to say: log lines, `metrics.jsonl` and TensorBoard. Only the first rank writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.utils.tensorboard import SummaryWriter

from megatron_style.config.command import log
from megatron_style.config.run import RunConfig, save_run
from megatron_style.inference.perplexity import Score
from megatron_style.parallel.topology import Topology
from megatron_style.runtime.engine import Update
from megatron_style.schedule.stages import StageSchedule, StepPlan


class Journal:
    def __init__(self, run: RunConfig, schedule: StageSchedule, topology: Topology, *, first_step: int) -> None:
        """Whatever an interrupted run wrote behind its last checkpoint is dropped: those steps will be done again."""
        self._writes, self._schedule = topology.is_first, schedule
        if not self._writes:
            return
        folder = run.output.path
        folder.mkdir(parents=True, exist_ok=True)
        save_run(run, folder / "run.yaml")
        path = folder / "metrics.jsonl"
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= first_step]
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        if first_step:
            self._say(f"resuming at step {first_step} of {schedule.total_steps}")

    def stage(self, plan: StepPlan) -> None:
        """A stage opens. Nothing of the optimizer, the schedule or the step count changes."""
        self._record("stage", plan.step, name=str(plan.stage), segment_length=plan.stage.segment_length,
                     tokens=self._tokens(plan.step))  # fmt: skip
        self._say(str(plan.stage))

    def step(self, plan: StepPlan, loss: float, update: Update, seconds: float) -> None:
        done, total = plan.step + 1, self._schedule.total_steps
        speed = plan.tokens / seconds
        self._record("train", done, loss=loss, grad_norm=update.grad_norm, learning_rate=update.learning_rate,
                     applied=int(update.applied), tokens=self._tokens(done), tokens_per_second=speed)  # fmt: skip
        skipped = "" if update.applied else ", update skipped: the gradient is not finite"
        self._say(
            f"step {done}/{total}, stage {plan.stage.index + 1}: loss {loss:.4f}, "
            f"gradient norm {update.grad_norm:.3f}, "
            f"learning rate {update.learning_rate:.3g}, {speed:,.0f} tokens/s{skipped}"
        )

    def held_out(self, step: int, score: Score) -> None:
        self._record("valid", step, loss=score.loss, perplexity=score.perplexity, tokens=self._tokens(step))
        self._say(f"step {step}/{self._schedule.total_steps}: held-out perplexity {score.perplexity:.2f}")

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
