"""What a trained token costs, as ratios measured side by side in one run.

    python -m benchmarks.train [--model medium|paper] [--lengths 128 512] [--tokens 9216] [--rounds 3] [--skip-grids]
                               [--output speed.json] [--chart speed.svg] [--compare old.json]

On this machine's CPU in float32, without dropout. In one process take turns: this trainer (`ours`) and the same model
written plainly (`plain`, see benchmarks/plain) at each segment length, ours under every ZeRO stage at the first of the
lengths, and the machine's own matrix products. So whatever else runs here slows all of them; a figure is the median of
its rounds. Then peak memory, each in a process of its own, and the ways to use two cores. `--model paper` takes some
10 GB for each length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.show import ONE_RANK, chart, difference, show
from benchmarks.trainers import VOCAB_SIZES, Ours, Plain, Setting, write_text
from megatron_style.config.run import RunConfig
from megatron_style.parallel.topology import Topology
from megatron_style.runtime.local_ranks import run_ranks
from megatron_style.runtime.memory import forget_peak, peak_bytes
from megatron_style.runtime.session import distributed_session

CPU = torch.device("cpu")
GRIDS = {  # ranks, of which tensor-parallel; all with ZeRO 1
    ONE_RANK: (1, 1),
    "2 data-parallel ranks": (2, 1),
    "2 tensor-parallel ranks": (2, 2),
}
LENGTHS = {128: True, 512: True, 1024: False, 3072: False}  # and whether they have a cache


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def matmul_rate(size: int = 2048) -> float:
    """FLOP/s of this machine's own matrix product, now."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    return 4 * 2 * size**3 / seconds(lambda: [left @ right for _ in range(4)])


def measure_speed(settings: list[Setting], folder: Path, rounds: int, zero_stages: list[int]) -> dict[str, Any]:
    """Everybody in turns. Ours and plain start from the same weights and must find the same loss."""
    with distributed_session(tensor=1) as topology:
        sides = {str(setting): both_sides(setting, folder, topology) for setting in settings}
        stages = {stage: Ours(with_zero(settings[0], folder, stage), topology) for stage in zero_stages}
        for step in stages.values():
            step(), step()
        taken: dict[Any, list[float]] = defaultdict(list)
        for number in range(rounds):
            for name, steps in sides.items():
                for side, step in zip(("ours", "plain"), steps, strict=True):
                    taken[name, side].append(seconds(step))
                taken[name, "matmul"].append(matmul_rate())
            for stage, step in stages.items():
                taken[stage].append(seconds(step))
            progress(f"round {number + 1} of {rounds} done")
    return {
        "lengths": {str(setting): figures(setting, taken) for setting in settings},
        "zero": {f"ZeRO {stage}": median_ratio(taken[0], taken[stage]) for stage in stages},
    }


def figures(setting: Setting, taken: dict[Any, list[float]]) -> dict[str, Any]:
    ours, plain, matmul = (taken[str(setting), what] for what in ("ours", "plain", "matmul"))
    work = setting.tokens * setting.flops_per_token
    return {
        "tokens_per_second": [setting.tokens / statistics.median(side) for side in (ours, plain)],
        "against_plain": median_ratio(plain, ours),
        "share_of_matmul": median_ratio([work / took for took in ours], matmul),
        "matmul_gflops": statistics.median(matmul) / 1e9,
    }


def both_sides(setting: Setting, folder: Path, topology: Topology) -> tuple[Ours, Plain]:
    run = setting.run(folder)
    ours = Ours(run, topology)
    plain = Plain(run, {name: weight.clone() for name, weight in ours.engine.model.state_dict().items()})
    for _ in range(2):  # the second one has a full cache
        torch.testing.assert_close(ours(), plain(), rtol=1e-4, atol=0)
    progress(f"{setting}: ready")
    return ours, plain


def with_zero(setting: Setting, folder: Path, stage: int, tensor: int = 1) -> RunConfig:
    config = folder / f"zero{stage}.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return setting.run(folder, parallel={"tensor": tensor}, deepspeed=str(config))


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def measure_memory(setting: Setting, folder: Path, side: str) -> int:
    """Peak bytes of two steps, over what the process used before it had a model."""
    forget_peak(CPU)
    before = peak_bytes(CPU)
    with distributed_session(tensor=1) as topology:
        run = setting.run(folder)
        step = Ours(run, topology) if side == "ours" else Plain(run)
        for _ in range(2):
            step()
    return peak_bytes(CPU) - before


def measure_grid(setting: Setting, folder: Path, ranks: int, tensor: int) -> list[float]:
    """Tokens/s of two steps, over all ranks. Two cores in any case."""
    torch.set_num_threads(2 // ranks)
    with distributed_session(tensor=tensor) as topology:
        step, tokens = Ours(with_zero(setting, folder, 1, tensor), topology), setting.tokens * topology.data.size
        step(), step()
        return [tokens / seconds(step) for _ in range(2)]


def in_own_process(**what: Any) -> Any:
    """Of this file: what is measured there is not disturbed by what was measured here."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train", "--child", json.dumps(what)],
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def child(what: dict[str, Any]) -> object:
    settings, folder = [Setting(**setting) for setting in what["settings"]], Path(what["folder"])
    match what["measure"]:
        case "speed":
            return measure_speed(settings, folder, what["rounds"], what["zero_stages"])
        case "memory":
            return measure_memory(settings[0], folder, what["side"])
        case _:
            return run_ranks(what["ranks"], measure_grid, settings[0], folder, what["ranks"], what["tensor"])[0]


def measure_all(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_text(folder, VOCAB_SIZES[args.model])
    settings = [Setting(args.model, length, LENGTHS[length], args.tokens) for length in args.lengths]
    whole, first = ({"settings": list(map(vars, some)), "folder": str(folder)} for some in (settings, settings[:1]))
    zero_stages = [] if args.skip_grids else [0, 1, 2, 3]
    found = {"model": args.model, "tokens": args.tokens} | in_own_process(
        measure="speed", rounds=args.rounds, zero_stages=zero_stages, **whole
    )
    for setting in settings:
        found["lengths"][str(setting)]["peak_bytes"] = [
            in_own_process(measure="memory", side=side, settings=[vars(setting)], folder=str(folder))
            for side in ("ours", "plain")
        ]
        progress(f"{setting}: memory done")
    grids: dict[str, list[float]] = {name: [] for name in ({} if args.skip_grids else GRIDS)}
    for number in range(args.rounds):
        for name in grids:
            ranks, tensor = GRIDS[name]
            grids[name] += in_own_process(measure="grid", ranks=ranks, tensor=tensor, **first)
        progress(f"grids: round {number + 1} of {args.rounds} done")
    found["grids"] = {name: statistics.median(speeds) for name, speeds in grids.items()}
    return found


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("medium", "paper"), default="medium")
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--tokens", type=int, default=9_216, help="a batch; a multiple of every length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-grids", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg")
    parser.add_argument("--compare", type=Path, metavar="OLD.json")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child)))
        return
    with tempfile.TemporaryDirectory() as directory:
        found = measure_all(args, Path(directory))
    show(found)
    if args.output:
        args.output.write_text(json.dumps(found, indent=2) + "\n")
    if args.chart:
        chart(found, args.chart)
    if args.compare:
        difference(json.loads(args.compare.read_text()), found)


if __name__ == "__main__":
    main()
