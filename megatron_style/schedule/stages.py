"""The stage, shapes and place in the data of a step, as a pure function of the step.

A run is a list of passes. An epoch of a source or a stage begins a new pass, whose lanes start with empty caches. A
stage that begins in the middle of an epoch reads what the stage before left unread, so that no token is read twice or
lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig, StageConfig, divisors_of
from megatron_style.schedule.blend import Blend, Part, sources_of
from megatron_style.schedule.passes import Reading, ShuffledSegments, TextLanes
from megatron_style.schedule.unread import Unread

MOST_PASSES = 10_000  # which are all laid out at the start


@dataclass(frozen=True)
class Stage:
    """A stretch of steps with one segment length. `rows` and `micro_rows` are per data-parallel rank."""

    index: int
    segment_length: int
    cache_length: int
    rows: int
    micro_rows: int

    @property
    def accumulation(self) -> int:
        return self.rows // self.micro_rows

    def __str__(self) -> str:
        return (
            f"stage {self.index + 1}: {self.rows} x {self.segment_length} tokens per rank, "
            f"{self.accumulation} x {self.micro_rows} rows at once, cache {self.cache_length}"
        )


@dataclass(frozen=True)
class StepPlan:
    step: int
    stage: Stage
    turn: int  # the number of segments that each row has read since its lane was opened
    blend: Blend

    @property
    def opens_lanes(self) -> bool:
        """True if there is no text before these rows: every cache is empty."""
        return self.turn == 0

    @property
    def tokens(self) -> int:
        """Return the number of target tokens of this step, over all data-parallel ranks."""
        return sum(self.source_tokens)

    @property
    def source_tokens(self) -> tuple[int, ...]:
        """Return the number of target tokens of each source."""
        return self.blend.tokens_at(self.turn)

    def read(self, *, data_rank: int, micro: int) -> Reading:
        """Return the tokens of one micro-batch; the global batch does not depend on how it is split."""
        first = (data_rank * self.stage.accumulation + micro) * self.stage.micro_rows
        return self.blend.read(self.turn, np.arange(first, first + self.stage.micro_rows))


@dataclass(frozen=True)
class _Stretch:
    first_step: int
    stage: Stage
    blend: Blend


class StageSchedule:
    """`plan(step)` for a run over a corpus of `corpus_tokens` (of each source, if there are several), on
    `data_parallel` ranks.

    `history` is (first step, tokens per update) of every grid the run has had: a run that is resumed with another
    number of tokens per update begins a new pass over what was unread."""

    def __init__(
        self,
        run: RunConfig,
        *,
        corpus_tokens: int | Sequence[int],
        data_parallel: int,
        history: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.stages = stages_of(run)
        self.sources = sources_of(run.data, (corpus_tokens,) if isinstance(corpus_tokens, int) else corpus_tokens)
        self._data_parallel = data_parallel
        for stage in self.stages:
            self.sources.check(self.rows_of(stage), stage.segment_length, f"stages.{stage.index}")
        self.history = history or ((0, run.data.tokens_per_batch * data_parallel),)
        self._shuffles = not run.model.cache if run.data.shuffle is None else run.data.shuffle
        self._seed = run.seed
        self._stretches: list[_Stretch] = []
        self.total_steps = 0
        for stretch, steps in self._lay_out(run.stages):
            if len(self._stretches) == MOST_PASSES:
                raise UserError(
                    f"stages.{stretch.stage.index}: the run would read its {self.corpus_tokens} tokens more than "
                    f"{MOST_PASSES:,} times; use fewer epochs, steps or tokens"
                )
            self._stretches.append(stretch)
            self.total_steps = stretch.first_step + steps
        self._firsts = [stretch.first_step for stretch in self._stretches]

    def plan(self, step: int) -> StepPlan:
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} is outside the schedule of {self.total_steps} steps")
        stretch = self._stretches[bisect_right(self._firsts, step) - 1]
        return StepPlan(step, stretch.stage, step - stretch.first_step, stretch.blend)

    def tokens_before(self, step: int) -> int:
        """Return the number of target tokens of all steps before this one, over all data-parallel ranks."""
        total = 0
        for stretch, following in zip(self._stretches, [*self._firsts[1:], self.total_steps], strict=True):
            turns = min(step, following) - stretch.first_step
            if turns <= 0:
                break
            total += stretch.blend.tokens_before(turns)
        return total

    @property
    def corpus_tokens(self) -> int:
        return sum(self.sources.tokens)

    def rows_of(self, stage: Stage) -> tuple[int, ...]:
        """Return the rows of each source in a stage on this grid, over all data-parallel ranks."""
        return self._allot(stage, stage.rows * self._data_parallel)

    def shares_of(self, stage: Stage) -> str:
        """Describe how a stage divides its rows among the sources."""
        return self.sources.describe(self.rows_of(stage))

    def _allot(self, stage: Stage, rows: int) -> tuple[int, ...]:
        return self.sources.allot(rows, stage.segment_length, f"stages.{stage.index}")

    def place_of(self, step: int) -> dict[str, int | str]:
        """Return how far the text has been read before a step. Where two schedules agree on it, one can resume the
        other without losing or repeating a token."""
        places = [self._source_place(step, source) for source in range(len(self.sources.names))]
        if len(places) == 1:
            return {"epoch": places[0][0], "pass": places[0][1]}
        epochs, digests = zip(*places, strict=True)
        return {"epoch": " ".join(map(str, epochs)), "pass": " ".join(digests)}

    def _source_place(self, step: int, source: int) -> tuple[int, str]:
        entire = Unread.entire(self.sources.tokens[source]).digest
        if step == 0:
            return 0, entire
        before = self.plan(step - 1)
        rest = before.blend.parts[source].after(before.turn + 1)
        return (rest.epoch, rest.reading_pass.place(rest.begun)) if rest.steps else (rest.epoch + 1, entire)

    def is_at(self, step: int, place: Mapping[str, int | str]) -> bool:
        """True if a checkpoint with this place can be resumed at this step."""
        if step > self.total_steps:
            return False
        if "unread" not in place:
            return self.place_of(step) == place
        return self._unread_at(step) == place  # earlier versions wrote a digest of all that is left, of one source

    def _unread_at(self, step: int) -> dict[str, int | str]:
        entire = Unread.entire(self.corpus_tokens).digest
        if step == 0:
            return {"epoch": 0, "unread": entire}
        before = self.plan(step - 1)
        rest = before.blend.parts[0].after(before.turn + 1)
        return {"epoch": rest.epoch + (not rest.steps), "unread": rest.unread.digest if rest.steps else entire}

    def stages_from(self, step: int) -> tuple[Stage, ...]:
        """Return the stages that have steps left."""
        return () if step >= self.total_steps else self.stages[self.plan(step).stage.index :]

    def first_step_of(self, stage: Stage) -> int:
        return next(stretch.first_step for stretch in self._stretches if stretch.stage == stage)

    def opens_stage(self, step: int) -> bool:
        return step == self.first_step_of(self.plan(step).stage)

    def closes_stage(self, step: int) -> bool:
        return step + 1 == self.total_steps or self.opens_stage(step + 1)

    def _lay_out(self, extents: tuple[StageConfig, ...]) -> Iterator[tuple[_Stretch, int]]:
        left: Sequence[Part | None] = [None] * len(self.sources.names)  # what the stretch before left of each source
        step = 0
        epoch = 0  # of the only source: a stage of a blend has no epochs
        for stage, extent in zip(self.stages, extents, strict=True):
            first_step = step
            end_step = step + extent.steps if extent.steps else None
            end_epoch = epoch + extent.epochs if extent.epochs else None
            tokens_left = extent.tokens
            while step != end_step and epoch != end_epoch and (tokens_left is None or tokens_left > 0):
                is_cut = step == first_step or any(first == step for first, _ in self.history)
                blend = self._open(stage, step, left, is_cut=is_cut)
                ends = [last - step for last in (end_step, self._next_grid(step)) if last is not None]
                steps = min([blend.steps, *ends])
                if tokens_left is not None:
                    steps = min(steps, -(-tokens_left // (blend.rows * stage.segment_length)))
                    tokens_left -= blend.tokens_before(steps)
                yield _Stretch(step, stage, blend), steps
                step += steps
                rests = [part.after(steps) for part in blend.parts]
                epoch = rests[0].epoch + (not rests[0].steps)
                left = rests

    def _next_grid(self, step: int) -> int | None:
        return next((first for first, _ in self.history if first > step), None)

    def _open(self, stage: Stage, step: int, left: Sequence[Part | None], *, is_cut: bool) -> Blend:
        """Open the lanes of all sources. A source that is not through stays in its pass unless `is_cut`, or no source
        is through."""
        tokens = next(tokens for first, tokens in reversed(self.history) if first <= step)
        rows = tokens // stage.segment_length
        if not rows:
            raise UserError(
                f"stages.{stage.index}: an update of {tokens} tokens, as the history of the checkpoint has it, is less "
                f"than one segment of {stage.segment_length}; the checkpoint is damaged or of another run"
            )
        is_cut = is_cut or all(part is not None and part.steps for part in left)
        parts = []
        for source, (own_rows, before) in enumerate(zip(self._allot(stage, rows), left, strict=True)):
            if before is None or not before.steps or is_cut:
                parts.append(self._cut(stage, step, source, own_rows, before))
            else:
                parts.append(before)
        return Blend(tuple(parts))

    def _cut(self, stage: Stage, step: int, source: int, rows: int, before: Part | None) -> Part:
        """Open a pass over what a source has left unread or, if nothing is left, over its next epoch."""
        epoch = 0
        unread = Unread.entire(self.sources.tokens[source])
        if before is not None:
            epoch = before.epoch + (not before.steps)
            unread = before.unread if before.steps else unread
        if not self._shuffles:
            return Part(epoch, TextLanes(unread, rows, stage.segment_length))
        key = (self._seed + (source << 64), epoch, step)  # the first source has the order that it has alone
        return Part(epoch, ShuffledSegments(unread, rows, stage.segment_length, key=key))


def stages_of(run: RunConfig) -> tuple[Stage, ...]:
    return tuple(resolve_stage(run, index) for index in range(len(run.stages)))


def resolve_stage(run: RunConfig, index: int) -> Stage:
    """Return a stage with its rows and micro-batch rows, from the tokens per batch and the memory bound."""
    config = run.stages[index]
    tokens = run.data.tokens_per_batch
    rows = tokens // config.segment_length
    most = max(1, (run.parallel.micro_tokens or tokens) // config.segment_length)
    micro_rows = config.micro_rows or max(n for n in divisors_of(rows) if n <= most)
    if rows % micro_rows:
        near = sorted(divisors_of(rows), key=lambda n: abs(n - micro_rows))[:2]
        raise UserError(
            f"stages.{index}.micro_rows ({micro_rows}) must divide the {rows} rows of the batch "
            f"({tokens} tokens / {config.segment_length}); the nearest that do are {sorted(near)}"
        )
    cache_length = (config.cache_length or config.segment_length) if run.model.cache else 0
    return Stage(index, config.segment_length, cache_length, rows, micro_rows)
