"""The parts of a model, each with its costs: attention, feed-forward and vocabulary.

`memory`, `traffic` and `timing` add them up. A kind of attention or vocabulary is a class, and a row in a table below.
Symbols: D hidden size, L segment length, C the length of the memory before it, S their sum, e bytes per weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_style.config.model import CompressionConfig, ModelConfig, RoutingConfig
from megatron_style.planning.setup import Setup
from megatron_style.schedule.stages import Stage

PASSES = 3  # for each product of forward, backward computes two: the gradients of the input and of the weight
_FLOAT, _LONG = 4, 8  # bytes


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on one rank."""

    setup: Setup
    stage: Stage

    @property
    def model(self) -> ModelConfig:
        return self.setup.model

    @property
    def element_bytes(self) -> int:
        return self.setup.sharding.element_bytes

    @property
    def tokens(self) -> int:
        return self.stage.micro_rows * self.stage.segment_length

    @property
    def keys(self) -> int:
        """Return the number of tokens attended to: the memory's and the segment's."""
        return self.stage.micro_rows * (self.stage.segment_length + self.remembered)

    @property
    def slots(self) -> int:
        """Return the compressed slots of the memory."""
        return 0 if self.model.memory is None else self.model.memory.compressed

    @property
    def remembered(self) -> int:
        """Return the length of the memory: its cached tokens and its compressed slots."""
        return self.stage.cache_length + self.slots

    @property
    def vector_bytes(self) -> int:
        return self.model.hidden_size * self.element_bytes

    @property
    def stream(self) -> int:
        """Return the bytes of the vectors between two blocks."""
        return self.tokens * self.vector_bytes

    def mask_bytes(self, masked: int) -> int:
        """Return the bytes per element of a mask that torch's own dropout keeps."""
        return 1 if self.setup.kernels.byte_masks else masked


@dataclass(frozen=True)
class Sent:
    """The partial sums that a rank reduces over the tensor axis in one micro-batch."""

    messages: int
    vectors: int  # of the hidden size
    other: float = 0.0  # bytes of everything else


@dataclass(frozen=True)
class Attention:
    """The attention half of one block: norm, attention, dropout. Positions are added to the embeddings."""

    batch: MicroBatch

    def products(self, *, causal_once: bool) -> float:
        """Return the multiplications per token of a forward pass; with `causal_once`, without the masked ones."""
        D = self.batch.model.hidden_size
        L = self.batch.stage.segment_length
        C = self.batch.remembered
        attended = C + (L + 1) / 2 if causal_once else L + C
        # Keys and values of cached tokens are projected again, with the current weights; no gradient flows into the
        # cache, which saves one product.
        projections = D * D * (4 + 2 * C / L * (PASSES - 1) / PASSES)
        return projections + 2 * attended * D

    @property
    def is_fused(self) -> bool:
        """True if the kernel keeps no scores, and does not compute those that are masked."""
        return self.batch.setup.kernels.fused_attention

    @property
    def kept(self) -> float:
        """Return the bytes of the tensors that autograd keeps."""
        batch = self.batch
        vectors = batch.tokens  # the block's input
        vectors += 0 if self._next_cache_is_the_input else batch.tokens  # the same after its norm
        vectors += self._placed_vectors
        vectors += batch.tokens if batch.model.dropout.hidden else 0  # a mask
        norm = 2 * batch.tokens * _FLOAT
        return vectors * batch.vector_bytes + norm + self._kept_by_kernel

    @property
    def needed(self) -> float:
        """Return 0: the gradients of this half are smaller than those of the feed-forward half."""
        return 0.0

    @property
    def held_for_cache(self) -> float:
        """Return the bytes of a recomputed block's normed input, which is held until the next cache is made of it."""
        if not self.batch.setup.recompute or self._next_cache_is_the_input:
            return 0.0
        return float(self.batch.stream)

    @property
    def caches(self) -> int:
        """Return the bytes of the last segment's cache and of the next one's, of all rows."""
        return 2 * self.batch.stage.rows * self.batch.remembered * self.batch.vector_bytes

    @property
    def position_table(self) -> int:
        """Return the bytes of the table of positions, which all blocks share."""
        length = self.batch.stage.segment_length + self.batch.remembered
        return length * self.batch.model.hidden_size * _FLOAT

    @property
    def sent(self) -> Sent:
        """Return one sum after the output projection and one gradient before the input projections; the cache has
        none. A recomputed block repeats the first."""
        times = 3 if self.batch.setup.recompute else 2
        return Sent(messages=times, vectors=times * self.batch.tokens)

    @property
    def _placed_vectors(self) -> int:
        """Return the number of vectors with positions that are kept in addition to those without."""
        return 0

    @property
    def _next_cache_is_the_input(self) -> bool:
        """True if the next cache holds the normed input of the block, which then costs nothing."""
        return self.batch.stage.cache_length == self.batch.stage.segment_length

    @property
    def _kept_by_kernel(self) -> float:
        batch = self.batch
        D = batch.model.hidden_size / batch.setup.tensor
        queries = batch.tokens * batch.model.heads / batch.setup.tensor
        inputs = (batch.tokens + 2 * batch.keys) * D
        mixed = batch.tokens * D * batch.element_bytes
        if self.is_fused:
            return inputs * batch.element_bytes + mixed + queries * _FLOAT  # one sum per query
        # torch's plain kernel computes in full precision.
        dropped = _FLOAT + batch.mask_bytes(_FLOAT) if batch.model.dropout.attention else 0
        S = batch.stage.segment_length + batch.remembered
        return inputs * _FLOAT + mixed + queries * S * (_FLOAT + dropped)


@dataclass(frozen=True)
class InfusedAttention(Attention):
    """Positions are added to the inputs of queries and keys, in every block."""

    @property
    def _placed_vectors(self) -> int:
        return self.batch.keys


@dataclass(frozen=True)
class RelativeAttention(Attention):
    """Scores have a second part, of queries and projected distances, which no fused kernel computes."""

    def products(self, *, causal_once: bool) -> float:
        L = self.batch.stage.segment_length
        C = self.batch.stage.cache_length
        attended = C + (L + 1) / 2 if causal_once else L + C
        return super().products(causal_once=causal_once) + self._by_distance(L + C, attended)

    def _by_distance(self, distances: int, attended: float) -> float:
        """Return the products of projecting distances, and of scoring queries by those of what they attend to."""
        stage = self.batch.stage
        D = self.batch.model.hidden_size
        # All rows share the projected distances; no gradient flows to the sinusoids, which saves one product.
        projected = distances / (stage.micro_rows * stage.segment_length) * D * D * (PASSES - 1) / PASSES
        return projected + attended * D

    @property
    def is_fused(self) -> bool:
        return False

    @property
    def needed(self) -> float:
        """Return the bytes of the gradients of weights, scores and bias, and of the bias by distance, twice."""
        batch = self.batch
        S = batch.stage.segment_length + batch.remembered
        return 5 * batch.tokens * S * batch.model.heads / batch.setup.tensor * _FLOAT

    @property
    def _kept_by_kernel(self) -> float:
        """Return in addition the queries that distances are scored with, and the projected distances."""
        batch = self.batch
        S = batch.stage.segment_length + batch.stage.cache_length
        vectors = (batch.tokens + S) * batch.model.hidden_size / batch.setup.tensor
        return super()._kept_by_kernel + vectors * batch.element_bytes


@dataclass(frozen=True)
class _Compressive(Attention):
    """Tokens that leave the cache are compressed. A convolution is trained by a loss that compares attention to them
    with attention to their slots."""

    def products(self, *, causal_once: bool) -> float:
        memory = self._memory
        base = super().products(causal_once=causal_once)
        if memory.function != "convolution":
            return base
        D = self.batch.model.hidden_size
        L = self.batch.stage.segment_length
        # The tokens that leave have no gradient: attention to them is computed once, and the convolution has one
        # gradient. Keys and values of slots have one too, as their weights learn nothing here.
        once = self._projected_again * D * D + 2 * L * D
        twice = D * D + 2 * D * D / memory.rate
        return base + (once + 2 * twice) / PASSES + 2 * L / memory.rate * D

    @property
    def kept(self) -> float:
        """Return in addition the inputs of the convolution, and for its loss the queries, the keys and values of slots,
        attention to them, and the difference."""
        if self._memory.function != "convolution":
            return super().kept
        D = self.batch.model.hidden_size / self.batch.setup.tensor
        vectors = (3 + 2 / self._memory.rate) * self.batch.tokens
        sums = self.batch.tokens * self.batch.model.heads / self.batch.setup.tensor
        difference = self.batch.tokens * D * _FLOAT
        return super().kept + vectors * D * self.batch.element_bytes + difference + sums * _FLOAT

    @property
    def sent(self) -> Sent:
        """Return in addition the slots, their gradients and the loss. A recomputed block repeats slots and loss."""
        base = super().sent
        if self._memory.function != "convolution":
            return base
        times = 2 if self.batch.setup.recompute else 1
        vectors = (times + 1) * self.batch.tokens // self._memory.rate
        return Sent(base.messages + 2 * times + 1, base.vectors + vectors, base.other + times * _FLOAT)

    @property
    def _projected_again(self) -> int:
        """Return the projections of each token for the loss, in addition to those of attention."""
        return 0

    @property
    def _memory(self) -> CompressionConfig:
        assert self.batch.model.memory is not None
        return self.batch.model.memory

    @property
    def _next_cache_is_the_input(self) -> bool:
        return False


@dataclass(frozen=True)
class CompressiveInfusedAttention(_Compressive, InfusedAttention):
    """Compressed slots have positions, as tokens have. The loss needs queries and keys without them."""

    @property
    def _projected_again(self) -> int:
        return 2


@dataclass(frozen=True)
class CompressiveRelativeAttention(_Compressive, RelativeAttention):
    """Compressed slots have distances of their own."""

    def products(self, *, causal_once: bool) -> float:
        C = self.batch.slots
        distances = C + self.batch.stage.segment_length
        return super().products(causal_once=causal_once) + self._by_distance(distances, C if causal_once else distances)


@dataclass(frozen=True)
class _Spans:
    """Attention in blocks of tokens, each to itself and, if there are several, to the block before."""

    tokens: int  # of a row
    block: int

    @property
    def rows(self) -> int:
        """Return the number of queries, with those that pad the last block."""
        return -(-self.tokens // self._size) * self._size

    @property
    def times(self) -> int:
        """Return how many blocks read a key."""
        return 2 if self.rows > self._size else 1

    @property
    def keys(self) -> int:
        """Return the number of keys of each query."""
        return self._size * self.times

    @property
    def scores(self) -> float:
        """Return the number of scores that are computed per token."""
        return self.rows * self.keys / self.tokens

    @property
    def _size(self) -> int:
        return min(self.block, self.tokens)


@dataclass(frozen=True)
class RoutedAttention(Attention):
    """Local and routing heads. Costs are the mean over the layers, the first of which may have local heads only."""

    def products(self, *, causal_once: bool) -> float:
        routing = self._routing
        D = self.batch.model.hidden_size
        routed = D * self._routed_share
        local = D - routed
        # Scores of tokens and centroids, and the tally, which are not differentiated. The tally has a feature more.
        E = D // self.batch.model.heads
        clusters = routed * routing.clusters * (1 + (E + 1) / E) / PASSES
        attended = 2 * (local * self._local_scores(causal_once) + routed * self._routed_scores(causal_once))
        return D * (4 * local + 3 * routed) + clusters + attended

    @property
    def is_fused(self) -> bool:
        return False

    @property
    def _routing(self) -> RoutingConfig:
        assert self.batch.model.routing is not None
        return self.batch.model.routing

    @property
    def _routed_share(self) -> float:
        """Return the share of routing heads among the heads of all layers."""
        model = self.batch.model
        return self._routing.heads / model.heads * (1 - self._routing.first_layer / model.layers)

    @property
    def _local(self) -> _Spans:
        return _Spans(self.batch.stage.segment_length, self._routing.local)

    @property
    def _routed(self) -> _Spans:
        return _Spans(self.batch.stage.segment_length, self._routing.window)

    def _local_scores(self, causal_once: bool) -> float:
        L = self.batch.stage.segment_length
        b = self._routing.local
        seen = sum(place % b + 1 + (b if place >= b else 0) for place in range(L))
        return seen / L if causal_once else self._local.scores

    def _routed_scores(self, causal_once: bool) -> float:
        """Return the scores per token; those that a token may see are counted for clusters of equal size."""
        L = self.batch.stage.segment_length
        seen = sum(min(self._routing.window, place // self._routing.clusters + 1) for place in range(L))
        return seen / L if causal_once else self._routed.scores

    @property
    def _kept_by_kernel(self) -> float:
        batch = self.batch
        heads = batch.model.heads / batch.setup.tensor
        routed = heads * self._routed_share
        E = batch.model.hidden_size // batch.model.heads
        # Routing heads also keep the input of their norm, its two numbers, the distance to the centroid and two orders.
        apart = batch.tokens * (2 * E * batch.element_bytes + 2 * _FLOAT + 2 * _LONG)
        of_local = self._kept_by_head(self._local, masks=0)
        return (heads - routed) * of_local + routed * (self._kept_by_head(self._routed, masks=1) + apart)

    def _kept_by_head(self, spans: _Spans, *, masks: int) -> float:
        """Return the bytes that a head keeps: queries, keys and values, each as often as a block is read, and the
        mixture in blocks and in rows. `masks` counts those that are its own."""
        batch = self.batch
        E = batch.model.hidden_size // batch.model.heads
        rows = batch.stage.micro_rows * spans.rows
        inputs = rows * E * (1 + 2 * spans.times)
        mixed = 2 * rows * E * batch.element_bytes
        if batch.setup.kernels.fused_attention:
            return (inputs + masks * rows * spans.keys) * batch.element_bytes + mixed + rows * _FLOAT
        dropped = _FLOAT + batch.mask_bytes(_FLOAT) if batch.model.dropout.attention else 0
        return inputs * _FLOAT + mixed + rows * spans.keys * (_FLOAT + dropped)


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward half of one block: norm, two matrices, dropout."""

    batch: MicroBatch

    def products(self) -> float:
        return 2 * self.batch.model.hidden_size * self.batch.model.ffn_size

    @property
    def kept(self) -> float:
        batch = self.batch
        vectors = 2 * batch.tokens  # its input, before and after the norm
        vectors += batch.tokens if batch.model.dropout.hidden else 0  # a mask
        norm = 2 * batch.tokens * _FLOAT
        inner = batch.element_bytes
        if batch.model.dropout.activation:
            inner = 2 * batch.element_bytes + batch.mask_bytes(batch.element_bytes)  # before, after, and the mask
        return vectors * batch.vector_bytes + norm + batch.tokens * self._inner_size * inner

    @property
    def needed(self) -> float:
        """Return the bytes of the gradients that are alive at once in its backward pass."""
        inner = 1 if self.batch.model.dropout.activation else 2  # a dropped copy is gone when the second one is made
        wide = inner * self._inner_size
        return self.batch.tokens * (wide + self.batch.model.hidden_size) * self.batch.element_bytes

    @property
    def sent(self) -> Sent:
        """Return one sum after the second matrix, which recompute does not need, and one gradient before the first."""
        return Sent(messages=2, vectors=2 * self.batch.tokens)

    @property
    def _inner_size(self) -> float:
        return self.batch.model.ffn_size / self.batch.setup.tensor


@dataclass(frozen=True)
class Vocabulary:
    """Embedding and loss, with one band of full width."""

    batch: MicroBatch

    def products(self) -> float:
        (band,) = self.batch.setup.bands
        return float(self.batch.model.hidden_size * band.tokens)

    @property
    def kept_by_embedding(self) -> float:
        batch = self.batch
        # The vectors this rank has looked up, and the mask.
        held = 1 / batch.setup.tensor + bool(batch.model.dropout.hidden)
        elements = batch.tokens * batch.model.hidden_size * held + self._narrow_elements
        return elements * batch.element_bytes + 4 * batch.tokens * _LONG  # where each token is, here and in the loss

    @property
    def kept(self) -> float:
        return self.kept_by_embedding + self._scored + sum(self._kept_by_bands)

    @property
    def needed(self) -> float:
        """Return the peak bytes of the loss, where bands are scored one after another."""
        per_score = self.batch.setup.kernels.bytes_needed_per_score
        per_score += self.batch.element_bytes % _FLOAT  # a copy in half precision
        kept = self._kept_by_bands
        return self._scored + max(sum(kept[: i + 1]) + n * per_score for i, n in enumerate(self._scores))

    @property
    def sent(self) -> Sent:
        """Return the vectors after the embedding, the gradient of the scored ones, and three numbers per token: the
        largest logit, the sum of exponentials and the target's logit."""
        tokens = self.batch.tokens
        return Sent(messages=1 + 4, vectors=2 * tokens, other=3.0 * tokens * _FLOAT)

    @property
    def _narrow_elements(self) -> float:
        """Return the number of elements that are looked up and then projected to the hidden size."""
        return 0.0

    @property
    def _drops(self) -> bool:
        """True if the inputs of the loss are dropped out."""
        return False

    @property
    def _scored(self) -> int:
        """Return the bytes of the vectors that are scored, and of their mask."""
        return self.batch.stream * (1 + self._drops)

    @property
    def _scores(self) -> tuple[float, ...]:
        """Return the number of logits of each band: the head has one per token, a tail for its own tokens only."""
        setup = self.batch.setup
        tokens = self.batch.tokens
        head, *tails = setup.bands
        of_head = tokens * (head.tokens / setup.tensor + len(tails))
        shares = zip(tails, setup.band_shares[1:], strict=True)
        return of_head, *(tokens * share * band.tokens / setup.tensor for band, share in shares)

    @property
    def _kept_by_bands(self) -> tuple[float, ...]:
        return tuple(scores * self.batch.setup.kernels.bytes_kept_per_score for scores in self._scores)


@dataclass(frozen=True)
class AdaptiveVocabulary(Vocabulary):
    """Several bands, of which the tails are narrow: projected on input and output, scored for their own tokens only."""

    def products(self) -> float:
        D = self.batch.model.hidden_size
        shares = self.batch.setup.band_shares
        head, *tails = self.batch.setup.bands
        products = float(D * (head.tokens + len(tails)))
        for band, share in zip(tails, shares[1:], strict=True):
            products += share * band.width * band.tokens
        projections = self.batch.model.vocabulary.projections
        if projections != "none":  # every band on input, and the tails on output
            products += shares[0] * D * head.width
            products += sum(2 * share * band.width * D for band, share in zip(tails, shares[1:], strict=True))
        if projections == "both":
            products += D * head.width
        return products

    @property
    def sent(self) -> Sent:
        """Return in addition the gradients of the projections and those of each tail's narrow inputs."""
        setup = self.batch.setup
        tokens = self.batch.tokens
        D = setup.model.hidden_size
        e = self.batch.element_bytes
        other = 3.0 * tokens * _FLOAT + sum(D * band.width for band in setup.bands) * e
        for band, share in zip(setup.bands[1:], setup.band_shares[1:], strict=True):
            other += tokens * share * (3 * _FLOAT + band.width * e)
        return Sent(messages=1 + (4 + 1) * len(setup.bands), vectors=2 * tokens, other=other)

    @property
    def _narrow_elements(self) -> float:
        setup = self.batch.setup
        shares = zip(setup.bands, setup.band_shares, strict=True)
        return sum(self.batch.tokens * share / setup.tensor * band.width for band, share in shares)

    @property
    def _drops(self) -> bool:
        return self.batch.model.dropout.softmax > 0

    @property
    def _kept_by_bands(self) -> tuple[float, ...]:
        setup = self.batch.setup
        head, *tails = super()._kept_by_bands
        kept = [head]
        for band, share, scores in zip(setup.bands[1:], setup.band_shares[1:], tails, strict=True):
            inputs = setup.model.hidden_size + band.width * (1 + self._drops)
            kept.append(self.batch.tokens * share * inputs * self.batch.element_bytes + scores)
        return tuple(kept)


_ATTENTIONS: Mapping[str, type[Attention]] = {
    "added": Attention,
    "infused": InfusedAttention,
    "relative": RelativeAttention,
}
_COMPRESSIVE_ATTENTIONS: Mapping[str, type[Attention]] = {
    "infused": CompressiveInfusedAttention,
    "relative": CompressiveRelativeAttention,
}
_VOCABULARIES: Mapping[str, type[Vocabulary]] = {
    "adaptive": AdaptiveVocabulary,
    "tied": Vocabulary,
    "untied": Vocabulary,
}


@dataclass(frozen=True)
class Parts:
    """The two halves of one of `layers` equal blocks, and the vocabulary."""

    layers: int
    attention: Attention
    feed_forward: FeedForward
    vocabulary: Vocabulary

    def products(self, *, causal_once: bool) -> float:
        block = self.attention.products(causal_once=causal_once) + self.feed_forward.products()
        return self.layers * block + self.vocabulary.products()


def parts_of(setup: Setup, stage: Stage) -> Parts:
    batch = MicroBatch(setup, stage)
    attentions = _ATTENTIONS if setup.model.memory is None else _COMPRESSIVE_ATTENTIONS
    return Parts(
        layers=setup.model.layers,
        attention=RoutedAttention(batch) if setup.model.routing else attentions[setup.model.positions](batch),
        feed_forward=FeedForward(batch),
        vocabulary=_VOCABULARIES[setup.model.vocabulary.kind](batch),
    )
