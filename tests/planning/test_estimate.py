"""Steps and tokens of stages against the schedule that training follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.config.run_file import load_run
from megatron_style.planning.estimate import Extent, extents_of
from megatron_style.schedule.stages import StageSchedule

RUN_CONFIGS = Path(__file__).parents[2] / "run_configs"
RANKS, TOKENS_PER_STEP = 8, 8 * 9216


@pytest.mark.parametrize(
    ("name", "corpus_tokens"), [("tbc_shortformer", 700_000_000), ("wikitext103_shortformer", 103_227_021)]
)
def test_nearly_the_schedules(name: str, corpus_tokens: int) -> None:
    run = load_run(RUN_CONFIGS / f"{name}.yaml")
    schedule = StageSchedule(run, corpus_tokens=corpus_tokens, data_parallel=RANKS)
    firsts = [*(schedule.first_step_of(stage) for stage in schedule.stages), schedule.total_steps]
    for index, extent in enumerate(extents_of(run.stages, TOKENS_PER_STEP, corpus_tokens)):
        assert extent.steps == pytest.approx(firsts[index + 1] - firsts[index], rel=1e-3)
        tokens = schedule.tokens_before(firsts[index + 1]) - schedule.tokens_before(firsts[index])
        assert extent.tokens == pytest.approx(tokens, rel=1e-3)


def test_without_a_corpus_only_epochs_are_unknown() -> None:
    first, second = extents_of(load_run(RUN_CONFIGS / "tbc_shortformer.yaml").stages, TOKENS_PER_STEP, None)
    assert first == Extent(-(-20_650_000_000 // TOKENS_PER_STEP), 20_650_000_000)
    assert second == Extent(None, None)
