"""The cost of a trained token, as ratios measured side by side in one run.

    python -m benchmarks.train [--model medium|paper] [--lengths 128 512] [--tokens 9216] [--rounds 3] [--skip-grids]
                               [--output speed.json] [--chart speed.svg] [--compare old.json]

On this machine's CPU in float32, without dropout. For each segment length, three take turns: this trainer (`ours`), the
same model written plainly (`plain`, see benchmarks/plain), and bare matrix products. Then ours at all lengths, and at
the first of them under every ZeRO stage. Other work on the machine slows all that take turns alike; a figure is the
median of its rounds. Then the ways to use two cores, and peak memory, each in separate processes.

With `--model paper`, all lengths and ZeRO stages together do not fit into 24 GB: give one length and --skip-grids.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.own_process import in_own_process
from benchmarks.show import ONE_RANK, chart, difference, show
from benchmarks.trainers import VOCAB_SIZES, Ours, Plain, Setting, seconds, write_text
from megatron_style.config.run import RunConfig
from megatron_style.engine.session import distributed_session
from megatron_style.parallel.device.peak_memory import forget_peak, peak_bytes
from megatron_style.parallel.device.products import linear
from megatron_style.parallel.local_ranks import run_ranks

MODULE = "benchmarks.train"
CPU = torch.device("cpu")
WARM_UP_STEPS = 2
GRIDS = {  # number of ranks, and tensor-parallel degree; all with ZeRO 1
    ONE_RANK: (1, 1),
    "2 data-parallel ranks": (2, 1),
    "2 tensor-parallel ranks": (2, 2),
}
LENGTHS = {128: True, 512: True, 1024: False, 3072: False}  # with a cache or without


def matmul_rate(size: int = 2048) -> float:
    """Return the FLOP/s of this machine's matrix products at the moment."""
    left, right = torch.randn(2, size, size)
    return 4 * 2 * size**3 / seconds(lambda: [linear(left, right) for _ in range(4)])


def measure_speed(setting: Setting, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure ours, plain and bare matrix products in turns. Both models start from the same weights and must have the
    same loss."""
    with distributed_session(tensor=1) as topology:
        run = setting.run(folder)
        ours = Ours(run, topology)
        plain = Plain(run, {name: weight.clone() for name, weight in ours.engine.model.state_dict().items()})
        for _ in range(2):  # the second step has a full cache
            torch.testing.assert_close(ours(), plain(), rtol=1e-4, atol=0)
        taken = [(seconds(ours), seconds(plain), matmul_rate()) for _ in range(rounds)]
    work = setting.tokens * setting.flops_per_token
    our_seconds = statistics.median(ours for ours, _, _ in taken)
    plain_seconds = statistics.median(plain for _, plain, _ in taken)
    return {
        "tokens_per_second": [setting.tokens / our_seconds, setting.tokens / plain_seconds],
        "against_plain": statistics.median(plain / ours for ours, plain, _ in taken),
        "share_of_matmul": statistics.median(work / ours / rate for ours, _, rate in taken),
        "matmul_gflops": statistics.median(rate for *_, rate in taken) / 1e9,
    }


def measure_ours(settings: list[Setting], folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Return the tokens/s at every length, and under every ZeRO stage at the first of them; all take turns."""
    with distributed_session(tensor=1) as topology:
        runs = {str(setting): setting.run(folder) for setting in settings}
        runs |= {f"ZeRO {stage}": with_zero(settings[0], folder, stage) for stage in range(4)}
        steps = {name: Ours(run, topology) for name, run in runs.items()}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(WARM_UP_STEPS + rounds):
            for name, step in steps.items():
                spent = seconds(step)
                if number >= WARM_UP_STEPS:
                    taken[name].append(spent)
    speed = {name: settings[0].tokens / statistics.median(times) for name, times in taken.items()}
    return {
        "ours": {str(setting): speed[str(setting)] for setting in settings},
        "zero": {name: speed[name] for name in speed if name.startswith("ZeRO")},
    }


def with_zero(setting: Setting, folder: Path, stage: int, tensor: int = 1) -> RunConfig:
    config = folder / f"zero{stage}.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return setting.run(folder, parallel={"tensor": tensor}, deepspeed=str(config))


def measure_memory(setting: Setting, folder: Path, side: str) -> int:
    """Return the peak bytes of two steps, less what the process used before it had a model."""
    forget_peak(CPU)
    before = peak_bytes(CPU)
    with distributed_session(tensor=1) as topology:
        run = setting.run(folder)
        step = Ours(run, topology) if side == "ours" else Plain(run)
        for _ in range(2):
            step()
    return peak_bytes(CPU) - before


def measure_grid(setting: Setting, folder: Path, ranks: int, tensor: int) -> list[float]:
    """Return the tokens/s of two steps, over all ranks, which always use two cores together."""
    torch.set_num_threads(2 // ranks)
    with distributed_session(tensor=tensor) as topology:
        step = Ours(with_zero(setting, folder, 1, tensor), topology)
        tokens = setting.tokens * topology.data.size
        for _ in range(WARM_UP_STEPS):
            step()
        return [tokens / seconds(step) for _ in range(2)]


def child(what: dict[str, Any]) -> object:
    settings = [Setting(**setting) for setting in what["settings"]]
    folder = Path(what["folder"])
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
    found: dict[str, Any] = {"machine": machine(), "model": args.model, "tokens": args.tokens}
    found |= {"lengths": {}, "ours": {}, "zero": {}}

    def measured(some: list[Setting], **what: Any) -> Any:
        return in_own_process(MODULE, settings=list(map(vars, some)), folder=str(folder), rounds=args.rounds, **what)

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
    parser.add_argument("--tokens", type=int, default=9_216, help="per batch; a multiple of every length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-grids", action="store_true", help="measure only the ratios to plain, and memory")
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
