"""The place of the caches between their uses: the device, or the host, from which they are fetched one micro-batch
ahead (`parallel.cache`). A place is a row of `PLACES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megatron_style.config.run import CachePlace
from megatron_style.model.memory import Memory


class CacheKeeper(Protocol):
    def keep(self, memory: Memory) -> Memory:
        """Return the memory in the place where it is between its uses."""

    def fetched(self, caches: Sequence[Memory]) -> Iterator[Memory]:
        """Yield each memory on the device, in order."""

    def settle(self) -> None:
        """Wait until the host can read all that is kept."""


class OnDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def keep(self, memory: Memory) -> Memory:
        return memory.moved(lambda x: x.to(self._device))

    def fetched(self, caches: Sequence[Memory]) -> Iterator[Memory]:
        yield from caches

    def settle(self) -> None: ...


class OnHost:
    """The caches of a host without an accelerator: a copy is a copy."""

    is_pinned: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def keep(self, memory: Memory) -> Memory:
        return memory.moved(lambda x: to_host(x, pinned=self.is_pinned))

    def fetched(self, caches: Sequence[Memory]) -> Iterator[Memory]:
        """Yield each memory on the device; the next one is being fetched meanwhile."""
        ahead = self._fetch(caches[0])
        for following in caches[1:]:
            current = self._await(ahead)
            ahead = self._fetch(following)
            yield current
        yield self._await(ahead)

    def settle(self) -> None: ...

    def _fetch(self, memory: Memory) -> Memory:
        return memory.moved(lambda x: to_device(x, self._device))

    def _await(self, memory: Memory) -> Memory:
        return memory


class OnHostAside(OnHost):
    """The caches of an accelerator, in pinned host memory. A second stream copies them while the device computes."""

    is_pinned = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copying = torch.Stream(device)
        self._fetched = torch.Event(device)

    def keep(self, memory: Memory) -> Memory:
        self._copying.wait_stream(torch.accelerator.current_stream(self._device))
        with self._copying:
            kept = super().keep(memory)
        _outlive(memory, self._copying)
        return kept

    def settle(self) -> None:
        self._copying.synchronize()

    def _fetch(self, memory: Memory) -> Memory:
        """Begin to copy. Copies run in order, so what is fetched has been kept before."""
        with self._copying:
            found = super()._fetch(memory)
        self._fetched = self._copying.record_event()
        return found

    def _await(self, memory: Memory) -> Memory:
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(self._fetched)
        _outlive(memory, computing)
        return memory


def _outlive(memory: Memory, stream: torch.Stream) -> None:
    """Keep the device's memory until the stream, on which it was not allocated, has used it."""
    for tensor in memory.tensors.values():
        if tensor.device.type != "cpu":
            tensor.record_stream(stream)


def to_host(x: Tensor, *, pinned: bool) -> Tensor:
    kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned)
    return kept.copy_(x, non_blocking=True)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device).copy_(x, non_blocking=True)


def _on_host(device: torch.device) -> OnHost:
    return OnHost(device) if device.type == "cpu" else OnHostAside(device)


PLACES: Mapping[CachePlace, Callable[[torch.device], CacheKeeper]] = {"device": OnDevice, "host": _on_host}
