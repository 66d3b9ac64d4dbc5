"""Approximate search by an index of faiss, an optional library.

The index is IVFPQ, as in the authors' code: each key is a code of a few bytes in the list of its nearest centroid, and
a search reads the lists of the `probe` centroids that are nearest to the query. The index only proposes rows; distances
are always computed from the stored keys, because those of codes give a worse perplexity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.files import atomic_file
from megatron_style.datastore.search import Neighbours, squared_distances
from megatron_style.datastore.store import Datastore
from megatron_style.parallel.topology import Axis

INDEX = "index.faiss"
_CENTROIDS = 256  # of each byte of a code: fewer keys cannot be quantised
_KEYS_PER_LIST = 256  # that train its centroid, and by default also on average in a list
_MOST_LISTS = 4096
_CODE_BYTES = 64
_ROWS_AT_ONCE = 2**14
_QUERIES_AT_ONCE = 32  # a number that does not depend on the ranks: faiss rounds batches of other sizes differently


@dataclass(frozen=True)
class IndexShape:
    lists: int
    code_bytes: int


def index_shape(store: Datastore, lists: int | None, code_bytes: int | None) -> IndexShape:
    """Return the shape that was asked for, or the authors', reduced to what the datastore can fill."""
    count = store.manifest.count
    size = store.manifest.hidden_size
    if count < _CENTROIDS:
        raise UserError(f"{store.folder}: has {count} keys, an index needs {_CENTROIDS}; exact search is fast enough")
    lists = lists or max(1, min(_MOST_LISTS, count // _KEYS_PER_LIST))
    if lists > count:
        raise UserError(f"--lists {lists}: {store.folder} has only {count} keys")
    code_bytes = code_bytes or max(n for n in range(1, _CODE_BYTES + 1) if size % n == 0)
    if size % code_bytes:
        raise UserError(f"--code-bytes {code_bytes}: must divide the {size} numbers of a key")
    return IndexShape(lists, code_bytes)


def write_index(store: Datastore, shape: IndexShape, progress: Callable[[int], object]) -> Path:
    """Write `index.faiss` into the datastore's folder. It is trained on a sample; codes and row numbers of all keys
    must fit into memory."""
    faiss = import_faiss("neighbours index")
    count, size = store.keys.shape
    sampled = min(count, max(_CENTROIDS, shape.lists) * _KEYS_PER_LIST)
    index = faiss.IndexIVFPQ(faiss.IndexFlatL2(size), size, shape.lists, shape.code_bytes, 8)
    index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = (
        1  # else faiss warns about small datastores
    )
    index.train(_as_float32(store.keys[np.arange(sampled) * count // sampled]))
    for first in range(0, count, _ROWS_AT_ONCE):
        rows = _as_float32(store.keys[first : first + _ROWS_AT_ONCE])
        index.add(rows)
        progress(len(rows))
    path = store.folder / INDEX
    with atomic_file(path) as new:
        faiss.write_index(index, str(new))
    return path


@dataclass(frozen=True)
class ApproximateSearch:
    store: Datastore
    index: Any  # of faiss, mapped from its file

    @classmethod
    def open(cls, store: Datastore, probe: int) -> ApproximateSearch:
        faiss = import_faiss("--probe")
        path = store.folder / INDEX
        if not path.is_file():
            raise UserError(f"{path}: no such file; `neighbours index {store.folder}` makes it, or leave out --probe")
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        except (RuntimeError, MemoryError) as error:
            raise UserError(f"{path}: not a complete index of faiss: {error}") from None
        if not hasattr(index, "nprobe") or (index.ntotal, index.d) != store.keys.shape:
            raise UserError(f"{path}: is not an index of these keys; make it again with `neighbours index`")
        index.nprobe = min(probe, index.nlist)
        faiss.omp_set_num_threads(torch.get_num_threads())
        return cls(store, index)

    def nearest(self, queries_QD: Tensor, k: int, axis: Axis) -> Neighbours:
        """Return the nearest keys of the lists that were searched, by their exact distances; there may be fewer than k.
        The ranks share the queries."""
        found = Neighbours.none(len(queries_QD), k)
        queries = _as_float32(queries_QD.cpu().double().numpy())
        for first in range(axis.rank * _QUERIES_AT_ONCE, len(queries), axis.size * _QUERIES_AT_ONCE):
            part = slice(first, first + _QUERIES_AT_ONCE)
            found.rows_Qk[part] = self._rows(queries[part], k)
        own = found.rows_Qk.to(queries_QD.device)
        rows_Qk = (axis.sum(own + 1) - 1).cpu()  # of the other ranks' queries there are none here
        query_N, place_N = torch.where(rows_Qk >= 0)
        rows_N = rows_Qk[query_N, place_N]
        found.distances_Qk[query_N, place_N] = squared_distances(self.store.keys, rows_N, queries_QD, query_N)
        return found._replace(rows_Qk=rows_Qk).sorted()

    def _rows(self, queries: Any, k: int) -> Tensor:
        rows = torch.from_numpy(self.index.search(queries, k)[1])
        if int(rows.max()) >= self.store.manifest.count:
            raise UserError(f"{self.store.folder / INDEX}: names rows that do not exist; make it again")
        return rows.clamp(min=-1)


def import_faiss(flag: str) -> ModuleType:
    try:
        import faiss  # 0.2 seconds, and not installed by default
    except ImportError:
        raise UserError(f"{flag}: needs the library faiss; install it with `pip install faiss-cpu`") from None
    return faiss


def _as_float32(keys: Any) -> Any:
    return np.ascontiguousarray(keys, dtype=np.float32)
