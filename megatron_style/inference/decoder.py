"""Decoding token by token, without projecting anything twice.

With position-infused attention, a key is W(x + p) + b = W x + (W p + b): a token's own part and a part of its place.
Own parts and values are kept in buffers, and the parts of all places are computed once. So a new token costs one row
through the model, and when a segment becomes the cache of the next, its keys move to their new places by an addition.
With relative positions, keys have no part of their places, and the projections of all distances are computed once.
Compressed slots have the first places; a model that has them also keeps the tokens, of which new slots are made.

Shape letters: B rows, T new tokens, N = B x T, S places, D hidden, H local heads, E head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_style.config.model import Positions
from megatron_style.model.attention import CompressiveRelativeAttention, RelativeAttention, attention_of
from megatron_style.model.block import Block
from megatron_style.model.documents import ages_of
from megatron_style.model.kernels.attend import causal_mask
from megatron_style.model.memory import UNLIMITED, Reach, memory_of
from megatron_style.model.shape import units
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.collectives import reduce_from_shards
from megatron_style.parallel.device.products import linear
from megatron_style.parallel.layers import RowParallelLinear

_FEW = 3  # tokens


class Reading(NamedTuple):
    """What a model makes of the last token of each row, or of one row."""

    x: Tensor  # its features, which predict the next token: [B, D] or [D]
    key: Tensor  # its key in a kNN-LM datastore, shaped like x


@dataclass(frozen=True)
class _Run:
    """The places of the new tokens of some rows, and the places that they see."""

    rows: slice | Tensor
    places: slice | Tensor
    seen: tuple[slice, slice]  # these rows, up to the longest
    mask: Tensor | None

    def distances(self, device: torch.device) -> Tensor:
        """Return how far each place that is seen lies before each new token [B or 1, T, S]; 0 for those after it."""
        return self._signed_distances(device).clamp(min=0)

    def separated(self, ages_BT: Tensor) -> _Run:
        """Return the same run for tokens that see their document only."""
        visible_B1TS = (self._signed_distances(ages_BT.device) <= ages_BT[..., None])[:, None]
        return replace(self, mask=visible_B1TS if self.mask is None else visible_B1TS & self.mask)

    def _signed_distances(self, device: torch.device) -> Tensor:
        places = self.places
        if isinstance(places, slice):
            places = torch.arange(places.start, places.stop, device=device)[None]
        seen_S = torch.arange(self.seen[1].stop, device=device)
        return places[:, :, None] - seen_S


class Decoder:
    """Rows of text that grow independently, as in training: a segment grows to its length, then its last tokens become
    the cache of the next. Rows of equal length need no mask."""

    def __init__(
        self, model: Shortformer, *, rows: int, segment_length: int, cache_length: int, reach: Reach = UNLIMITED
    ) -> None:
        assert attention_of(model.config).can_decode, "positions must enter queries and keys only"
        self._model = model
        self._window = reach.window
        self._segment_length = segment_length
        self._device = model.positions.table.device
        config = model.config
        first = memory_of(config).length_after(0, config, cache_length)
        most = memory_of(config).length_after(cache_length, config, cache_length)
        self._cached = [first] * rows  # places of the memory
        self._filled = [first] * rows  # places in use
        self._ages = [-1] * rows  # of the last token in its document, if documents are separate
        self._shared = 0  # the first places, which are known to be equal in all rows
        pos_SD = model.positions(most + segment_length)
        if reach.clamp is not None:
            pos_SD = pos_SD[torch.arange(len(pos_SD), device=self._device).clamp(max=reach.clamp)]
        kind = (_LAYERS if config.memory is None else _COMPRESSIVE_LAYERS)[config.positions]
        self._layers = [kind(block, rows, pos_SD, cache_length) for block in model.blocks]

    @torch.no_grad()
    def read(self, ids: Sequence[int] | Tensor, *, row: int = 0) -> Reading:
        """Append a text of any length to one row."""
        ids_T = torch.as_tensor(ids, device=self._device)
        assert len(ids_T), "there is no last token"
        while len(ids_T):
            room = self._make_room(row)
            x_BTD, key_BTD = self._features(ids_T[None, :room], slice(row, row + 1))
            ids_T = ids_T[room:]
        return Reading(x_BTD[0, -1], key_BTD[0, -1])

    @torch.no_grad()
    def step(self, ids_B: Tensor) -> Reading:
        """Append one token to every row."""
        for row in range(len(self._filled)):
            self._make_room(row)
        x_BTD, key_BTD = self._features(ids_B[:, None], slice(0, len(self._filled)))
        return Reading(x_BTD[:, 0], key_BTD[:, 0])

    def select(self, rows: Sequence[int]) -> None:
        """Replace each row i by row `rows[i]`. Only places that differ between rows are copied."""
        assert len(rows) == len(self._filled)
        moved = [row for row, source in enumerate(rows) if row != source]
        if not moved:
            return
        sources = [rows[row] for row in moved]
        places = slice(self._shared, max(self._filled[source] for source in sources))
        for layer in self._layers:
            for buffer in layer.buffers:
                buffer[moved, places] = buffer[sources, places]
        self._filled = [self._filled[source] for source in rows]
        self._cached = [self._cached[source] for source in rows]
        self._ages = [self._ages[source] for source in rows]
        if len(set(rows)) == 1:
            self._shared = self._filled[0]

    def _make_room(self, row: int) -> int:
        """Return the free places of the row's segment. A full segment first becomes the cache of the next."""
        filled = self._filled[row]
        if filled - self._cached[row] == self._segment_length:
            for layer in self._layers:
                self._cached[row] = self._filled[row] = layer.move_to_front(row, filled)
            self._shared = 0
        return self._segment_length - (self._filled[row] - self._cached[row])

    def _features(self, ids_BT: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return features and keys of new tokens [B, T, D]. Rows of different lengths take one token each."""
        run = self._run(rows, ids_BT.shape[1])
        if (document_end := self._model.config.document_end) is not None:
            ages_BT = ages_of(ids_BT, document_end, torch.tensor(self._ages[rows], device=self._device))
            self._ages[rows] = ages_BT[:, -1].tolist()
            run = run.separated(ages_BT)
        x_BTD = self._model.embed(ids_BT)
        for unit in units(self._model.config):
            if unit.attention is not None:
                x_BTD = self._layers[unit.attention].attend(x_BTD, run)
            if unit.feed_forward is not None:
                x_BTD, key_BTD = self._layers[unit.feed_forward].feed(x_BTD)
        self._filled[rows] = [filled + ids_BT.shape[1] for filled in self._filled[rows]]
        return x_BTD, key_BTD

    def _run(self, rows: slice, T: int) -> _Run:
        filled = self._filled[rows]
        end = max(filled) + T
        seen = (rows, slice(0, end))
        if len(set(filled)) == 1:
            needs_mask = T > 1 or self._window is not None
            mask = causal_mask(T, end, self._device, window=self._window) if needs_mask else None
            return _Run(rows, slice(end - T, end), seen, mask)
        assert T == 1
        rows_B1 = torch.arange(rows.start, rows.stop, device=self._device)[:, None]
        places_B1 = torch.tensor(filled, device=self._device)[:, None]
        seen_S = torch.arange(end, device=self._device)
        visible_BS = seen_S <= places_B1
        if self._window is not None:
            visible_BS &= seen_S > places_B1 - self._window
        return _Run(rows_B1, places_B1, seen, visible_BS[:, None, None])


class _Layer(ABC):
    """A block and its cached keys and values. It projects queries, keys and values at once, from a copy of their
    weights: a quarter of the block's. `buffers` are [B, S, H, E], the keys and values last."""

    @torch.no_grad()
    def __init__(self, block: Block, rows: int, pos_SD: Tensor, cache_length: int, buffers: int) -> None:
        self._block = block
        self._cache_length = cache_length
        attention = block.attention
        self._inward = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])
        E = attention.head_size
        H = len(attention.query.weight) // E
        # Each head's places are contiguous in memory, because attention reads them by head.
        empty = self._inward.new_zeros(buffers, rows, H, len(pos_SD), E)
        self.buffers = list(empty.transpose(2, 3))
        self._keys_BSHE, self._values_BSHE = self.buffers[-2:]

    def attend(self, x_BTD: Tensor, run: _Run) -> Tensor:
        block = self._block
        seen = block.attention_norm(x_BTD) if block.norm_before else x_BTD
        query_BTHE, bias = self._append(seen, run)
        mixed = _mixed(
            query_BTHE.transpose(1, 2),
            self._keys_BSHE[run.seen].transpose(1, 2),
            self._values_BSHE[run.seen].transpose(1, 2),
            bias,
        )
        x_BTD = x_BTD + _row_parallel(mixed.transpose(1, 2).flatten(2), block.attention.out)
        return x_BTD if block.norm_before else block.attention_norm(x_BTD)

    def feed(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        block = self._block
        fed_BTD = block.ffn_norm(x_BTD) if block.norm_before else x_BTD
        inner = F.relu(_biased(_product(fed_BTD, block.up.weight), block.up.bias))
        x_BTD = x_BTD + _row_parallel(inner, block.down)
        return x_BTD if block.norm_before else block.ffn_norm(x_BTD), fed_BTD

    @abstractmethod
    def _append(self, x_BTD: Tensor, run: _Run) -> tuple[Tensor, Tensor | None]:
        """Keep the keys and values of new tokens. Return their queries, and the mask or bias of their scores."""

    @abstractmethod
    def _project(self, x_BTD: Tensor, rows: slice | Tensor, places: slice | Tensor) -> Tensor:
        """Keep the keys and values of tokens. Return their queries."""

    def move_to_front(self, row: int, filled: int, first: int = 0) -> int:
        """Move the cached tokens to the places from `first` on: once per segment, not once per token. Return the number
        of places in use then."""
        kept = min(self._cache_length, filled - first)
        for buffer in self.buffers:
            buffer[row, first : first + kept] = buffer[row, filled - kept : filled].clone()
        return first + kept

    def _heads(self, x: Tensor) -> Tensor:
        E = self._block.attention.head_size
        return x.view(*x.shape[:-1], 3, x.shape[-1] // (3 * E), E)


class _InfusedLayer(_Layer):
    """In addition to keys it keeps their own parts, to which another place can be added."""

    @torch.no_grad()
    def __init__(self, block: Block, rows: int, pos_SD: Tensor, cache_length: int) -> None:
        super().__init__(block, rows, pos_SD, cache_length, buffers=3)
        attention = block.attention
        assert attention.value.bias is not None, "only relative attention has no biases"
        pos_SD = pos_SD.to(self._inward.dtype)
        places = [attention.query(pos_SD), attention.key(pos_SD), attention.value.bias.expand(len(pos_SD), -1)]
        self._places_S3HE = self._heads(torch.cat(places, -1))
        self._own_keys_BSHE = self.buffers[0]

    def _append(self, x_BTD: Tensor, run: _Run) -> tuple[Tensor, Tensor | None]:
        return self._project(x_BTD, run.rows, run.places), run.mask

    def _project(self, x_BTD: Tensor, rows: slice | Tensor, places: slice | Tensor) -> Tensor:
        own_BT3HE = self._heads(_product(x_BTD, self._inward))
        query, keys, values = (own_BT3HE + self._places_S3HE[places]).unbind(2)
        self._own_keys_BSHE[rows, places] = own_BT3HE[:, :, 1]
        self._keys_BSHE[rows, places] = keys
        self._values_BSHE[rows, places] = values
        return query

    def move_to_front(self, row: int, filled: int, first: int = 0) -> int:
        kept = super().move_to_front(row, filled, first)
        self._keys_BSHE[row, :kept] = self._own_keys_BSHE[row, :kept] + self._places_S3HE[:kept, 1]
        return kept


class _RelativeLayer(_Layer):
    """Its keys do not depend on their places; the bias of a score depends on the query and the distance."""

    @torch.no_grad()
    def __init__(self, block: Block, rows: int, pos_SD: Tensor, cache_length: int) -> None:
        super().__init__(block, rows, pos_SD, cache_length, buffers=2)
        self._attention = cast(RelativeAttention, block.attention)
        self._distances_HES = self._by_head(self._attention.distance(pos_SD.to(self._inward.dtype)))

    def _append(self, x_BTD: Tensor, run: _Run) -> tuple[Tensor, Tensor | None]:
        query = self._project(x_BTD, run.rows, run.places)
        bias_BHTS = self._bias(query, run.distances(x_BTD.device))
        if run.mask is not None:
            bias_BHTS = bias_BHTS.masked_fill(~run.mask, -torch.inf)
        return query + self._attention.content_bias * self._attention.bias_scale, bias_BHTS

    def _project(self, x_BTD: Tensor, rows: slice | Tensor, places: slice | Tensor) -> Tensor:
        query, keys, values = self._heads(_product(x_BTD, self._inward)).unbind(2)
        self._keys_BSHE[rows, places] = keys
        self._values_BSHE[rows, places] = values
        return query

    def _bias(self, query_BTHE: Tensor, distances_BTS: Tensor) -> Tensor:
        table_HES = self._distances_HES[..., : distances_BTS.shape[-1]]
        return self._scored(query_BTHE, self._attention.distance_bias, table_HES, distances_BTS)

    def _scored(self, query_BTHE: Tensor, bias_HE: Tensor, table_HES: Tensor, distances_BTS: Tensor) -> Tensor:
        """Return the scores of queries and distances [B, H, T, S], given the projections of all distances."""
        attention = self._attention
        distant_BHTE = (query_BTHE + bias_HE * attention.bias_scale).transpose(1, 2) * attention.head_size**-0.5
        scores_BHTS: Tensor = distant_BHTE @ table_HES
        return scores_BHTS.gather(-1, distances_BTS[:, None].expand(*scores_BHTS.shape[:-1], -1))

    def _by_head(self, x_SD: Tensor) -> Tensor:
        return x_SD.view(len(x_SD), -1, self._attention.head_size).permute(1, 2, 0).contiguous()


class _CompressiveLayer(_Layer):
    """A layer that also keeps the tokens of memory and segment. It begins with a full memory of zeros."""

    @torch.no_grad()
    def __init__(self, block: Block, rows: int, pos_SD: Tensor, cache_length: int) -> None:
        super().__init__(block, rows, pos_SD, cache_length)  # type: ignore[call-arg]
        assert block.compression is not None
        self._compression = block.compression
        self._slots = block.compression.slots
        self._remembered = self._slots + cache_length
        self._tokens_BSD = self._inward.new_zeros(rows, len(pos_SD), self._inward.shape[1])
        self._project(self._tokens_BSD[:, : self._remembered], slice(0, rows), slice(0, self._remembered))
        self.buffers.insert(0, self._tokens_BSD)

    def _append(self, x_BTD: Tensor, run: _Run) -> tuple[Tensor, Tensor | None]:
        self._tokens_BSD[run.rows, run.places] = x_BTD
        return super()._append(x_BTD, run)  # type: ignore[safe-super]

    def move_to_front(self, row: int, filled: int, first: int = 0) -> int:
        """Compress the tokens that leave the memory, then move those that stay to the places after the slots."""
        assert first == 0
        rows = slice(row, row + 1)
        memory, segment = self._tokens_BSD[rows, :filled].split([self._remembered, filled - self._remembered], 1)
        _, slots_BND = self._compression(memory, segment)
        new_BND = slots_BND[:, max(0, slots_BND.shape[1] - self._slots) :]
        old = self._slots - new_BND.shape[1]
        for buffer in self.buffers:
            buffer[row, :old] = buffer[row, self._slots - old : self._slots].clone()
        self._project(new_BND, rows, slice(old, self._slots))
        return super().move_to_front(row, filled, self._slots)


class _CompressiveInfusedLayer(_CompressiveLayer, _InfusedLayer):
    """Slots have places, as tokens have."""


class _CompressiveRelativeLayer(_CompressiveLayer, _RelativeLayer):
    """Slots have the distances that they would have directly before the segment."""

    @torch.no_grad()
    def __init__(self, block: Block, rows: int, pos_SD: Tensor, cache_length: int) -> None:
        super().__init__(block, rows, pos_SD, cache_length)
        attention = cast(CompressiveRelativeAttention, block.attention)
        self._slot_bias_HE = attention.slot_bias
        near_SD = pos_SD[: len(pos_SD) - cache_length].to(self._inward.dtype)
        self._slot_distances_HES = self._by_head(attention.slot_distance(near_SD))

    def _bias(self, query_BTHE: Tensor, distances_BTS: Tensor) -> Tensor:
        of_slots = distances_BTS[..., : self._slots] - self._cache_length
        slots_BHTC = self._scored(query_BTHE, self._slot_bias_HE, self._slot_distances_HES, of_slots)
        return torch.cat([slots_BHTC, super()._bias(query_BTHE, distances_BTS[..., self._slots :])], -1)


_LAYERS: Mapping[Positions, Callable[[Block, int, Tensor, int], _Layer]] = {
    "infused": _InfusedLayer,
    "relative": _RelativeLayer,
}
_COMPRESSIVE_LAYERS: Mapping[Positions, Callable[[Block, int, Tensor, int], _Layer]] = {
    "infused": _CompressiveInfusedLayer,
    "relative": _CompressiveRelativeLayer,
}


def _mixed(q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, bias: Tensor | None) -> Tensor:
    """Attend to all keys, or to those that the bias leaves. For one token, two products read keys and values a tenth
    faster than torch's fused kernel for CPUs."""
    if bias is None and q_BHTE.shape[2] == 1 and q_BHTE.device.type == "cpu" and q_BHTE.dtype.itemsize >= 4:
        scores_BHTS = q_BHTE * q_BHTE.shape[-1] ** -0.5 @ k_BHSE.transpose(2, 3)
        mixed_BHTE: Tensor = scores_BHTS.softmax(-1) @ v_BHSE
        return mixed_BHTE
    return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, attn_mask=bias)


def _row_parallel(x_BTD: Tensor, layer: RowParallelLinear) -> Tensor:
    return _biased(reduce_from_shards(_product(x_BTD, layer.weight), layer.axis), layer.bias)


def _biased(x_BTD: Tensor, bias: Tensor | None) -> Tensor:
    return x_BTD if bias is None else x_BTD + bias


def _product(x_BTD: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, for one or two tokens computed in two halves of the outputs. On a CPU a matrix-vector product reads
    the weights at a third of the memory bandwidth, a batch of two at all of it."""
    if x_BTD.shape[0] * x_BTD.shape[1] >= _FEW:
        return linear(x_BTD, weight)
    parts = 2 if len(weight) % 2 == 0 else 1
    x_DN = x_BTD.flatten(0, 1).T
    out = torch.bmm(weight.view(parts, -1, len(x_DN)), x_DN.expand(parts, -1, -1))
    return out.flatten(0, 1).T.contiguous().view(*x_BTD.shape[:2], len(weight))
