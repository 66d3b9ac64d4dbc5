"""What a trained token costs, as ratios measured side by side in one run.

    python -m benchmarks.train [--model medium|paper] [--lengths 128 512] [--tokens 9216] [--rounds 3] [--skip-grids]
                               [--output speed.json] [--chart speed.svg] [--compare old.json]

On this machine's CPU in float32, without dropout. For each segment length take turns: this trainer (`ours`), the same
model written plainly (`plain`, see benchmarks/plain), and the machine's own matrix products. Then ours at all lengths,
and under every ZeRO stage at the first of them. What takes turns is slowed alike by whatever else runs here; a figure
is the median of its rounds. Then the ways to use two cores, and peak memory, each in processes of its own.

Of `--model paper` all lengths and ZeRO stages at once do not fit into 24 GB: give one length and --skip-grids.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.show import ONE_RANK, chart, difference, show
from benchmarks.trainers import VOCAB_SIZES, Ours, Plain, Setting, write_text
from megatron_style.config.run import RunConfig
from megatron_style.engine.local_ranks import run_ranks
from megatron_style.engine.memory import forget_peak, peak_bytes
from megatron_style.engine.session import distributed_session

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


def measure_speed(setting: Setting, folder: Path, rounds: int) -> dict[str, Any]:
    """Ours, plain and the machine in turns. Both start from the same weights and must find the same loss."""
    with distributed_session(tensor=1) as topology:
        run = setting.run(folder)
        ours = Ours(run, topology)
        plain = Plain(run, {name: weight.clone() for name, weight in ours.engine.model.state_dict().items()})
        for _ in range(2):  # the second one has a full cache
            torch.testing.assert_close(ours(), plain(), rtol=1e-4, atol=0)
        taken = [(seconds(ours), seconds(plain), matmul_rate()) for _ in range(rounds)]
    work = setting.tokens * setting.flops_per_token
    return {
        "tokens_per_second": [setting.tokens / statistics.median(side[i] for side in taken) for i in (0, 1)],
        "against_plain": statistics.median(plain / ours for ours, plain, _ in taken),
        "share_of_matmul": statistics.median(work / ours / rate for ours, _, rate in taken),
        "matmul_gflops": statistics.median(rate for *_, rate in taken) / 1e9,
    }


def measure_ours(settings: list[Setting], folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens/s at every length, and under every ZeRO stage at the first of them; all in turns."""
    with distributed_session(tensor=1) as topology:
        runs = {str(setting): setting.run(folder) for setting in settings}
        runs |= {f"ZeRO {stage}": with_zero(settings[0], folder, stage) for stage in range(4)}
        steps = {name: Ours(run, topology) for name, run in runs.items()}
        for step in steps.values():
            step(), step()
        taken = [{name: seconds(step) for name, step in steps.items()} for _ in range(rounds)]
    speed = {name: settings[0].tokens / statistics.median(times[name] for times in taken) for name in steps}
    return {
        "ours": {str(setting): speed[str(setting)] for setting in settings},
        "zero": {name: speed[name] for name in speed if name.startswith("ZeRO")},
    }


def with_zero(setting: Setting, folder: Path, stage: int, tensor: int = 1) -> RunConfig:
    config = folder / f"zero{stage}.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return setting.run(folder, parallel={"tensor": tensor}, deepspeed=str(config))


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
            return measure_speed(settings[0], folder, what["rounds"])
        case "ours":
            return measure_ours(settings, folder, what["rounds"])
        case "memory":
            return measure_memory(settings[0], folder, what["side"])
        case _:
            return run_ranks(what["ranks"], measure_grid, settings[0], folder, what["ranks"], what["tensor"])[0]


def measure_all(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_text(folder, VOCAB_SIZES[args.model])
    settings = [Setting(args.model, length, LENGTHS[length], args.tokens) for length in args.lengths]
    found: dict[str, Any] = {"model": args.model, "tokens": args.tokens, "lengths": {}, "ours": {}, "zero": {}}

    def measured(some: list[Setting], **what: Any) -> Any:
        return in_own_process(settings=list(map(vars, some)), folder=str(folder), rounds=args.rounds, **what)

    for setting in settings:
        found["lengths"][str(setting)] = measured([setting], measure="speed") | {
            "peak_bytes": [measured([setting], measure="memory", side=side) for side in ("ours", "plain")]
        }
        progress(f"{setting}: done")
    grids: dict[str, list[float]] = {name: [] for name in ({} if args.skip_grids else GRIDS)}
    if grids:
        found |= measured(settings, measure="ours")
        progress("all lengths and ZeRO stages in turns: done")
    for number in range(args.rounds):
        for name in grids:
            ranks, tensor = GRIDS[name]
            grids[name] += measured(settings[:1], measure="grid", ranks=ranks, tensor=tensor)
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
    parser.add_argument("--skip-grids", action="store_true", help="only against plain, and memory")
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
