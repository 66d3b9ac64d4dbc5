"""The runs and evaluations that tables and claims name."""

from __future__ import annotations

from megatron_style.paper.measures import Evaluated, Evaluation
from megatron_style.paper.runs import RunSpec

NONOVERLAPPING = Evaluation("nonoverlapping")
SLIDING = Evaluation("sliding", stride=1)
SLIDING_512 = Evaluation("sliding", stride=512)
CACHED = Evaluation("cached")
ONE_BY_ONE = Evaluation("sliding", "short", stride=1)  # a window for each token: how a model without cache generates
WALKED = Evaluation("token-by-token", "short")
CACHED_SHORT = Evaluation("cached", "short")

BASELINE = RunSpec("baseline", 3072)
STAGED = RunSpec("baseline", 3072, first_length=128, first_epochs=50)
PIA_CACHE = RunSpec("pia_cache", 512)
SHORTFORMER = RunSpec("pia_cache", 512, first_length=128, first_epochs=100)
PIA_NO_CACHE = RunSpec("ablation_pia_no_cache", 512)
PIA_NO_CACHE_UNSHUFFLED = RunSpec("ablation_pia_no_cache_unshuffled", 512)
CACHE_NO_PIA = RunSpec("ablation_cache_no_pia", 512)


def perplexity(evaluation: Evaluation) -> Evaluated:
    return Evaluated("perplexity", evaluation)


def speed(evaluation: Evaluation) -> Evaluated:
    return Evaluated("speed", evaluation)


def loss(evaluation: Evaluation) -> Evaluated:
    return Evaluated("loss", evaluation)
