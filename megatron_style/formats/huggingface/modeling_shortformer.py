"""Shortformer (Press, Smith & Lewis, ACL 2021) for the transformers library: this file needs only that and torch.

A text is read in segments of `segment_length` tokens; each attends to itself and to the last `cache_length` tokens
before it. With `positions: infused`, positions enter queries and keys only, so a key is W(x + p) + b = W x + (W p + b):
a token's own part, and the part of its position, or *place*. Own parts and values are cached. A new token then costs
one row through the model, and when a segment ends, those of its tokens that stay get their new places by an addition.

Shape letters: B rows, R = B, or 1 if all rows are alike, T new tokens, S cached and new ones, P places, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class ShortformerConfig(PretrainedConfig):
    model_type = "shortformer"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "ffn_size",
    }

    def __init__(
        self,
        *,
        vocab_size: int = 8,
        layers: int = 1,
        hidden_size: int = 4,
        heads: int = 1,
        ffn_size: int = 4,
        positions: str = "infused",
        sandwich: int = 0,
        vocabulary: dict[str, Any] | None = None,
        dropout: dict[str, float] | None = None,
        segment_length: int = 1,
        cache_length: int = 0,
        **others: Any,
    ) -> None:
        if positions not in ("added", "infused"):
            raise ValueError(f"positions is {positions!r}; this code computes added and infused positions only")
        self.vocab_size = vocab_size
        self.layers = layers
        self.hidden_size = hidden_size
        self.heads = heads
        self.ffn_size = ffn_size
        self.positions = positions
        self.sandwich = sandwich
        self.vocabulary = vocabulary or {"kind": "tied"}
        self.dropout = {"hidden": 0.0, "attention": 0.0, "activation": 0.0, "softmax": 0.0} | (dropout or {})
        self.segment_length = segment_length
        self.cache_length = cache_length
        super().__init__(**others)


@dataclass
class KeptLayer:
    """The cache of one layer."""

    key_parts_PD: Tensor  # what each place adds to a key
    own_keys_BSD: Tensor
    values_BSD: Tensor

    def append(self, own_keys: Tensor, values: Tensor) -> None:
        self.own_keys_BSD = torch.cat([self.own_keys_BSD, own_keys], 1)
        self.values_BSD = torch.cat([self.values_BSD, values], 1)


@dataclass(frozen=True)
class View:
    """The places of a step's new tokens among the cached ones, and what they see."""

    places_RS: Tensor  # of cached and new tokens, counted from the first that is seen
    in_segment_RT: Tensor  # places of the new tokens, counted from the first of the segment
    mask: Tensor | None  # [R, 1, T, S]: what each new token sees; None: everything


class ShortformerCache(Cache):
    """`past_key_values` of this model. All rows end in the last column, as texts that are padded on the left do, and
    each has segments of its own: `filled` is the number of last columns that a row still sees, `used` the number of
    these that belong to its current segment. At the end of a segment a row only forgets columns; nothing is moved."""

    is_croppable = False

    def __init__(self, config: ShortformerConfig, kept: Sequence[KeptLayer], positions_PD: Tensor, rows: int) -> None:
        super().__init__(layers=[])
        self.segment_length = config.segment_length
        self.cache_length = config.cache_length
        self.kept = kept
        self.positions_PD = positions_PD
        self.filled = [0] * rows
        self.used = [0] * rows
        self.columns = 0  # of the cached tensors
        self.fed = 0  # all columns so far, padding included

    def walk(self, padding: Sequence[int], new: int, device: torch.device) -> Iterator[tuple[slice, View]]:
        """Yield steps inside of which no row's segment ends. `padding` is the number of new columns before each row's
        text."""
        first = 0
        while first < new:
            self._turn_over()
            waiting = [max(0, before - first) for before in padding]
            room = min(wait + self.segment_length - used for wait, used in zip(waiting, self.used, strict=True))
            length = min(new - first, room)
            for row, wait in enumerate(waiting):
                self.filled[row] += max(0, length - wait)
                self.used[row] += max(0, length - wait)
            self.columns += length
            self.fed += length
            yield slice(first, first + length), self._view(length, device)
            first += length

    def _turn_over(self) -> None:
        """Begin a new segment for rows whose segment is full; its last tokens stay cached."""
        for row, used in enumerate(self.used):
            if used == self.segment_length:
                self.filled[row] = min(self.filled[row], self.cache_length)
                self.used[row] = 0
        forgotten = self.columns - max(self.filled)
        for layer in self.kept:
            layer.own_keys_BSD = layer.own_keys_BSD[:, forgotten:]
            layer.values_BSD = layer.values_BSD[:, forgotten:]
        self.columns -= forgotten

    def _view(self, length: int, device: torch.device) -> View:
        alike = len({*zip(self.filled, self.used, strict=True)}) == 1
        counts = [(self.filled[0], self.used[0])] if alike else list(zip(self.filled, self.used, strict=True))
        filled, used = torch.tensor(counts, device=device)[:, :, None].unbind(1)
        columns = torch.arange(self.columns, device=device)
        places = columns - (self.columns - filled)
        new = columns[-length:, None]
        in_segment = torch.arange(length, device=device) - (length - used)
        # Padding sees itself: a softmax over nothing would be NaN, and spread.
        mask = (columns <= new) & (places >= 0)[:, None] | (columns == new)
        everything = alike and length == 1 and self.columns == self.filled[0]
        return View(places.clamp(min=0), in_segment.clamp(min=0), None if everything else mask[:, None])

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return self.fed

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.kept:
            layer.own_keys_BSD = layer.own_keys_BSD[indices]
            layer.values_BSD = layer.values_BSD[indices]
        rows = indices.tolist()
        self.filled = [self.filled[row] for row in rows]
        self.used = [self.used[row] for row in rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.filled)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:  # noqa: ARG002
        raise ValueError(
            "tokens cannot be removed from the cache, since those before them may be gone already; use generation that "
            "does not draft tokens and reject some (no assistant model, no prompt lookup)"
        )


class Attention(nn.Module):
    def __init__(self, config: ShortformerConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_size = D // config.heads
        self.dropout = config.dropout["attention"]
        self.query = nn.Linear(D, D)
        self.key = nn.Linear(D, D)
        self.value = nn.Linear(D, D)
        self.out = nn.Linear(D, D)

    def forward(self, x_BTD: Tensor, kept: KeptLayer, view: View, place_parts_RTD: Tensor) -> Tensor:
        kept.append(F.linear(x_BTD, self.key.weight), self.value(x_BTD))
        mixed_BHTE = F.scaled_dot_product_attention(
            self._heads(self.query(x_BTD + place_parts_RTD)),
            self._heads(kept.own_keys_BSD + kept.key_parts_PD[view.places_RS]),
            self._heads(kept.values_BSD),
            attn_mask=view.mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        out: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, config: ShortformerConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.rates = config.dropout
        self.attention_norm = nn.LayerNorm(D)
        self.ffn_norm = nn.LayerNorm(D)
        self.attention = Attention(config)
        self.up = nn.Linear(D, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, D)

    def attend(self, x: Tensor, kept: KeptLayer, view: View, place_parts: Tensor) -> Tensor:
        mixed = self.attention(self.attention_norm(x), kept, view, place_parts)
        return x + F.dropout(mixed, self.rates["hidden"], self.training)

    def feed(self, x: Tensor) -> Tensor:
        inner = F.dropout(F.relu(self.up(self.ffn_norm(x))), self.rates["activation"], self.training)
        return x + F.dropout(self.down(inner), self.rates["hidden"], self.training)


class Band(nn.Module):
    """A frequency band of an adaptive vocabulary, with vectors of its own width."""

    def __init__(self, tokens: int, width: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.projection = nn.Parameter(torch.randn(hidden_size, width) * width**-0.5)


class AdaptiveVocabulary(nn.Module):
    """Baevski & Auli's adaptive input and softmax, tied. Its logits are log-probabilities: that of a tail token is that
    of its band (a cluster logit next to the first band's logits) plus its own inside the band."""

    def __init__(self, config: ShortformerConfig) -> None:
        super().__init__()
        D = config.hidden_size
        factor = config.vocabulary["factor"]
        self.dropout = config.dropout["softmax"]
        self.cutoffs = list(config.vocabulary["cutoffs"])
        edges = pairwise([0, *self.cutoffs, config.vocab_size])
        bands = nn.ModuleList(Band(last - first, D // factor**i, D) for i, (first, last) in enumerate(edges))
        self.bands = cast("Sequence[Band]", bands)
        self.clusters = nn.Parameter(torch.randn(len(self.cutoffs), D) * D**-0.5)

    def embed(self, ids_BT: Tensor) -> Tensor:
        ids = ids_BT.flatten().contiguous()
        band_of = torch.bucketize(ids, torch.tensor(self.cutoffs, device=ids.device), right=True)
        out_ND = self.clusters.new_zeros(len(ids), self.clusters.shape[1])
        for i, (first, band) in enumerate(zip([0, *self.cutoffs], self.bands, strict=True)):
            (index,) = torch.where(band_of == i)
            out_ND = out_ND.index_copy(0, index, F.linear(band.table(ids[index] - first), band.projection))
        return out_ND.view(*ids_BT.shape, -1)

    def logits(self, x: Tensor) -> Tensor:
        head, *tails = self.bands
        x = F.dropout(x, self.dropout, self.training)
        first = full_precision(torch.cat([F.linear(x, head.table.weight), F.linear(x, self.clusters)], -1))
        words, clusters = first.log_softmax(-1).split([head.table.num_embeddings, len(tails)], -1)
        parts = [words]
        for i, band in enumerate(tails):
            narrow = F.dropout(F.linear(x, band.projection.T), self.dropout, self.training)
            inside = full_precision(F.linear(narrow, band.table.weight)).log_softmax(-1)
            parts.append(clusters[..., i : i + 1] + inside)
        return torch.cat(parts, -1)


class PlainVocabulary(nn.Module):
    """One table for input and output (`tied`), or one for each (`untied`)."""

    def __init__(self, config: ShortformerConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.vocabulary["kind"] == "untied":
            self.output_table = nn.Embedding(config.vocab_size, config.hidden_size)

    def embed(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.table(ids)
        return vectors

    def logits(self, x: Tensor) -> Tensor:
        return full_precision(F.linear(x, getattr(self, "output_table", self.table).weight))


class ShortformerForCausalLM(PreTrainedModel, GenerationMixin):
    """Pre-norm blocks without a final norm. A text begins as if a line had just ended: put the line end
    (`bos_token_id`) in front of it. Gradients are exact, so they flow through the cache; in the paper's training they
    stop there."""

    config_class = ShortformerConfig
    base_model_prefix = ""
    accepts_loss_kwargs = False  # otherwise the library's trainer would expect a sum

    def __init__(self, config: ShortformerConfig) -> None:
        super().__init__(config)
        adaptive = config.vocabulary["kind"] == "adaptive"
        self.vocabulary = AdaptiveVocabulary(config) if adaptive else PlainVocabulary(config)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(config) for _ in range(config.layers)))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute logits and, with `labels`, the loss. `attention_mask` marks padding before or after a text. `others`
        is what the library passes to any model, such as positions, which this model computes itself."""
        refuse(others)
        cache = self._own_cache(past_key_values, rows=len(input_ids))
        padding = padding_before(attention_mask, input_ids, continued=cache.fed > 0)
        steps = cache.walk(padding, input_ids.shape[1], input_ids.device)
        x_BTD = torch.cat([self._features(input_ids[:, columns], cache, view) for columns, view in steps], 1)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.vocabulary.logits(x_BTD[:, kept])
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        keep = not self.training if use_cache is None else use_cache
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if keep else None)
        return output.to_tuple() if return_dict is False else output

    def _features(self, ids_BT: Tensor, cache: ShortformerCache, view: View) -> Tensor:
        x: Tensor = self.vocabulary.embed(ids_BT) * self.config.hidden_size**0.5
        place_parts = x.new_zeros(1)
        if self.config.positions == "added":
            x = x + cache.positions_PD[view.in_segment_RT]
        else:
            place_parts = cache.positions_PD[view.places_RS[:, -ids_BT.shape[1] :]]
        x = F.dropout(x, self.config.dropout["hidden"], self.training)
        layers = self.config.layers
        sandwich = self.config.sandwich  # attention sublayers at the bottom, and as many feed-forward ones at the top
        for i in range(layers + sandwich):
            if i < layers:
                x = self.blocks[i].attend(x, cache.kept[i], view, place_parts)
            if i >= sandwich:
                x = self.blocks[i - sandwich].feed(x)
        return x

    def _own_cache(self, past: Cache | None, rows: int) -> ShortformerCache:
        """Return the cache, or an empty one in place of the library's own, which has no segments."""
        if isinstance(past, ShortformerCache):
            return past
        if past is not None and past.get_seq_length():
            raise ValueError(f"past_key_values is a {type(past).__name__}; it must be one that this model returned")
        config = self.config
        like = next(self.parameters())
        positions_PD = sinusoids(config.segment_length + config.cache_length, config.hidden_size).to(like)
        in_keys_PD = torch.zeros_like(positions_PD) if config.positions == "added" else positions_PD
        nothing = like.new_zeros(rows, 0, config.hidden_size)
        kept = [KeptLayer(block.attention.key(in_keys_PD), nothing, nothing) for block in self.blocks]
        return ShortformerCache(config, kept, positions_PD, rows)


def padding_before(mask_BS: Tensor | None, ids_BT: Tensor, *, continued: bool) -> list[int]:
    """Return the number of new columns before each row's text. Padding after a text is harmless if nothing follows."""
    if mask_BS is None:
        return [0] * len(ids_BT)
    if mask_BS.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {list(mask_BS.shape)}; it must be [rows, tokens]. (The library makes others for "
            "its static caches, which this model does not support)"
        )
    is_text = mask_BS.bool()
    begun = is_text.cumsum(1) > 0
    ended = begun & ~is_text
    if (ended[:, :-1] & is_text[:, 1:]).any() or (continued and ended.any()):
        raise ValueError(
            "attention_mask has padding inside a text; pad on the left (tokenizer.padding_side) to continue a text"
        )
    count: list[int] = (~begun[:, -ids_BT.shape[1] :]).sum(1).tolist()
    return count


def refuse(others: dict[str, Any]) -> None:
    for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name}: this model takes token ids and returns logits only")


def full_precision(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits


def sinusoids(positions: int, size: int) -> Tensor:
    """Return [positions, size], with sines in the first half of the features. The first position is 2, as in the
    paper's code."""
    half = size // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(2, 2 + positions, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
