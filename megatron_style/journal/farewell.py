"""The last lines of a finished run: what it has led to, and what comes next."""

from __future__ import annotations

from megatron_style.base.run_folder import RunFolder, next_steps
from megatron_style.config.run import RunConfig
from megatron_style.journal.metrics_file import MetricsFile


def farewell(run: RunConfig, metrics: MetricsFile, best_step: int | None) -> str:
    lines = [next_steps(run.output.path, next(iter(run.data.held_out.values())))]
    last = metrics.last_held_out()
    if last is not None and last.perplexity is not None:
        best = _best(run, last.step, best_step)
        lines.insert(0, f"finished: held-out perplexity {last.perplexity:.2f} after step {last.step}{best}")
    return "\n".join(lines)


def _best(run: RunConfig, last_step: int, best_step: int | None) -> str:
    if best_step is None:
        return ""
    if best_step == last_step:
        return ", the best of this run"
    folder = RunFolder(run.output.path).checkpoint(best_step)
    return f"; the best was after step {best_step}" + (f", in {folder}" if folder.is_dir() else "")
