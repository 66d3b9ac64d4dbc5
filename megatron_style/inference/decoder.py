"""Token by token, without projecting anything twice.

With positions infused, a key is W(x + p) + b = W x + (W p + b): a token's own part and a part of its place. Own parts
and values are kept in buffers, and the parts of all places are computed once. So a new token costs one row through the
model, and when a segment becomes the cache of the next, its keys are given their new places by an addition.

Shape letters: B rows, T new tokens, S places, D hidden, H heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_style.model.attention import Attention, causal_mask
from megatron_style.model.block import Block
from megatron_style.model.shortformer import Shortformer


@dataclass(frozen=True)
class _Layer:
    """The buffers of one layer, and what its places add to queries and keys."""

    own_keys_BHSE: Tensor  # without places
    keys_BHSE: Tensor
    values_BHSE: Tensor
    query_places_HSE: Tensor
    key_places_HSE: Tensor


class Decoder:
    """Walks as in training: a segment grows to its length, then its last tokens become the cache of the next."""

    def __init__(self, model: Shortformer, *, rows: int, segment_length: int, cache_length: int) -> None:
        assert model.config.positions == "infused", "places must enter queries and keys only"
        self._model, self._segment_length, self._cache_length = model, segment_length, cache_length
        self._blocks = [cast(Block, block) for block in model.blocks]
        self._cached = 0  # places that belong to the segment before
        self._filled = 0  # places in use
        self._layers = [self._buffers(block.attention, rows) for block in self._blocks]

    @property
    def room(self) -> int:
        """How many tokens the segment still takes."""
        return self._segment_length - (self._filled - self._cached)

    @torch.no_grad()
    def feed(self, ids_BT: Tensor) -> Tensor:
        """The features of these tokens [B, T, D]; they follow those fed before. At most `room`, unless it is zero."""
        if self.room == 0:
            self._turn_over()
        assert ids_BT.shape[1] <= self.room
        x: Tensor = self._model.vocabulary.embed(ids_BT) * self._model.config.hidden_size**0.5
        for block, layer in zip(self._blocks, self._layers, strict=True):
            x = x + self._attend(block.attention, layer, block.attention_norm(x))
            x = x + block.down(F.relu(block.up(block.ffn_norm(x))))
        self._filled += ids_BT.shape[1]
        return x

    def _attend(self, attention: Attention, layer: _Layer, x_BTD: Tensor) -> Tensor:
        first, last = self._filled, self._filled + x_BTD.shape[1]
        place = slice(first, last)
        layer.own_keys_BHSE[:, :, place] = _heads(attention, F.linear(x_BTD, attention.key.weight))
        layer.keys_BHSE[:, :, place] = layer.own_keys_BHSE[:, :, place] + layer.key_places_HSE[:, place]
        layer.values_BHSE[:, :, place] = _heads(attention, attention.value(x_BTD))
        query = _heads(attention, F.linear(x_BTD, attention.query.weight)) + layer.query_places_HSE[:, place]
        causal = None if last - first == 1 else causal_mask(last - first, last, x_BTD.device)
        mixed = F.scaled_dot_product_attention(
            query, layer.keys_BHSE[:, :, :last], layer.values_BHSE[:, :, :last], attn_mask=causal
        )
        out: Tensor = attention.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _turn_over(self) -> None:
        """Once a segment, not once a token: the last tokens move to the front and get the places there."""
        kept = min(self._cache_length, self._filled)
        for layer in self._layers:
            for buffer in (layer.own_keys_BHSE, layer.values_BHSE):
                buffer[:, :, :kept] = buffer[:, :, self._filled - kept : self._filled].clone()
            layer.keys_BHSE[:, :, :kept] = layer.own_keys_BHSE[:, :, :kept] + layer.key_places_HSE[:, :kept]
        self._cached = self._filled = kept

    @torch.no_grad()
    def _buffers(self, attention: Attention, rows: int) -> _Layer:
        places = self._segment_length + self._cache_length
        weight = attention.key.weight
        pos_SD = self._model.positions(places).to(weight.dtype)
        query, key = (_heads(attention, layer(pos_SD[None]))[0] for layer in (attention.query, attention.key))
        own, keys, values = (weight.new_empty(rows, *key.shape) for _ in range(3))
        return _Layer(own, keys, values, query, key)


def _heads(attention: Attention, x_BTD: Tensor) -> Tensor:
    return x_BTD.view(*x_BTD.shape[:2], -1, attention.head_size).transpose(1, 2)
