"""Documents that do not see each other: in a model with a `document_end`, a token sees the tokens since the last one of
these, which begins its document, and none before it.

The age of a token is the number of tokens before it in its document. What a token sees follows from its own age, so the
cache needs no record of documents. Ages beyond the reach of the cache need not be exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_style.model.kernels.attend import causal_mask


def ages_of(ids_BT: Tensor, document_end: int, before_B: Tensor) -> Tensor:
    """Return the ages of consecutive tokens [B, T]. `before` are those of the tokens before them, or -1."""
    place_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    start_BT = torch.where(ids_BT == document_end, place_T, -1 - before_B[:, None])
    return place_T - start_BT.cummax(1).values


def hidden_by_age(ages_BT: Tensor, remembered: int) -> Tensor:
    """Return the mask [B, 1, T, S], which is True where a token does not see one of the memory and the segment."""
    B, T = ages_BT.shape
    S = remembered + T
    place_S = torch.arange(S, device=ages_BT.device)
    first_BT = place_S[remembered:] - ages_BT
    hidden_BTS = (place_S < first_BT[..., None]) | ~causal_mask(T, S, ages_BT.device)
    return hidden_BTS.view(B, 1, T, S)
