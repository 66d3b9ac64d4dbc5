"""The cost of a kNN-LM's neighbours per token against the size of the datastore, as ratios measured in one run.

    python -m benchmarks.neighbours [--hidden 256] [--sizes 16384 65536 262144] [--rounds 5] [--json]

Each search is measured side by side with the forward pass of a model of 6 layers and the same width, and the largest
datastore with the smallest. Keys lie around centres, as those of a text do: an index needs some order in them. The
approximate side needs faiss-cpu, and reads 32 lists.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.inference import Result, Work, compare, forward_pass, make_model
from benchmarks.machine import machine
from megatron_style.config.datastore import DatastoreManifest
from megatron_style.datastore.approximate import ApproximateSearch, index_shape, write_index
from megatron_style.datastore.retrieval import Retrieval, Search
from megatron_style.datastore.search import nearest
from megatron_style.datastore.store import KEYS, MANIFEST, VALUES, Datastore, open_datastore

LAYERS, K, PROBE = 6, 1024, 32
QUERIES = 512


def write_datastore(folder: Path, rows: int, hidden: int) -> Datastore:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(256, hidden))
    keys = (centres[rng.integers(0, 256, rows)] + 0.5 * rng.normal(size=(rows, hidden))).astype("<f2")
    walk = {"mode": "cached", "segment_length": 1, "cache_length": 1, "batch_rows": 1, "stride": None, "lanes": 1}
    data = {
        "model": "",
        "text": "",
        "vocab_size": 1000,
        "hidden_size": hidden,
        "dtype": "float16",
        "count": rows,
        "walk": walk | {"dtype": "float32"},
    }
    folder.mkdir()
    keys.tofile(folder / KEYS)
    rng.integers(0, 1000, rows).astype("<i4").tofile(folder / VALUES)
    (folder / MANIFEST).write_text(json.dumps(DatastoreManifest.parse(data, source="benchmark").as_data()))
    return open_datastore(folder)


def lookup(store: Datastore, search: Search) -> Work:
    """Return work that finds the neighbours of tokens and weighs them."""
    retrieval = Retrieval(store, search, K, temperature=1.0, weight=0.25)
    near = store.keys[:: max(1, len(store.keys) // QUERIES)][:QUERIES].astype(np.float32)
    queries = torch.from_numpy(near) + 0.3 * torch.randn(near.shape, generator=torch.Generator().manual_seed(1))

    def work() -> int:
        retrieval.find(queries)
        return len(queries)

    return work


@torch.no_grad()
def measure(folder: Path, hidden: int, sizes: list[int], rounds: int) -> Iterator[Result]:
    forward = forward_pass(make_model(LAYERS, hidden), rows=4)
    stores = {rows: write_datastore(folder / str(rows), rows, hidden) for rows in sizes}
    works = {"exact": {rows: lookup(store, partial(nearest, store.keys)) for rows, store in stores.items()}}
    works["approximate"] = {}
    for rows, store in stores.items():
        write_index(store, index_shape(store, None, None), lambda _: None)
        works["approximate"][rows] = lookup(store, ApproximateSearch.open(store, PROBE).nearest)
    for kind, by_size in works.items():
        for rows, work in by_size.items():
            yield compare(f"{kind}, {rows:,} keys / forward pass", work, forward, rounds)
        growth = sizes[-1] / sizes[0]
        name = f"{kind}, {sizes[-1]:,} keys / {sizes[0]:,}"
        yield compare(name, by_size[sizes[-1]], by_size[sizes[0]], rounds, most=1.25 * growth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16_384, 65_536, 262_144], help="keys")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per ratio")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for result in measure(Path(folder), args.hidden, args.sizes, args.rounds):
            results.append(result)
            if not args.json:
                first, second = result.milliseconds
                print(f"{result.name:44}{first:9.3f} /{second:7.3f} ms per token{result.ratio:9.2f}x", flush=True)
    if args.json:
        facts = {"hidden": args.hidden, "k": K, "probe": PROBE, "machine": machine()}
        print(json.dumps(facts | {"results": [asdict(result) for result in results]}, indent=1))


if __name__ == "__main__":
    main()
