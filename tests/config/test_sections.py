"""A mistake in a run file is reported in one line: the key, its value, and what would be right."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig, nearest_divisors
from megatron_style.config.yaml_file import override

RUN: dict[str, Any] = {
    "model": {
        "layers": 2,
        "hidden_size": 64,
        "heads": 8,
        "ffn_size": 128,
        "vocabulary": {"kind": "adaptive", "cutoffs": [100, 200]},
    },
    "data": {"train": "train", "valid": "valid"},
    "stages": [{"segment_length": 128, "steps": 2}, {"segment_length": 512, "steps": 2}],
    "optimizer": {"learning_rate": {"peak": 1.0}},
    "output": {"path": "runs/test"},
}


ROUTING = "{heads: 4, clusters: 2, window: 8, local: 8}"
ROUTED = [f"model.routing={ROUTING}", "model.cache=false", "model.positions=added"]


def parsed(*settings: str, without: str | None = None) -> RunConfig:
    data = deepcopy(RUN)
    for setting in settings:
        override(data, setting)
    if without:
        *path, last = without.split(".")
        holder: Any = data
        for part in path:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        del holder[last]
    return RunConfig.parse(data, source="run.yaml")


def message_of(*settings: str, without: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        parsed(*settings, without=without)
    message = str(caught.value)
    assert message.startswith("run.yaml: ")
    assert "\n" not in message
    return message.removeprefix("run.yaml: ")


def test_the_run_itself_is_right() -> None:
    run = parsed()
    assert run.data.tokens_per_batch == 9216
    assert run.seed == 1


def test_a_run_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parsed().seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "meant"),
    {
        "stage": "stages",
        "model.layer": "layers",
        "model.vocabulary.cutofs": "cutoffs",
        "model.dropout.hiden": "hidden",
        "data.token_per_batch": "tokens_per_batch",
        "stages.0.segment_len": "segment_length",
        "stages.1.step": "steps",
        "optimizer.momentm": "momentum",
        "optimizer.learning_rate.warmup_step": "warmup_steps",
        "parallel.tensors": "tensor",
        "output.save_ever": "save_every",
    }.items(),
)
def test_unknown_key_with_a_near_one(key: str, meant: str) -> None:
    assert message_of(f"{key}=1") == f"{key}: unknown key; did you mean '{meant}'?"


def test_unknown_key_with_none_near() -> None:
    expected = "model.dropout.zzz: unknown key; known keys: hidden, attention, activation, softmax"
    assert message_of("model.dropout.zzz=1") == expected


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("seed", "true", "valid integer"),
        ("model.layers", "true", "valid integer"),
        ("model.layers", "2.0", "valid integer"),
        ("model.layers", '"2"', "valid integer"),
        ("model.layers", "0", "greater than 0"),
        ("model.layers", "null", "valid integer"),
        ("model.cache", '"yes"', "valid boolean"),
        ("model.cache", "1", "valid boolean"),
        ("model.positions", '"rotary"', "'added', 'infused' or 'relative'"),
        ("model.norm", '"middle"', "'before' or 'after'"),
        ("model.sandwich", "-1", "greater than or equal to 0"),
        ("model.memory", "{compressed: 8, rate: 1}", "greater than 1"),
        ("model.memory", "{compressed: 8, rate: 4, function: median}", "'convolution', 'mean' or 'max'"),
        ("model.vocabulary.projections", '"all"', "'input', 'both' or 'none'"),
        ("model.vocabulary.kind", '"shared"', "'adaptive', 'tied' or 'untied'"),
        ("model.vocabulary.cutoffs.1", '"x"', "valid integer"),
        ("model.dropout", "{hidden: 1.0}", "less than 1"),
        ("stages.1.steps", "1.5", "valid integer"),
        ("stages.0.segment_length", "-128", "greater than 0"),
        ("stages", "[]", "at least 1 item"),
        ("stages", "3", "valid array"),
        ("optimizer.name", '"adam"', "'nag' or 'adamw'"),
        ("optimizer.clip_norm", "true", "valid number"),
        ("optimizer.clip_norm", "0", "greater than 0"),
        ("optimizer.learning_rate.peak", '"fast"', "valid number"),
        ("output.path", "3", "valid string"),
        ("data", '"data/sotu"', "object"),
    ],
)
def test_wrong_type_or_range(key: str, value: str, reason: str) -> None:
    message = message_of(f"{key}={value}")
    assert message.startswith(key)
    assert reason in message
    if not value.startswith("{"):
        assert f" is {value}, but " in message


@pytest.mark.parametrize(
    "key",
    ["model", "model.heads", "model.vocabulary", "data.train", "stages", "stages.1.segment_length", "output.path"],
)
def test_missing_key(key: str) -> None:
    assert message_of(without=key) == f"{key}: missing; it has no default"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.heads=7"], "model: hidden_size (64) must be a multiple of heads (7)"),
        (["parallel={tensor: 3}"], "model.heads (8) must be a multiple of parallel.tensor (3)"),
        (
            ["parallel={tensor: 4}", "model.ffn_size=130"],
            "model.ffn_size (130) must be a multiple of parallel.tensor (4)",
        ),
        (["model.hidden_size=9", "model.heads=3"], "model: hidden_size (9) must be even and at least 4"),
        (
            ["model.vocabulary.cutoffs=[200, 100]"],
            "model.vocabulary: cutoffs [200, 100] must grow, as in [100, 200]",
        ),
        (["model.sandwich=9"], "model: sandwich (9) must be less than layers (2)"),
        ([f"model.routing={ROUTING}"], "model: routing needs cache false"),
        ([f"model.routing={ROUTING}", "model.cache=false"], "model: routing needs positions added, not infused"),
        ([*ROUTED, "model.routing.heads=8"], "model: routing.heads (8) must be less than heads (8)"),
        ([*ROUTED, "model.routing.first_layer=2"], "model: routing.first_layer (2) must be less than layers (2)"),
        ([*ROUTED, "parallel.tensor=8"], "model.routing.heads (4) must be a multiple of parallel.tensor (8)"),
        ([*ROUTED, "model.routing.assignment=balanced"], "model.routing.assignment is balanced, where later"),
        (
            ["model.memory={compressed: 8, rate: 4}", "model.cache=false"],
            "model: memory compresses what leaves the cache, but cache is false; set cache to true",
        ),
        (
            ["model.memory={compressed: 8, rate: 4}", "model.positions=added"],
            "model: memory needs positions infused or relative: an added position cannot be compressed",
        ),
        (
            ["model.memory={compressed: 8, rate: 4, function: mean, loss_weight: 2.0}"],
            "model.memory: loss_weight (2.0) belongs to function convolution; remove it",
        ),
        (
            ["model.memory={compressed: 8, rate: 3}"],
            "stages.0.segment_length (128) must be a multiple of model.memory.rate (3); use 126 or 129",
        ),
        (
            ["model.vocabulary.projections=none"],
            "model.vocabulary: projections none need bands of equal width: factor 1, not 4",
        ),
        (
            ["model.vocabulary={kind: tied, projections: both}"],
            "model.vocabulary: projections both belong to kind adaptive, not tied; remove them",
        ),
        (["model.vocabulary.cutoffs=[5, 5]"], "model.vocabulary: cutoffs [5, 5] must grow, as in [5]"),
        (
            ["data.tokens_per_batch=9216", "data.tokens_per_update=10000"],
            "data: tokens_per_update (10000) is not a multiple of tokens_per_batch (9216), which it replaces; leave "
            "out one of them",
        ),
        (["model.vocabulary.kind=tied"], "model.vocabulary: cutoffs [100, 200] belong to kind adaptive, not tied"),
        (
            ["model.vocabulary.cutoffs=[1, 2, 3, 4]"],
            "model: hidden_size (64) leaves no width for band 4, which gets hidden_size / 4^4",
        ),
        (["stages.0.epochs=1"], "stages.0: needs exactly one of epochs, steps, tokens; it has epochs and steps"),
        (["stages.1.steps=null"], "stages.1: needs exactly one of epochs, steps, tokens; it has none of them"),
        (
            ["model.cache=false", "stages.1.cache_length=64"],
            "stages.1.cache_length is 64, but model.cache is false",
        ),
        (
            ["stages.1.segment_length=500"],
            "stages.1.segment_length (500) must divide data.tokens_per_batch (9216); "
            "the nearest lengths that do are 384 and 512",
        ),
        (
            ["parallel={tensor: 8, sequence: true}", "stages.1.segment_length=36"],
            "stages.1.segment_length (36) must be a multiple of parallel.tensor (8), because parallel.sequence is "
            "true; the nearest lengths that are: 32 and 48",
        ),
        (
            ["parallel={tensor: 8, sequence: true}", "data.tokens_per_batch=12", "stages.0.segment_length=12"],
            "stages.0.segment_length (12) must be a multiple of parallel.tensor (8), because parallel.sequence is "
            "true; no length that divides data.tokens_per_batch is one; set it to false",
        ),
        (
            ["parallel={cache: host}", "model.cache=false"],
            "parallel.cache is host, but model.cache is false: there are no caches; remove it",
        ),
        (["optimizer.learning_rate.floor=2.0"], "optimizer.learning_rate: floor (2.0) must not be above peak (1.0)"),
    ],
)
def test_keys_that_do_not_fit_together(settings: list[str], message: str) -> None:
    assert message_of(*settings).startswith(message)


@pytest.mark.parametrize(
    ("wanted", "below", "above"), [(500, 384, 512), (100, 96, 128), (3000, 2304, 3072), (20_000, 9216, 9216)]
)
def test_nearest_lengths(wanted: int, below: int, above: int) -> None:
    assert nearest_divisors(9216, wanted) == (below, above)


def test_cutoffs_beyond_the_corpus() -> None:
    run = parsed()
    assert run.with_vocabulary(201) == run
    with pytest.raises(UserError, match=r"cutoffs: \[100, 200\] must stay below .* 200; leave them out"):
        run.with_vocabulary(200)


@pytest.mark.parametrize(("vocab_size", "cutoffs"), [(267_744, (20_080, 60_240)), (8192, (616, 1848)), (24, (8,))])
def test_cutoffs_that_are_not_set_come_from_the_vocabulary(vocab_size: int, cutoffs: tuple[int, ...]) -> None:
    run = parsed("model.vocabulary.cutoffs=[]", "model.hidden_size=64").with_vocabulary(vocab_size)
    assert run.model.vocabulary.cutoffs == cutoffs
    assert run.with_vocabulary(vocab_size) == run


def test_a_vocabulary_without_room_for_bands_is_refused() -> None:
    with pytest.raises(UserError, match=r"neither a vocabulary of 8 .* use kind tied"):
        parsed("model.vocabulary.cutoffs=[]").with_vocabulary(8)


ONE_STAGE = "stages=[{segment_length: 128, steps: 5}]"


def test_an_update_is_divided_among_the_ranks() -> None:
    run = parsed("data.tokens_per_update=1024", ONE_STAGE)
    assert [run.on_ranks(ranks).data.tokens_per_batch for ranks in (1, 2, 8)] == [1024, 512, 128]
    assert run.on_ranks(2).on_ranks(4) == run.on_ranks(4), "a resolved run may move to another grid"
    with pytest.raises(UserError, match=r"share on 3 data-parallel ranks .* numbers of ranks for which it is: 2 and 4"):
        run.on_ranks(3)
    with pytest.raises(UserError, match=r"must divide data\.tokens_per_update \(1000\)"):
        parsed("data.tokens_per_update=1000", ONE_STAGE)


def test_an_unknown_key_is_named_before_a_missing_one() -> None:
    """It is often the misspelt name of the one that is missing."""
    data = parsed().as_data()
    data["output"]["pth"] = data["output"].pop("path")
    data["model"].pop("layers")
    with pytest.raises(UserError, match=r"output\.pth: unknown key; did you mean 'path'\?"):
        RunConfig.parse(data, source="run.yaml")


@pytest.mark.parametrize(("value", "steps", "seconds"), [("7", 7, None), ("30m", None, 1800.0), ("null", None, None)])
def test_saving_is_by_steps_or_by_time(value: str, steps: int | None, seconds: float | None) -> None:
    output = parsed(f"output.save_every={value}").output
    assert (output.save_steps, output.save_seconds) == (steps, seconds)


@pytest.mark.parametrize("value", ["0", "soon", "1.5"])
def test_any_other_time_to_save_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"output\.save_every is .*, but"):
        parsed(f"output.save_every={value}")
