"""Token embeddings and the loss over tokens, split by token id over the tensor axis.

Shape letters: N tokens of all rows, D hidden, V tokens of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
from megatron_style.model.shape import BandShape, bands
from megatron_style.parallel.collectives import copy_to_shards
from megatron_style.parallel.device.products import in_blocks, linear
from megatron_style.parallel.dropout import replicated_dropout
from megatron_style.parallel.layers import VocabParallelTable
from megatron_style.parallel.loss import sharded_best, sharded_logsumexp, sharded_total_and_pick
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import Layout, layout_of, normal, parameter, xavier, zeros
from megatron_style.parallel.stream import Stream
from megatron_style.parallel.topology import Axis


class Band(nn.Module):
    """A frequency band of an adaptive vocabulary: tokens first..first+V with vectors of their own width."""

    def __init__(self, shape: BandShape, config: ModelConfig, axis: Axis) -> None:
        super().__init__()
        self.first = shape.first
        self.last = shape.last
        self.axis = axis
        width = shape.width
        D = config.hidden_size
        projections = config.vocabulary.projections
        layout = Layout((D, width), draw=xavier(width, D))
        self.table = VocabParallelTable(
            shape.tokens, width, axis=axis, weight=normal(width**-0.5), biases=config.vocabulary.biases
        )
        self.projection = None if projections == "none" else parameter(layout, axis)
        is_head = shape.first == 0
        self.output_projection = parameter(layout, axis) if projections == "both" and is_head else None
        self._scores_by_its_own = is_head  # a tail's projection serves both sides

    def widened(self, rows: Tensor) -> Tensor:
        """Return token vectors in the hidden size."""
        if self.projection is None:
            return rows
        # Each rank projects its own tokens only, so the projection's gradient is a sum over the ranks.
        return linear(rows, copy_to_shards(self.projection, self.axis))

    def narrowed(self, x_ND: Tensor) -> Tensor:
        """Return hidden vectors in the width in which this band scores them."""
        projection = self.output_projection if self._scores_by_its_own else self.projection
        return x_ND if projection is None else linear(x_ND, projection.T)

    def holds(self, ids: Tensor) -> Tensor:
        """Return the indices of the ids that belong to this band."""
        return torch.where((ids >= self.first) & (ids < self.last))[0]


class AdaptiveVocabulary(nn.Module):
    """Baevski & Auli's adaptive input and softmax, with tables and tail projections tied.

    The head's projection belongs to the input side only; Transformer-XL has another for the output. A tail token's
    probability is that of its band (a cluster logit next to the head's logits) times its probability inside the band.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, axis: Axis) -> None:
        super().__init__()
        D = config.hidden_size
        self.axis = axis
        self.hidden_size = D
        self.dropout = config.dropout.softmax
        self.bands = cast("Sequence[Band]", nn.ModuleList(Band(b, config, axis) for b in bands(config, vocab_size)))
        tails = len(self.bands) - 1
        self.clusters = parameter(Layout((tails, D), draw=xavier(D, tails)), axis)
        biases = config.vocabulary.biases
        self.cluster_biases = parameter(Layout((tails,), draw=zeros), axis) if biases else None

    def embed(self, ids: Tensor, stream: Stream) -> Tensor:
        flat = ids.reshape(-1)
        out_ND = self.clusters.new_zeros(flat.numel(), self.hidden_size)
        for band in self.bands:
            index, rows = band.table.owned_rows(flat - band.first)
            out_ND.index_copy_(0, index, band.widened(rows)[: len(index)])
        return stream.leave(out_ND.view(*ids.shape, self.hidden_size))

    def nll(self, x_ND: Tensor, targets_N: Tensor, noise: Noise | None) -> Tensor:
        """Return the negative log-likelihood of each target, without a matrix of tokens x full vocabulary. Targets on
        the host are sorted into bands there, so that nothing waits for the device."""
        head, *tails = self.bands
        x_ND = replicated_dropout(x_ND, self.dropout, noise)
        narrow = head.narrowed(x_ND)
        clusters = _full_precision(self._cluster_logits(narrow))
        words_total, picked = _total_and_pick(narrow, targets_N, head.table)  # zero is picked for a tail token
        nll_N = torch.logaddexp(words_total, clusters.logsumexp(-1)) - picked
        for i, band in enumerate(tails):
            index = band.holds(targets_N)
            inside_targets = in_blocks(targets_N[index] - band.first, x_ND)
            index = index.to(x_ND.device, non_blocking=True)
            narrow = band.narrowed(x_ND.index_select(0, in_blocks(index, x_ND)))
            narrow = replicated_dropout(narrow, self.dropout, noise and noise.at(i))
            inside = _table_nll(narrow, inside_targets, band.table)[: len(index)]
            nll_N = nll_N.index_add(0, index, inside - clusters[:, i].index_select(0, index))
        return nll_N

    def likeliest(self, x_ND: Tensor) -> Tensor:
        """Return the most probable token after each row, on any number of tensor ranks."""
        head, *tails = self.bands
        narrow = head.narrowed(x_ND)
        clusters = _full_precision(self._cluster_logits(narrow))
        best = [_best_owned(_full_precision(head.table.logits(narrow)), head.table)]
        for i, band in enumerate(tails):
            inside = _full_precision(band.table.logits(band.narrowed(x_ND)))
            score, index = _best_owned(inside, band.table)
            # On the scale of band 0's logits: the band's own logit plus the token's log-probability inside the band.
            best.append((clusters[:, i] + score - sharded_logsumexp(inside, self.axis), band.first + index))
        scores, ids = (torch.stack(part, -1) for part in zip(*best, strict=True))
        return sharded_best(scores, ids, self.axis)

    def log_probs(self, x_ND: Tensor) -> Tensor:
        """Return the full distribution [N, V], the same on all tensor ranks."""
        words, clusters = self.head_log_probs(x_ND)
        tails = [clusters[:, i : i + 1] + self.tail_log_probs(i, x_ND) for i in range(clusters.shape[1])]
        return torch.cat([words, *tails], -1)

    @property
    def tail_starts(self) -> list[int]:
        """Return the first token of each tail band."""
        return [band.first for band in self.bands[1:]]

    def head_log_probs(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of band 0's tokens, and of each tail band as one event."""
        narrow = self.bands[0].narrowed(x_ND)
        logits = torch.cat([self.bands[0].table.all_logits(narrow), self._cluster_logits(narrow)], -1)
        words, clusters = _full_precision(logits).log_softmax(-1).split([self.bands[0].last, len(self.clusters)], -1)
        return words, clusters

    def tail_log_probs(self, tail: int, x: Tensor) -> Tensor:
        """Return the log-probabilities of a tail band's tokens, given the band."""
        band = self.bands[tail + 1]
        return _full_precision(band.table.all_logits(band.narrowed(x))).log_softmax(-1)

    def _cluster_logits(self, narrow_ND: Tensor) -> Tensor:
        """Return the logits of the tail bands."""
        return linear(narrow_ND, self.clusters, self.cluster_biases)


class PlainVocabulary(nn.Module):
    """One table for input and output (`tied`), or one for each (`untied`)."""

    def __init__(self, config: ModelConfig, vocab_size: int, axis: Axis) -> None:
        super().__init__()
        D = config.hidden_size
        self.axis = axis
        self.hidden_size = D
        biases = config.vocabulary.biases
        untied = config.vocabulary.kind == "untied"
        draw = normal(D**-0.5)
        self.table = VocabParallelTable(vocab_size, D, axis=axis, weight=draw, biases=biases and not untied)
        if untied:
            self.output_table = VocabParallelTable(vocab_size, D, axis=axis, weight=draw, biases=biases)
        else:
            self.output_table = self.table

    def embed(self, ids: Tensor, stream: Stream) -> Tensor:
        index, rows = self.table.owned_rows(ids.reshape(-1))
        out_ND = rows.new_zeros(ids.numel(), self.hidden_size)
        out_ND.index_copy_(0, index, rows[: len(index)])
        return stream.leave(out_ND.view(*ids.shape, self.hidden_size))

    def nll(self, x_ND: Tensor, targets_N: Tensor, noise: Noise | None) -> Tensor:
        del noise  # the reference has no dropout here
        return _table_nll(x_ND, targets_N, self.output_table)

    def likeliest(self, x_ND: Tensor) -> Tensor:
        """Return the most probable token after each row, on any number of tensor ranks."""
        score, ids = _best_owned(_full_precision(self.output_table.logits(x_ND)), self.output_table)
        return sharded_best(score[:, None], ids[:, None], self.axis)

    def log_probs(self, x_ND: Tensor) -> Tensor:
        """Return the full distribution [N, V], the same on all tensor ranks."""
        return _full_precision(self.output_table.all_logits(x_ND)).log_softmax(-1)

    tail_starts = ()

    def head_log_probs(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of all tokens: all belong to the head, and there are no tail bands."""
        return self.log_probs(x_ND), x_ND.new_empty(len(x_ND), 0)

    def tail_log_probs(self, tail: int, x: Tensor) -> Tensor:
        raise AssertionError(f"there is no tail {tail} for {x.shape}")


def make_vocabulary(config: ModelConfig, vocab_size: int, axis: Axis) -> AdaptiveVocabulary | PlainVocabulary:
    kind = AdaptiveVocabulary if config.vocabulary.kind == "adaptive" else PlainVocabulary
    return kind(config, vocab_size, axis)


def _table_nll(x: Tensor, targets: Tensor, table: VocabParallelTable) -> Tensor:
    total, picked = _total_and_pick(x, targets, table)
    return total - picked


def _total_and_pick(x: Tensor, targets: Tensor, table: VocabParallelTable) -> tuple[Tensor, Tensor]:
    targets = targets.to(x.device, non_blocking=True)
    owned = layout_of(table.weight).owned(table.axis)
    return sharded_total_and_pick(table.logits(x), targets, owned, table.axis)


def _best_owned(logits: Tensor, table: VocabParallelTable) -> tuple[Tensor, Tensor]:
    """Return the highest logit among this rank's columns, and its index in the unsharded table."""
    owned = layout_of(table.weight).owned(table.axis)
    if len(owned) == 0:  # some ranks hold no row of a small band
        score = logits.new_full((len(logits),), -torch.inf)
        return score, torch.full_like(score, table.tokens - 1, dtype=torch.long)
    score, column = logits.max(-1)
    return score, owned.start + column


def _full_precision(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits
