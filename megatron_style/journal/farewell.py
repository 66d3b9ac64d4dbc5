"""The last lines of a finished run: what it has led to, and what comes next."""

from __future__ import annotations

from megatron_style.base.events import ValidEvent
from megatron_style.base.run_folder import RunFolder, next_steps
from megatron_style.base.units import perplexity_text
from megatron_style.config.run import RunConfig
from megatron_style.journal.metrics_file import MetricsFile

_RISE = 0.05  # nats above the best held-out loss that are not chance


def farewell(run: RunConfig, metrics: MetricsFile, best_step: int | None) -> str:
    lines = [next_steps(run.output.path, next(iter(run.data.held_out.values())))]
    last = metrics.last_held_out()
    if last is not None and last.perplexity is not None:
        lines.insert(0, f"finished: held-out {_perplexity_of(last)}{_best(run, metrics, last, best_step)}")
    return "\n".join(lines)


def _perplexity_of(event: ValidEvent) -> str:
    assert event.perplexity is not None, "an evaluation records its perplexity"
    return f"perplexity {perplexity_text(event.perplexity)} after step {event.step}"


def _best(run: RunConfig, metrics: MetricsFile, last: ValidEvent, best_step: int | None) -> str:
    """Say which step had the lowest loss and, if the loss has clearly risen since, what helps."""
    if best_step is None:
        return ""
    if best_step == last.step:
        return ", the best of this run"
    best = metrics.last_held_out(best_step)
    if best is None or best.perplexity is None or best.loss is None or last.loss is None:
        return ""
    folder = RunFolder(run.output.path).checkpoint(best_step)
    where = f", in {folder}" if folder.is_dir() else ""
    remedy = (
        "\nthe held-out loss has risen since: the model learns its text by heart; take fewer steps, more text or more "
        "dropout (model.dropout)"
    )
    return f"; the best was {_perplexity_of(best)}{where}{remedy if last.loss > best.loss + _RISE else ''}"
