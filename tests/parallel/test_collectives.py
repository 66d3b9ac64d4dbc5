"""JSON values between ranks: what arrives is what was sent, and nothing is unpickled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist

from megatron_style.parallel.collectives import broadcast_json, gather_json
from megatron_style.parallel.local_ranks import run_ranks


def value_of(rank: int) -> Any:
    """Of another length on every rank, with what is easily lost on the way."""
    return {"rank": rank, "text": "é\0\U0001f600" * (rank * 1000), "list": [None, True, -(2**62), 0.1, [], {}]}


def exchange() -> tuple[list[Any], Any, Any]:
    rank = dist.get_rank()
    return gather_json(value_of(rank)), broadcast_json(value_of(rank + 2)), broadcast_json(None if rank else "")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_gets_what_was_sent(world: int) -> None:
    for everyone, first, empty in run_ranks(world, exchange):
        assert everyone == [value_of(rank) for rank in range(world)]
        assert first == value_of(2)
        assert empty == ""


def refuse(value: Any) -> None:
    for send in (gather_json, broadcast_json):
        with pytest.raises((TypeError, ValueError)):
            send(value)


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, (1, 2), {"a": {3}}, b"bytes", math.nan, [math.inf]],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_json_is_refused(value: Any) -> None:
    run_ranks(1, refuse, value)
