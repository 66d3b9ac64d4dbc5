"""The paper's claims, each as a function of measured figures. `judgement` says what it takes to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megatron_style.paper.judgement import (
    Outcome,
    all_below,
    each_first_is_below,
    equal_to,
    falls,
    falls_from_its_peak,
    first_is_highest,
    first_is_lowest,
    first_is_times,
    grows,
    judge,
    within,
)
from megatron_style.paper.measures import Figures, Findings, Measured, ToMatch, TrainSpeed
from megatron_style.paper.memory import LargestBatch, PlannedStage
from megatron_style.paper.runs import Model, RunSpec
from megatron_style.paper.tables import (
    BASELINE,
    CACHE_NO_PIA,
    CACHED,
    CACHED_SHORT,
    LONG_MEMORY,
    NONOVERLAPPING,
    ONE_BY_ONE,
    PIA_CACHE,
    PIA_NO_CACHE,
    SHORTFORMER,
    SLIDING,
    STAGED,
    TRANSFORMER_XL,
    WALKED,
    loss,
    perplexity,
    speed,
)


@dataclass(frozen=True)
class Claim:
    text: str
    tables: tuple[int, ...]  # whose runs decide it
    test: Callable[[Findings], Outcome]


def claims_of(number: int) -> tuple[Claim, ...]:
    return tuple(claim for claim in CLAIMS if number in claim.tables)


def _perplexity_falls_with_length(found: Findings) -> Outcome:
    return judge(_needs_two(_by_length(found, "baseline", perplexity(NONOVERLAPPING))), falls)


def _speed_falls_with_length(found: Findings) -> Outcome:
    return judge(_needs_two(_by_length(found, "baseline", TrainSpeed())), falls_from_its_peak)


def _sliding_beats_nonoverlapping(found: Findings) -> Outcome:
    better = _by_length(found, "baseline", perplexity(SLIDING))
    plain = _by_length(found, "baseline", perplexity(NONOVERLAPPING))
    return judge(_in_pairs("sliding", better, "nonoverlapping", plain), each_first_is_below)


def _pia_cache_beats_baseline(found: Findings) -> Outcome:
    better = _by_length(found, "pia_cache", perplexity(CACHED), longest=1024)
    plain = _by_length(found, "baseline", perplexity(NONOVERLAPPING), longest=1024)
    return judge(_in_pairs("PIA + cache", better, "baseline", plain), each_first_is_below)


def _cache_needs_pia(found: Findings) -> Outcome:
    return judge(_ablation(found), lambda values: values[2] >= 1.2 * values[0])


def _pia_wants_cache(found: Findings) -> Outcome:
    return judge(_ablation(found), lambda values: values[0] < values[1] < values[2])


def _walking_is_equal(found: Findings) -> Outcome:
    walks = {"in segments": loss(CACHED_SHORT), "token by token": loss(WALKED)}
    return judge({name: found.get((PIA_CACHE, measure)) for name, measure in walks.items()}, equal_to(1e-4))


def _generation_is_faster(found: Findings) -> Outcome:
    speeds = {
        "PIA + cache tokens/s": found.get((PIA_CACHE, speed(WALKED))),
        "baseline tokens/s": found.get((BASELINE, speed(ONE_BY_ONE))),
    }
    return judge(speeds, first_is_times(2))


def _staged_is_sooner(found: Findings) -> Outcome:
    return judge({"share of the baseline's time": found.get((STAGED, ToMatch("seconds")))}, all_below(1))


def _staged_ends_better(found: Findings) -> Outcome:
    measure = perplexity(NONOVERLAPPING)
    return judge({"staged": found.get((STAGED, measure)), "baseline": found.get((BASELINE, measure))}, grows)


def _first_length_hardly_matters(found: Findings) -> Outcome:
    ends = {
        f"first L={spec.first_length}": figures
        for (spec, measure), figures in found.items()
        if isinstance(spec, RunSpec)
        and spec.first_length
        and replace(spec, first_length=128) == STAGED
        and measure == perplexity(NONOVERLAPPING)
    }
    return judge(_needs_two(ends), within(0.1))


def _shortformer_is_better_than_one_stage(found: Findings) -> Outcome:
    names = {"Shortformer": SHORTFORMER, "L=512 all through": PIA_CACHE}
    return judge({name: found.get((spec, perplexity(CACHED))) for name, spec in names.items()}, grows)


def _shortformer_is_fastest(found: Findings) -> Outcome:
    names = {"Shortformer": SHORTFORMER, "PIA + cache": PIA_CACHE, "staged": STAGED, "baseline": BASELINE}
    return judge({name: found.get((spec, TrainSpeed())) for name, spec in names.items()}, first_is_highest)


def _shortformer_is_best(found: Findings) -> Outcome:
    on_test = (replace(CACHED, split="test"), replace(NONOVERLAPPING, split="test"))
    names = {"Shortformer": (SHORTFORMER, 0), "PIA + cache": (PIA_CACHE, 0), "baseline": (BASELINE, 1)}
    figures = {name: found.get((spec, perplexity(on_test[kind]))) for name, (spec, kind) in names.items()}
    return judge(figures, first_is_lowest)


def _staged_is_faster(found: Findings) -> Outcome:
    names = {"baseline": BASELINE, "staged": STAGED}
    return judge({f"{name} tokens/s": found.get((spec, TrainSpeed())) for name, spec in names.items()}, grows)


def _better_than_relative_positions(found: Findings) -> Outcome:
    figures = {
        "Shortformer ppl": found.get((SHORTFORMER, perplexity(replace(CACHED, split="test")))),
        "Transformer-XL ppl": found.get((TRANSFORMER_XL, perplexity(replace(LONG_MEMORY, split="test")))),
        "Transformer-XL tokens/s": found.get((TRANSFORMER_XL, TrainSpeed())),
        "PIA + cache tokens/s": found.get((PIA_CACHE, TrainSpeed())),
    }
    return judge(figures, each_first_is_below)


def _short_with_cache_beats_long(found: Findings) -> Outcome:
    figures = {
        "PIA + cache, L=512": found.get((PIA_CACHE, perplexity(replace(CACHED, split="test")))),
        "baseline, L=3072": found.get((BASELINE, perplexity(replace(NONOVERLAPPING, split="test")))),
    }
    return judge(figures, grows)


def _gains_add_up(found: Findings) -> Outcome:
    figures = {
        "Shortformer": found.get((SHORTFORMER, perplexity(CACHED))),
        "PIA + cache": found.get((PIA_CACHE, perplexity(CACHED))),
        "staged": found.get((STAGED, perplexity(NONOVERLAPPING))),
    }
    return judge(figures, first_is_lowest)


def _last_length_matters(found: Findings) -> Outcome:
    lengths = sorted(
        spec.length
        for spec, measure in found
        if isinstance(spec, RunSpec) and replace(spec, length=3072) == STAGED and measure == perplexity(NONOVERLAPPING)
    )
    figures = {
        f"last L={length}": found[replace(STAGED, length=length), perplexity(NONOVERLAPPING)] for length in lengths
    }
    return judge(_needs_two(figures), falls)


def _memory_order(found: Findings) -> Outcome:
    stages = {
        "baseline rows": PlannedStage("baseline", 3072),
        "PIA + cache rows": PlannedStage("pia_cache", 512),
        "Shortformer, first stage rows": PlannedStage("pia_cache", 128),
        "staged, first stage rows": PlannedStage("baseline", 128),
    }
    return judge({name: found.get((stage, LargestBatch())) for name, stage in stages.items()}, grows)


def _books(length: int) -> Callable[[Findings], Outcome]:
    baseline, staged = (replace(spec, length=length, text="tbc") for spec in (BASELINE, STAGED))
    measure = perplexity(NONOVERLAPPING)

    def test(found: Findings) -> Outcome:
        return judge({"staged": found.get((staged, measure)), "baseline": found.get((baseline, measure))}, grows)

    return test


def _by_length(
    found: Findings, model: Model, measure: Measured, longest: int | None = None
) -> dict[str, Figures | None]:
    """Return the figures of the runs with one stage, shortest segments first. A length that was measured with one seed
    only leaves the claim with that seed."""
    lengths = sorted(
        spec.length
        for spec, measured in found
        if isinstance(spec, RunSpec) and spec == RunSpec(model, spec.length) and measured == measure
    )
    return {f"L={each}": found[RunSpec(model, each), measure] for each in lengths if not longest or each <= longest}


def _in_pairs(
    first_name: str, first: dict[str, Figures | None], second_name: str, second: dict[str, Figures | None]
) -> dict[str, Figures | None]:
    """Return both figures at every length that has both."""
    pairs: dict[str, Figures | None] = {}
    for length in first:
        if length in second:
            pairs |= {f"{length} {first_name}": first[length], f"{length} {second_name}": second[length]}
    return pairs


def _needs_two(figures: Mapping[str, Figures | None]) -> Mapping[str, Figures | None]:
    return figures if len(figures) > 1 else {"a second length": None}


def _ablation(found: Findings) -> dict[str, Figures | None]:
    return {
        "PIA + cache": found.get((PIA_CACHE, perplexity(CACHED))),
        "PIA, no cache": found.get((PIA_NO_CACHE, perplexity(NONOVERLAPPING))),
        "cache, no PIA": found.get((CACHE_NO_PIA, perplexity(CACHED))),
    }


CLAIMS = (
    Claim("Nonoverlapping perplexity falls with the segment length.", (1,), _perplexity_falls_with_length),
    Claim("Sliding windows beat nonoverlapping segments at every length.", (1,), _sliding_beats_nonoverlapping),
    Claim("Training gets slower with the segment length, from the fastest length on.", (1,), _speed_falls_with_length),
    Claim("PIA with cache beats the baseline of the same length, up to L=1024.", (1, 3), _pia_cache_beats_baseline),
    Claim("A cache without PIA is far worse: by a fifth or more.", (3,), _cache_needs_pia),
    Claim("PIA without cache is worse than with it, and better than a cache without PIA.", (3,), _pia_wants_cache),
    Claim("Cached segments and token by token give the same loss, within 1e-4 nats.", (3,), _walking_is_equal),
    Claim("With PIA and cache text is generated at least twice as fast.", (1, 3, 5), _generation_is_faster),
    Claim("Staged training is as good as the baseline in less time.", (5, 6), _staged_is_sooner),
    Claim("Staged training is faster than the baseline.", (5,), _staged_is_faster),
    Claim("Staged training ends better than the baseline.", (2, 5), _staged_ends_better),
    Claim("The first stage's length hardly matters: within a tenth.", (2,), _first_length_hardly_matters),
    Claim("A first stage of short segments makes PIA with cache better.", (4,), _shortformer_is_better_than_one_stage),
    Claim("The Shortformer trains fastest.", (4, 5), _shortformer_is_fastest),
    Claim("Without sliding windows the Shortformer has the best test perplexity.", (5,), _shortformer_is_best),
    Claim(
        "The Shortformer beats Transformer-XL, and PIA trains faster than relative positions.", (5,),
        _better_than_relative_positions,
    ),
    Claim("Segments of 512 with PIA and cache beat 3072 without.", (5,), _short_with_cache_beats_long),
    Claim("The gains add up: on dev the Shortformer beats both of its parts.", (5,), _gains_add_up),
    Claim("After a short first stage, perplexity falls with the last length.", (9,), _last_length_matters),
    Claim("Shorter segments need less memory: rows that fit, in the paper's order.", (10,), _memory_order),
    Claim("On books, staged training ends better than the baseline.", (11,), _books(1024)),
    Claim("On books at L=3072, staged training ends better than the baseline.", (12,), _books(3072)),
)  # fmt: skip
