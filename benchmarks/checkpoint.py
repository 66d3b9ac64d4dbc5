"""Saving and loading a checkpoint, against a raw write of the same bytes to the same disk, in one run; and the time for
which a save in the background stops the training, against the time of a save that does not continue meanwhile.

    python -m benchmarks.checkpoint [--folder DIR] [--zero 1] [--bf16] [--rounds 5]

Two ranks on the CPU, a model of 38M parameters with Adam's state. Every round writes raw, saves, loads, and saves in
the background. The ratios of the medians are printed: to the raw write, 1.0 is its speed with fsync; the stall of a
save in the background should be at most 0.15 of a save. The first round does not count: it allocates the memory of the
copies, and proves all parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.machine import machine
from megatron_style.checkpoint.origin import Progress
from megatron_style.checkpoint.store import CheckpointStore
from megatron_style.config.run import RunConfig
from megatron_style.engine.build import build_engine
from megatron_style.engine.session import distributed_session
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.stages import StageSchedule

RANKS = 2
VOCAB_SIZE = 20_000
CORPUS_TOKENS = 1_000_000


def make_run(folder: Path, zero: int, *, half: bool) -> RunConfig:
    ds_config: dict[str, Any] = {"zero_optimization": {"stage": zero}}
    if half:
        ds_config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    (folder / "ds.json").write_text(json.dumps(ds_config))
    data = {
        "model": {
            "layers": 8,
            "hidden_size": 512,
            "heads": 8,
            "ffn_size": 2048,
            "vocabulary": {"kind": "adaptive", "cutoffs": [20_000 * 6 // 10]},
        },
        "data": {"train": "train", "valid": "valid", "tokens_per_batch": 512},
        "stages": [{"segment_length": 64, "steps": 100}],
        "optimizer": {"name": "adamw", "learning_rate": {"peak": 0.001}},
        "output": {"path": str(folder / "run"), "keep_last": 1},
        "deepspeed": str(folder / "ds.json"),
    }
    return RunConfig.parse(data, source="benchmark")


class Round(NamedTuple):
    """The seconds of one round, and the bytes of a checkpoint."""

    raw: float
    save: float
    load: float
    stall: float
    write: float
    size: int


def measure(run: RunConfig, rounds: int) -> list[Round]:
    with distributed_session(tensor=1) as topology:
        schedule = StageSchedule(run, corpus_tokens=CORPUS_TOKENS, data_parallel=RANKS)
        engine = build_engine(run, schedule, VOCAB_SIZE, topology)
        ids = torch.zeros(8, 64, dtype=torch.long)
        nll, cache, *_ = engine.forward(ids, ids, engine.model.empty_memory(8, 64), None)
        engine.accumulate(nll.mean(), is_last=True)
        engine.update(0.001)  # makes the optimizer's state
        store = CheckpointStore(run, topology)
        in_background = CheckpointStore(with_async(run), topology)
        found = []
        for step in range(1, rounds + 1):
            begin = time.perf_counter()
            store.save(engine, Progress(step, (cache,)), schedule)
            save = time.perf_counter() - begin
            begin = time.perf_counter()
            newest = store.newest()
            assert newest is not None
            newest.load(engine, schedule)
            torch.distributed.barrier()
            load = time.perf_counter() - begin
            size = sum(path.stat().st_size for path in (run.output.path / "checkpoints").rglob("*") if path.is_file())
            raw = raw_write(run.output.path / "raw", size) if topology.is_first else 0.0
            torch.distributed.barrier()
            in_background.save(engine, Progress(step, (cache,)), schedule)
            (saved,) = in_background.finished(wait=True)
            assert saved.stall_seconds is not None
            assert saved.write_seconds is not None
            found.append(Round(raw, save, load, saved.stall_seconds, saved.write_seconds, size))
        return found[1:]


def with_async(run: RunConfig) -> RunConfig:
    data = run.as_data()
    data["output"] |= {"save_async": True, "path": str(run.output.path.with_name("async"))}
    return RunConfig.parse(data, source="benchmark")


def raw_write(path: Path, size: int) -> float:
    block = np.random.default_rng(0).bytes(2**24)
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="a folder on the disk to measure; default: the system's temporary one"
    )
    parser.add_argument("--zero", type=int, default=1, choices=range(4))
    parser.add_argument("--bf16", action="store_true", help="train in bf16 instead of fp32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as directory:
        run = make_run(Path(directory), args.zero, half=args.bf16)
        rounds = run_ranks(RANKS, measure, run, args.rounds + 1)[0]
    print(json.dumps(machine()))
    middle = Round(*map(statistics.median, zip(*rounds, strict=True)))
    precision = "bf16" if args.bf16 else "fp32"
    size = f"{middle.size / 2**20:,.0f} MiB"
    print(f"checkpoint    {size}, ZeRO {args.zero}, {precision}, {RANKS} ranks, median of {args.rounds} rounds")
    for name, seconds in (("raw write", middle.raw), ("save", middle.save), ("load", middle.load)):
        speed = middle.size / seconds / 2**30
        print(f"{name:<12}  {seconds:6.2f} s  {speed:5.2f} GiB/s  ratio to raw write {middle.raw / seconds:.2f}")
    print(f"stall         {middle.stall:6.2f} s  ratio to save {middle.stall / middle.save:.3f}")
    print(f"write         {middle.write:6.2f} s  in the background, without training meanwhile")


if __name__ == "__main__":
    main()
