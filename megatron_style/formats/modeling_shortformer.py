"""Shortformer (Press, Smith & Lewis, ACL 2021) for the transformers library: this file needs that and torch, no more.

A text is read in segments of `segment_length` tokens; each attends to itself and to the last `cache_length` tokens
before it. With `positions: infused`, places enter queries and keys only, so a key is W(x + p) + b = W x + (W p + b): a
token's own part, and the part of its place. Own parts and values are kept. A new token then costs one row through the
model, and when a segment ends, those of its tokens that stay get their new places by an addition.

Shape letters: B rows, R = B, or 1 where all rows are alike, T new tokens, S kept and new ones, P places, D hidden.
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
        vocabulary: dict[str, Any] | None = None,
        dropout: dict[str, float] | None = None,
        segment_length: int = 1,
        cache_length: int = 0,
        **others: Any,
    ) -> None:
        if positions not in ("added", "infused"):
            raise ValueError(f"positions is {positions!r}; this code computes added and infused positions only")
        self.vocab_size, self.layers, self.hidden_size, self.heads = vocab_size, layers, hidden_size, heads
        self.ffn_size, self.positions = ffn_size, positions
        self.vocabulary = vocabulary or {"kind": "tied"}
        self.dropout = {"hidden": 0.0, "attention": 0.0, "activation": 0.0, "softmax": 0.0} | (dropout or {})
        self.segment_length, self.cache_length = segment_length, cache_length
        super().__init__(**others)


@dataclass
class KeptLayer:
    """What one layer keeps of a text."""

    key_parts_PD: Tensor  # what each place adds to a key
    own_keys_BSD: Tensor
    values_BSD: Tensor

    def append(self, own_keys: Tensor, values: Tensor) -> None:
        self.own_keys_BSD = torch.cat([self.own_keys_BSD, own_keys], 1)
        self.values_BSD = torch.cat([self.values_BSD, values], 1)


@dataclass(frozen=True)
class View:
    """How the new tokens of a step stand to those that are kept."""

    places_RS: Tensor  # of kept and new tokens, counted from the first that is seen
    in_segment_RT: Tensor  # places of the new ones, counted from the first of the segment
    mask: Tensor | None  # [R, 1, T, S]: what each new token sees; None: everything


class ShortformerCache(Cache):
    """`past_key_values` of this model. All rows end in the last column, as texts that are padded on the left do, and
    each walks at its own pace: `filled` says how many of the last columns a row still sees, `used` how many of these
    are of the segment it is in. When a segment is over, a row only has to forget; nothing is moved."""

    is_croppable = False

    def __init__(self, config: ShortformerConfig, kept: Sequence[KeptLayer], positions_PD: Tensor, rows: int) -> None:
        super().__init__(layers=[])
        self.segment_length, self.cache_length = config.segment_length, config.cache_length
        self.kept, self.positions_PD = kept, positions_PD
        self.filled, self.used = [0] * rows, [0] * rows
        self.columns = 0  # that the tensors have
        self.fed = 0  # all columns ever, padding included

    def walk(self, padding: Sequence[int], new: int, device: torch.device) -> Iterator[tuple[slice, View]]:
        """Steps inside of which no row's segment ends. `padding`: how many of the new columns precede a row's text."""
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
        """Rows whose segment is full keep its last tokens for the next."""
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
        places, new = columns - (self.columns - filled), columns[-length:, None]
        in_segment = torch.arange(length, device=device) - (length - used)
        # Padding sees itself alone: a row of the softmax with nothing in it would be NaN, and spread.
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
        self.filled, self.used = [self.filled[row] for row in rows], [self.used[row] for row in rows]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.filled)).repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:  # noqa: ARG002
        raise ValueError(
            "tokens cannot be taken back, since what a segment has forgotten is gone: generation that drafts tokens "
            "and rejects some (with an assistant, or by prompt lookup) is not possible with this model"
        )


class Attention(nn.Module):
    def __init__(self, config: ShortformerConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.head_size, self.dropout = D // config.heads, config.dropout["attention"]
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))

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
        self.attention_norm, self.ffn_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(D, config.ffn_size), nn.Linear(config.ffn_size, D)

    def forward(self, x: Tensor, kept: KeptLayer, view: View, place_parts: Tensor) -> Tensor:
        mixed = self.attention(self.attention_norm(x), kept, view, place_parts)
        x = x + F.dropout(mixed, self.rates["hidden"], self.training)
        inner = F.dropout(F.relu(self.up(self.ffn_norm(x))), self.rates["activation"], self.training)
        return x + F.dropout(self.down(inner), self.rates["hidden"], self.training)


class Band(nn.Module):
    """A frequency band of an adaptive vocabulary, with vectors of its own width."""

    def __init__(self, tokens: int, width: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.projection = nn.Parameter(torch.randn(hidden_size, width) * width**-0.5)


class AdaptiveVocabulary(nn.Module):
    """Baevski & Auli's adaptive input and softmax, tied. Its logits are log-probabilities: a tail token's is that of
    its band (a cluster logit beside the first band's) plus its own inside the band."""

    def __init__(self, config: ShortformerConfig) -> None:
        super().__init__()
        D, factor = config.hidden_size, config.vocabulary["factor"]
        self.dropout, self.cutoffs = config.dropout["softmax"], list(config.vocabulary["cutoffs"])
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
    (`bos_token_id`) in front of it. Gradients are exact, so they flow through the cache; those of the paper's training
    stop there."""

    config_class = ShortformerConfig
    base_model_prefix = ""
    accepts_loss_kwargs = False  # or the library's trainer would expect a sum

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
        """`attention_mask` says where padding is: before a text, or behind it. `others` is what the library passes to
        any model, such as positions, which are this model's own business."""
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
        for block, kept in zip(self.blocks, cache.kept, strict=True):
            x = block(x, kept, view, place_parts)
        return x

    def _own_cache(self, past: Cache | None, rows: int) -> ShortformerCache:
        """The library brings an empty cache of its own kind, which knows nothing of segments."""
        if isinstance(past, ShortformerCache):
            return past
        if past is not None and past.get_seq_length():
            raise ValueError(f"past_key_values is a {type(past).__name__}; it must be one that this model gave out")
        config, like = self.config, next(self.parameters())
        positions_PD = sinusoids(config.segment_length + config.cache_length, config.hidden_size).to(like)
        in_keys_PD = torch.zeros_like(positions_PD) if config.positions == "added" else positions_PD
        nothing = like.new_zeros(rows, 0, config.hidden_size)
        kept = [KeptLayer(block.attention.key(in_keys_PD), nothing, nothing) for block in self.blocks]
        return ShortformerCache(config, kept, positions_PD, rows)


def padding_before(mask_BS: Tensor | None, ids_BT: Tensor, *, continued: bool) -> list[int]:
    """How many of the new columns precede each row's text. Padding behind a text does no harm if nothing follows it."""
    if mask_BS is None:
        return [0] * len(ids_BT)
    if mask_BS.dim() != 2:
        raise ValueError(
            f"attention_mask is {list(mask_BS.shape)}; it must be [rows, tokens]. (For its static caches the library "
            "makes another; they are not possible with this model)"
        )
    is_text = mask_BS.bool()
    begun = is_text.cumsum(1) > 0
    ended = begun & ~is_text
    if (ended[:, :-1] & is_text[:, 1:]).any() or (continued and ended.any()):
        raise ValueError("attention_mask has padding inside a text; pad on the left (tokenizer.padding_side) to go on")
    count: list[int] = (~begun[:, -ids_BT.shape[1] :]).sum(1).tolist()
    return count


def refuse(others: dict[str, Any]) -> None:
    for name in ("inputs_embeds", "output_attentions", "output_hidden_states"):
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name}: this model takes token ids and gives logits only")


def full_precision(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits


def sinusoids(positions: int, size: int) -> Tensor:
    """[positions, size], sines in the first half of the features. The first position is 2, as in the paper's code."""
    half = size // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(2, 2 + positions, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
