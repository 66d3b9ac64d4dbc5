"""Every run file loads, and the paper's runs have the paper's batches, updates and parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run, save_run
from megatron_style.engine.ds_config import check_one_home, complete_ds_config, read_ds_config
from megatron_style.model.shape import count_parameters
from megatron_style.schedule.learning_rate import learning_rate_at
from megatron_style.schedule.stages import StageSchedule, resolve_stage
from tests.config.run_file_page import PAGE, keys, page, sections

ROOT = Path(__file__).parents[2]
RUN_FILES = sorted((ROOT / "run_configs").glob("*.yaml"))
WIKITEXT_TOKENS, WIKITEXT_VOCAB = 103_227_021, 267_744
TBC_TOKENS, TBC_VOCAB = 700_000_000, 29_000
PAPER_RANKS, PAPER_UPDATES = 8, 286_000
TBC_UPDATES = 59 * 9_495  # an epoch is 700M tokens / (8 x 9,216), rounded up


def run_file(name: str, *settings: str) -> RunConfig:
    return load_run(ROOT / "run_configs" / f"{name}.yaml", settings)


def first_steps(schedule: StageSchedule) -> list[int]:
    """The step at which each stage opens, by bisection over `plan`."""
    steps = []
    for index in range(len(schedule.stages)):
        low, high = 0, schedule.total_steps - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if schedule.plan(middle).stage.index >= index else (middle + 1, high)
        steps.append(low)
    return steps


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
class TestEveryRunFile:
    @pytest.mark.usefixtures("fp16_allowed")
    def test_its_ds_config_fits(self, path: Path) -> None:
        run = load_run(path)
        user = read_ds_config(ROOT / run.deepspeed if run.deepspeed else None)
        check_one_home(user, run)
        stages = [resolve_stage(run, index) for index in range(len(run.stages))]
        completed = complete_ds_config(user, run, stages, data_parallel=8)
        assert completed["train_micro_batch_size_per_gpu"] == 1

    def test_saved_and_loaded_it_is_the_same(self, path: Path, tmp_path: Path) -> None:
        run = load_run(path)
        save_run(run, tmp_path / "run.yaml")
        assert load_run(tmp_path / "run.yaml") == run

    def test_it_says_what_to_expect(self, path: Path) -> None:
        comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert comment
        if path.stem.startswith(("wikitext103", "tbc")):
            assert any(line.startswith("# Paper: ") and "perplexity" in line for line in comment)

    def test_results_go_to_a_folder_of_its_name(self, path: Path) -> None:
        assert load_run(path).output.path == Path("runs") / path.stem


@pytest.mark.parametrize(
    ("name", "opens"),
    {
        "wikitext103_baseline": [0],
        "wikitext103_staged": [0, 70_050],
        "wikitext103_pia_cache": [0],
        "wikitext103_shortformer": [0, 140_100],
        "wikitext103_ablation_pia_no_cache": [0],
        "wikitext103_ablation_pia_no_cache_unshuffled": [0],
        "wikitext103_ablation_cache_no_pia": [0],
    }.items(),
)
def test_wikitext_runs_have_the_papers_updates(name: str, opens: list[int]) -> None:
    schedule = StageSchedule(run_file(name), corpus_tokens=WIKITEXT_TOKENS, data_parallel=PAPER_RANKS)
    assert schedule.total_steps == PAPER_UPDATES
    assert first_steps(schedule) == opens
    assert schedule.plan(0).tokens == PAPER_RANKS * 9216
    assert schedule.plan(PAPER_UPDATES - 1).blend.epochs == (204,)  # the 205th


def test_a_hundred_epochs_are_140_100_updates() -> None:
    stages = "stages=[{segment_length: 128, epochs: 100}, {segment_length: 512, steps: 145900}]"
    run = run_file("wikitext103_shortformer", stages)
    schedule = StageSchedule(run, corpus_tokens=WIKITEXT_TOKENS, data_parallel=PAPER_RANKS)
    assert first_steps(schedule) == [0, 140_100]
    assert schedule.total_steps == PAPER_UPDATES
    assert schedule.plan(140_100).opens_lanes


@pytest.mark.parametrize(
    ("name", "opens"),
    {"tbc_pia_cache": [0], "tbc_baseline": [0], "tbc_staged": [0, 136_636], "tbc_shortformer": [0, 280_103]}.items(),
)
def test_toronto_books_runs_are_59_epochs(name: str, opens: list[int]) -> None:
    schedule = StageSchedule(run_file(name), corpus_tokens=TBC_TOKENS, data_parallel=PAPER_RANKS)
    assert schedule.total_steps == TBC_UPDATES
    assert first_steps(schedule) == opens


def test_toronto_books_first_stages_are_the_papers_fractions() -> None:
    whole = 59 * TBC_TOKENS
    assert run_file("tbc_staged").stages[0].tokens == round(whole * 50 / 205)
    assert run_file("tbc_shortformer").stages[0].tokens == whole // 2


@pytest.mark.parametrize(
    ("name", "ranks", "tokens_per_update", "opens", "total"),
    [
        ("shortformer_1b3", 64, 1_048_576, [0, 6_250, 12_500], 25_000),
        ("shortformer_13b", 32, 1_048_576, [0, 62_500, 125_000], 250_000),
    ],
)
def test_large_runs_on_their_cluster(
    name: str, ranks: int, tokens_per_update: int, opens: list[int], total: int
) -> None:
    schedule = StageSchedule(run_file(name), corpus_tokens=300_000_000_000, data_parallel=ranks)
    assert {schedule.plan(step).tokens for step in opens} == {tokens_per_update}
    assert first_steps(schedule) == opens
    assert schedule.total_steps == total


@pytest.mark.parametrize("name", ["wikitext103_baseline", "wikitext103_pia_cache"])
@pytest.mark.parametrize("length", [32, 64, 128, 256, 512, 768, 1024, 1536, 3072])
def test_every_length_of_the_paper_keeps_9216_tokens_a_batch(name: str, length: int) -> None:
    stage = resolve_stage(run_file(name, f"stages=[{{segment_length: {length}, steps: 286000}}]"), 0)
    assert stage.rows * stage.segment_length == 9216
    assert stage.accumulation * stage.micro_rows == stage.rows
    assert stage.cache_length == (length if name == "wikitext103_pia_cache" else 0)


def test_the_learning_rate_is_the_papers() -> None:
    config = run_file("wikitext103_shortformer").optimizer.learning_rate
    rates = [learning_rate_at(step, config, PAPER_UPDATES) for step in (0, 8_000, 16_000, 151_000, PAPER_UPDATES - 1)]
    assert rates == pytest.approx([1e-7, 0.5, 1.0, 0.50005, 1e-4], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "vocab_size", "expected"),
    [
        ("wikitext103_baseline", WIKITEXT_VOCAB, 246_933_504),
        ("wikitext103_shortformer", WIKITEXT_VOCAB, 246_933_504),
        ("wikitext103_sandwich", WIKITEXT_VOCAB, 246_933_504),
        # The authors' code counts 285,170,506 and 151,107,538: it shares u and v among the blocks.
        ("wikitext103_routing", WIKITEXT_VOCAB, 185_019_392),
        ("wikitext103_transformer_xl", 267_735, 285_170_506 + 17 * 2 * 1024),
        ("wikitext103_transformer_xl_base", 267_735, 151_107_538 + 15 * 2 * 410),
        # Per layer a convolution of 4 tokens, the distances, v and output bias of the slots.
        ("wikitext103_compressive", 267_735, 285_205_322 + 18 * (5 * 1024**2 + 2 * 1024)),
        ("wikitext103_compressive_shortformer", WIKITEXT_VOCAB, 246_933_504 + 16 * 4 * 1024**2),
        ("tbc_baseline", TBC_VOCAB, 260_931_584),
        ("tbc_shortformer", TBC_VOCAB, 260_931_584),
        ("shortformer_1b3", 50_000, 1_310_998_528),
        ("shortformer_13b", 50_000, 12_841_574_400),
    ],
)
def test_parameter_counts(name: str, vocab_size: int, expected: int) -> None:
    assert count_parameters(run_file(name).model, vocab_size) == expected


def test_tied_toronto_books_is_smaller() -> None:
    run = run_file("tbc_shortformer", "model.vocabulary.kind=tied")
    assert count_parameters(run.model, TBC_VOCAB) == 231_235_584


def test_the_page_of_all_keys_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.config.run_file_page`"


def test_every_key_says_what_it_means() -> None:
    for path, section in sections(RunConfig):
        for key in keys(path, section):
            assert key.meaning, f"{path}.{key.name} has no comment in {section.__name__}"
