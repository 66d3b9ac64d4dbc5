"""The flags of a walk through a text, which `evaluate` and `neighbours` share."""

from __future__ import annotations

import argparse
from dataclasses import fields

import torch

from megatron_style.base.command import positive_int
from megatron_style.config.model import ModelConfig
from megatron_style.inference.scoring.modes import own_mode
from megatron_style.inference.scoring.protocol import TOKENS_AT_ONCE, Request

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def add_protocol_flags(parser: argparse.ArgumentParser, *, lanes: str) -> None:
    """Add the flags of a walk through a text, except its mode. `lanes` is the default that is shown."""
    add = parser.add_argument
    add("--segment-length", type=positive_int, metavar="L", help="default: the length last trained with")
    add("--stride", type=positive_int, metavar="S", help="sliding only: tokens of a window that count")
    add(
        "--cache-length", type=positive_int, metavar="C",
        help="cached and token-by-token only; default: the length last trained with",
    )  # fmt: skip
    add(
        "--batch-rows", type=positive_int, metavar="N",
        help="not for token-by-token: windows, consecutive segments or lanes at once; default: as many as have "
        f"{TOKENS_AT_ONCE:,} tokens",
    )  # fmt: skip
    add(
        "--lanes", type=positive_int, metavar="N",
        help="cached and token-by-token only: cut the walk into N lanes, each warmed by the text that fills its cache; "
        f"default: {lanes}",
    )  # fmt: skip
    add(
        "--same-length", action="store_true", default=None,
        help="relative positions only: each token sees C tokens, itself included",
    )  # fmt: skip
    add(
        "--clamp-distance", type=positive_int, metavar="N",
        help="relative positions only: longer distances count as N",
    )  # fmt: skip
    add("--tensor", type=positive_int, default=1, metavar="N", help="tensor-parallel ranks")


def request_of(args: argparse.Namespace, model: ModelConfig) -> Request:
    """Return what the flags ask for; without --mode, the model's own."""
    given = {field.name: getattr(args, field.name) for field in fields(Request)}
    return Request(**given | {"mode": args.mode or own_mode(model)})
