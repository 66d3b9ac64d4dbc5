"""The flags of a kNN-LM, which `evaluate` and `generate` share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_style.base.command import positive_int
from megatron_style.base.errors import UserError
from megatron_style.datastore.approximate import ApproximateSearch
from megatron_style.datastore.retrieval import ContinuousCache, Retrieval
from megatron_style.datastore.search import nearest
from megatron_style.datastore.store import open_datastore

K = 1024  # this and the weight are the authors' for WikiText-103
TEMPERATURE = 1.0
WEIGHT = 0.25
THETA = 0.3
CONTINUOUS_WEIGHT = 0.1


def add_neighbour_flags(parser: argparse.ArgumentParser, *temperature: str) -> None:
    """Add the flags; `temperature` are further names of --neighbour-temperature."""
    add = parser.add_argument_group("kNN-LM (docs/systems.md)").add_argument
    add("--neighbours", type=Path, metavar="DIR", help="mix in the neighbours of a datastore of `neighbours build`")
    add("--k", type=positive_int, metavar="N", help=f"neighbours per prediction ({K})")
    add(
        "--neighbour-temperature", *temperature, type=float, metavar="T",
        help=f"of the softmax over negative squared distances ({TEMPERATURE:g})",
    )  # fmt: skip
    add("--lambda", type=float, dest="weight", metavar="P", help=f"probability of the neighbours, 0 to 1 ({WEIGHT})")
    add("--probe", type=positive_int, metavar="N", help="search N lists of `neighbours index`; default: exact search")


def add_continuous_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("continuous cache (docs/systems.md)").add_argument
    add("--continuous-cache", type=positive_int, metavar="N", help="mix in the last N tokens of the text itself")
    add("--continuous-theta", type=float, metavar="T", help=f"factor of the products of keys ({THETA})")
    add("--continuous-lambda", type=float, metavar="P", help=f"probability of the cache, 0 to 1 ({CONTINUOUS_WEIGHT})")


def open_retrieval(args: argparse.Namespace, digest: Callable[[], str], vocab_size: int) -> Retrieval | None:
    """Return what the flags ask for. `digest` is that of the model's weights, which is computed only if needed."""
    if args.neighbours is None:
        _refuse_alone(args, {"k": "k", "neighbour_temperature": "neighbour-temperature", "weight": "lambda",
                             "probe": "probe"}, needs="--neighbours DIR")  # fmt: skip
        return None
    k = args.k or K
    temperature = TEMPERATURE if args.neighbour_temperature is None else args.neighbour_temperature
    weight = _probability("--lambda", args.weight, WEIGHT)
    if not 0 < temperature < math.inf:
        raise UserError(f"--neighbour-temperature is {temperature}; it must be above 0")
    store = open_datastore(args.neighbours)
    if store.manifest.vocab_size != vocab_size:
        raise UserError(
            f"{store.folder}: has a vocabulary of {store.manifest.vocab_size}, the model one of {vocab_size}; "
            f"build a datastore with this model"
        )
    if k > store.manifest.count:
        raise UserError(f"--k {k}: {store.folder} has only {store.manifest.count} keys; use --k with at most that many")
    if store.manifest.model != digest():
        raise UserError(f"{store.folder}: was built with another model; build a datastore with this one")
    search = ApproximateSearch.open(store, args.probe).nearest if args.probe else partial(nearest, store.keys)
    return Retrieval(store, search, k, temperature, weight)


def continuous_cache(args: argparse.Namespace) -> ContinuousCache | None:
    if args.continuous_cache is None:
        _refuse_alone(args, {"continuous_theta": "continuous-theta", "continuous_lambda": "continuous-lambda"},
                      needs="--continuous-cache N")  # fmt: skip
        return None
    theta = THETA if args.continuous_theta is None else args.continuous_theta
    if not 0 <= theta < math.inf:
        raise UserError(f"--continuous-theta is {theta}; it must be 0 or more")
    weight = _probability("--continuous-lambda", args.continuous_lambda, CONTINUOUS_WEIGHT)
    return ContinuousCache(args.continuous_cache, theta, weight)


def _probability(flag: str, value: float | None, default: float) -> float:
    if value is not None and not 0 <= value <= 1:
        raise UserError(f"{flag} is {value}; it must be a probability from 0 to 1")
    return default if value is None else value


def _refuse_alone(args: argparse.Namespace, flags: dict[str, str], *, needs: str) -> None:
    for name, flag in flags.items():
        if getattr(args, name) is not None:
            raise UserError(f"--{flag} needs {needs}")
