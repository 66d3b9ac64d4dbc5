"""The origin of a run: step 0, one of its own checkpoints, or a model that was trained elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError
from megatron_style.checkpoint.manifest import Best
from megatron_style.engine.engine import TrainingEngine
from megatron_style.model.memory import Memory
from megatron_style.schedule.stages import StageSchedule


@dataclass(frozen=True)
class Progress:
    """The state of a run in addition to weights and optimizer state: the next step, and one cache for each
    micro-batch."""

    step: int = 0
    caches: tuple[Memory, ...] = ()
    sound: int = 0  # the last step at which the held-out loss was finite
    losses: tuple[float, ...] = ()  # of the last steps, if the run looks for spikes
    best: Best | None = None  # of the main held-out text

    def evaluated(self, loss: float, text_digest: str) -> Progress:
        """Return the progress after an evaluation of the main held-out text."""
        best = self.best
        if best is None or best.text_digest != text_digest or loss < best.loss:
            best = Best(self.step, loss, text_digest)
        return replace(self, sound=self.step, best=best)

    @property
    def is_best(self) -> bool:
        """True if this step has been evaluated, and no earlier one had a held-out loss as low."""
        return self.best is not None and self.best.step == self.step


@dataclass(frozen=True)
class Origin:
    """The start of a run: the schedule's history so far, and a function that loads the engine's state."""

    history: tuple[tuple[int, int], ...]
    load: Callable[[TrainingEngine, StageSchedule], Progress]


def check_same_model(theirs: Mapping[str, Any], vocab_size: int, engine: TrainingEngine, where: Path) -> None:
    """Refuse a checkpoint of another model or corpus, and say what differs."""
    ours = engine.model.config.as_data()
    for key in ours:
        if key != "dropout" and theirs.get(key) != ours[key]:
            raise UserError(f"{where}: is of another model: its model.{key} is {theirs.get(key)}, not {ours[key]}")
    if vocab_size != engine.model.vocab_size:
        raise UserError(
            f"{where}: is of another corpus: its vocabulary has {vocab_size} tokens, not {engine.model.vocab_size}"
        )
