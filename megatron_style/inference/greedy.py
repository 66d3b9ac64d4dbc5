"""A continuation on any grid, while a model is being trained: each token is a plain forward pass of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_style.model.shortformer import Shortformer


@torch.no_grad()
def continue_greedily(
    model: Shortformer, prompt: Sequence[int], count: int, *, segment_length: int, cache_length: int
) -> list[int]:
    """The likeliest next token, `count` times. Nothing is drawn, so that no generator of the training is touched.

    The decoder would be quicker, but it reads weights outside of `forward`, where ZeRO 3 does not have them together.
    Its walk is followed: a segment grows to its length, then becomes the cache of the next."""
    device = model.positions.table.device
    opened, before = list[int](), model.empty_memory(1, cache_length)  # the open segment, and the cache it sees
    new, written = list(prompt), list[int]()
    while len(written) < count:
        cache = before
        for segment in torch.tensor([*opened, *new], device=device).split(segment_length):
            before = cache
            output = model(segment[None], segment[None, :0], before, likeliest=True)
            cache = output.memory
        opened, new = segment.tolist(), output.likeliest.tolist()
        written += new
    return written
