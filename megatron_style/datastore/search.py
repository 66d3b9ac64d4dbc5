"""Exact search for the nearest keys, in bounded memory, by any number of ranks with the same result.

Squared distances are computed in float32, block by block, as |q|^2 - 2 q.k + |k|^2. That is fast and inexact, so it
only rules keys out: the distance of each key that could be among the nearest is computed again in float64. These
distances alone decide, and each depends on its query and its key only: neither blocks nor ranks change a bit.

Shape letters: Q queries, B keys of a block, D hidden, k neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.parallel.topology import Axis

DAMAGED = -np.inf  # the distance of a key that is not finite: it comes first, so that every rank sees it
_ELEMENTS = 2**22  # of the largest array that one step needs
_IN_CACHE = 2**17  # float64 numbers that a core's cache holds
_MOST_QUERIES = 512  # at once: each reads all keys once
_UNIT = 2.0**-24  # the relative rounding error of float32
_TINY = 2.0**-125  # and what its products can lose below the normal numbers


class Neighbours(NamedTuple):
    """The nearest keys of each query, from near to far; of equal distances the lower row comes first."""

    distances_Qk: Tensor  # squared, in float64; inf where fewer than k keys were found
    rows_Qk: Tensor  # of the datastore; -1 where fewer were found

    @classmethod
    def none(cls, queries: int, k: int) -> Neighbours:
        return cls(torch.full((queries, k), torch.inf, dtype=torch.float64), torch.full((queries, k), -1))

    def nearest(self, others: Neighbours) -> Neighbours:
        """Return the nearest of both, as many as `self` has. All rows of `others` must come after those of `self`:
        only then does a stable sort put the lower of two rows with equal distances first."""
        distances, order = torch.cat([self.distances_Qk, others.distances_Qk], 1).sort(stable=True)
        k = self.rows_Qk.shape[1]
        rows = torch.cat([self.rows_Qk, others.rows_Qk], 1).gather(1, order[:, :k])
        return Neighbours(distances[:, :k].contiguous(), rows)

    def sorted(self) -> Neighbours:
        by_row = self.rows_Qk.argsort()
        distances, order = self.distances_Qk.gather(1, by_row).sort(stable=True)
        return Neighbours(distances, self.rows_Qk.gather(1, by_row).gather(1, order))


def queries_at_once(k: int) -> int:
    """Return the number of queries whose neighbours fit into the memory of a step."""
    return max(1, min(_MOST_QUERIES, _ELEMENTS // (8 * k)))


def nearest(keys: NDArray[Any], queries_QD: Tensor, k: int, axis: Axis = Axis()) -> Neighbours:  # noqa: B008  frozen
    """Return the k nearest of all keys to each query. Each rank searches a stretch of the rows; all get the result."""
    edges = [len(keys) * rank // axis.size for rank in range(axis.size + 1)]
    own = range(edges[axis.rank], edges[axis.rank + 1])
    best = Neighbours.none(len(queries_QD), k)
    step = max(1, _ELEMENTS // max(queries_QD.shape))
    for first in range(own.start, own.stop, step):
        block = keys[first : min(first + step, own.stop)]
        best = best.nearest(_candidates(block, first, queries_QD, best))
    parts = zip(*(axis.gather(part.to(queries_QD.device)) for part in best), strict=True)
    merged = Neighbours.none(len(queries_QD), k)
    for distances, rows in parts:
        merged = merged.nearest(Neighbours(distances.cpu(), rows.cpu()))
    return merged


def squared_distances(keys: NDArray[Any], rows_N: Tensor, queries_QD: Tensor, query_N: Tensor) -> Tensor:
    """Return the distance of each pair of a row and the index of a query. It is computed in float64 on the CPU, and has
    the same bits in every call."""
    queries = queries_QD.cpu().double().numpy()
    out_N = np.empty(len(rows_N))
    for part in np.array_split(np.arange(len(rows_N)), 1 + len(rows_N) * keys.shape[1] // _IN_CACHE):
        differences = keys[rows_N[part].numpy()] - queries[query_N[part].numpy()]
        out_N[part] = np.square(differences, out=differences).sum(1)  # torch would divide a long row among threads
    out_N[~np.isfinite(out_N)] = DAMAGED
    return torch.from_numpy(out_N)


def _candidates(block: NDArray[Any], first: int, queries_QD: Tensor, best: Neighbours) -> Neighbours:
    """Return all keys of the block that could be among the nearest, by row."""
    close_QB = _could_be_near(block, queries_QD, best).cpu()
    query_N, row_N = close_QB.nonzero(as_tuple=True)
    counts_Q = _counts(close_QB)
    found = Neighbours.none(len(queries_QD), int(counts_Q.max()))
    held = torch.arange(found.rows_Qk.shape[1]) < counts_Q[:, None]
    found.rows_Qk[held] = first + row_N
    found.distances_Qk[held] = squared_distances(block, row_N, queries_QD, query_N)
    return found


def _could_be_near(block: NDArray[Any], queries_QD: Tensor, best: Neighbours) -> Tensor:
    """Return a mask [Q, B] without the keys that are certainly farther than k others, in `best` or in the block.

    In float32 a sum of D products is off by at most D rounding errors, in whatever order it is computed, so a distance
    is off by at most `slack`, which has a factor of two to spare for the few other roundings. Comparisons are negated,
    because a NaN (an overflow of float32) rules nothing out."""
    k = best.rows_Qk.shape[1]
    queries_QD = queries_QD.float()
    keys_BD = torch.from_numpy(block.astype(np.float32)).to(queries_QD.device)
    norms_Q = queries_QD.square().sum(1)
    norms_B = keys_BD.square().sum(1)
    largest_Q = (norms_Q.sqrt() + norms_B.max().sqrt()).square()
    slack_Q1 = (2 * (queries_QD.shape[1] + 8) * (_UNIT * largest_Q + _TINY))[:, None]
    offsets_QB = torch.addmm(norms_B, queries_QD, keys_BD.T, alpha=-2)  # without |q|^2, the same for all keys
    farthest_Q1 = best.distances_Qk[:, -1:].to(offsets_QB) - norms_Q[:, None]
    close_QB = ~(offsets_QB > farthest_Q1 + slack_Q1)
    (crowded,) = torch.where(_counts(close_QB) > k)
    if len(crowded):
        offsets = offsets_QB[crowded]
        kth = offsets.kthvalue(k, keepdim=True).values
        close_QB[crowded] &= ~(offsets > kth + 2 * slack_Q1[crowded])
    return close_QB


def _counts(mask_QB: Tensor) -> Tensor:
    return mask_QB.sum(1, dtype=torch.int32)  # on a CPU ten times as fast as the default, int64
