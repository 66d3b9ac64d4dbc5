"""Caches on the host of an accelerator. Its streams are stand-ins that copy as late as they may: what is read before
anyone has waited for it is not there yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_style.model import caches
from megatron_style.model.caches import OnHostAside
from megatron_style.model.memory import Memory

LAYERS = 2


class LateStream:
    """Collects copies while it is the current stream, and does them in order when they are waited for."""

    current: LateStream | None = None

    def __init__(self, *_: object) -> None:
        self.asked = 0
        self.due: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        LateStream.current = self

    def __exit__(self, *_: object) -> None:
        LateStream.current = None

    def ask(self, copy: Callable[[], object]) -> None:
        self.asked += 1
        self.due.append(copy)

    def do(self, up_to: int) -> None:
        while self.asked - len(self.due) < up_to:
            self.due.pop(0)()

    def record_event(self) -> LateEvent:
        return LateEvent(self, self.asked)

    def synchronize(self) -> None:
        self.do(self.asked)

    def wait_stream(self, other: Computing) -> None:
        assert isinstance(other, Computing)


class LateEvent:
    def __init__(self, stream: LateStream, copies: int) -> None:
        self.stream = stream
        self.copies = copies


class Computing:
    """The stream of the kernels, whose results are there at once."""

    def wait_event(self, event: LateEvent) -> None:
        event.stream.do(event.copies)


class Keeper(OnHostAside):
    """Counts the tensors that it has begun to fetch."""

    fetches = 0

    def _fetch(self, memory: Memory) -> Memory:
        self.fetches += len(memory.layers)
        return super()._fetch(memory)


def copied_late(x: Tensor) -> Tensor:
    found = torch.full_like(x, torch.nan)
    assert LateStream.current is not None, "copied on the stream of the kernels"
    LateStream.current.ask(lambda: found.copy_(x))
    return found


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    computing = Computing()
    monkeypatch.setattr(torch, "Stream", LateStream)
    monkeypatch.setattr(torch, "Event", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: computing)
    monkeypatch.setattr(caches, "to_host", lambda x, *, pinned: copied_late(x))
    monkeypatch.setattr(caches, "to_device", lambda x, device: copied_late(x))
    return Keeper(torch.device("meta"))


def memory_of(number: int) -> Memory:
    return Memory(tuple(torch.full((2, 3, 4), 10.0 * number + layer) for layer in range(LAYERS)), capacity=3)


def expect_equal(found: Memory, expected: Memory) -> None:
    for mine, wanted in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_memory_is_there_when_it_is_used_and_the_next_one_is_being_fetched(keeper: Keeper, count: int) -> None:
    kept = [keeper.keep(memory_of(number)) for number in range(count)]
    following = []
    for number, memory in enumerate(keeper.fetched(kept)):
        expect_equal(memory, memory_of(number))
        assert keeper.fetches == LAYERS * min(number + 2, count)
        following.append(keeper.keep(memory_of(number + count)))
    keeper.settle()
    for number, memory in enumerate(following):
        expect_equal(memory, memory_of(number + count))


def test_what_is_kept_can_be_read_by_the_host_after_it_has_settled(keeper: Keeper) -> None:
    kept = keeper.keep(memory_of(1))
    assert kept.layers[0].isnan().all()
    keeper.settle()
    expect_equal(kept, memory_of(1))
