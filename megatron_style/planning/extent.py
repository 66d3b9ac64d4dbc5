"""How many steps and tokens a stage has on some number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_style.config.run import StageConfig


@dataclass(frozen=True)
class Extent:
    """None: it takes the size of the corpus to know."""

    steps: int | None
    tokens: int | None


def extents_of(stages: Sequence[StageConfig], tokens_per_step: int, corpus_tokens: int | None) -> Iterator[Extent]:
    """The schedule counts exactly, pass by pass; here short last steps of an epoch count as whole ones."""
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
    rest = -before % corpus_tokens  # of an epoch that has begun, which is the first of this stage
    whole = stage.epochs - (1 if rest else 0)
    steps = -(-rest // tokens_per_step) + whole * -(-corpus_tokens // tokens_per_step)
    return Extent(steps, rest + whole * corpus_tokens)
