"""Greedy decoding on any grid during training: each token is a plain forward pass of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_style.model.documents import ages_of
from megatron_style.model.shortformer import Shortformer


@torch.no_grad()
def continue_greedily(
    model: Shortformer, prompt: Sequence[int], count: int, *, segment_length: int, cache_length: int
) -> list[int]:
    """Return the `count` likeliest next tokens, each after the previous one. No random number is used, so the training
    does not change.

    The decoder would be faster, but it reads weights outside of `forward`, where ZeRO 3 has not gathered them. Segments
    are the same: each grows to its length, then becomes the cache of the next."""
    device = model.positions.table.device
    opened: list[int] = []  # the open segment
    before = model.empty_memory(1, cache_length)  # the cache that it sees
    new = list(prompt)
    written: list[int] = []
    age = torch.tensor([-1])  # of the last token of the cache
    while len(written) < count:
        cache = before
        following = age
        for segment in torch.tensor([*opened, *new], device=device).split(segment_length):
            before = cache
            age = following
            ages = None
            if (document_end := model.config.document_end) is not None:
                ages = ages_of(segment[None], document_end, age.to(device))
                following = ages[:, -1]
            output = model(segment[None], segment[None, :0], before, None, ages, likeliest=True)
            cache = output.memory
        opened = segment.tolist()
        new = output.likeliest.tolist()
        written += new
    return written
