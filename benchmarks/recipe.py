"""The cost of the paper's dropout, and the gain of bfloat16, as ratios of steps that take turns in one process.

    python -m benchmarks.recipe [--lengths 128 512] [--tokens 9216] [--rounds 3] [--output recipe.json]

A step is reading, forward, backward and update of the medium model with a cache. Ratios are to float32 without dropout;
those of bfloat16 with dropout also to bfloat16 without. Dropout has the rates of the paper, bfloat16 is that
of ds_configs/zero1_bf16.json. Peak memory is measured in separate processes, without what a process has before a model.
On a CPU without bfloat16 instructions its figures have no target, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import ROOT, machine
from benchmarks.own_process import in_own_process
from benchmarks.trainers import VOCAB_SIZES, Ours, Setting, seconds, write_text
from megatron_style.config.run import RunConfig
from megatron_style.engine.session import distributed_session
from megatron_style.parallel.device.peak_memory import forget_peak, peak_bytes

MODULE = "benchmarks.recipe"
CPU = torch.device("cpu")
WARM_UP_STEPS = 2  # the second has a full cache
RATES = {"hidden": 0.3, "attention": 0.1, "activation": 0.1, "softmax": 0.2}


class Recipe(NamedTuple):
    dropout: bool
    bf16: bool


RECIPES = {
    "float32": Recipe(dropout=False, bf16=False),
    "float32, dropout": Recipe(dropout=True, bf16=False),
    "bfloat16": Recipe(dropout=False, bf16=True),
    "bfloat16, dropout": Recipe(dropout=True, bf16=True),
}


def run_of(recipe: Recipe, setting: Setting, folder: Path) -> RunConfig:
    more: dict[str, Any] = {}
    if recipe.bf16:
        more["deepspeed"] = str(ROOT / "ds_configs/zero1_bf16.json")
    if recipe.dropout:
        more["model"] = setting.run(folder).as_data()["model"] | {"dropout": RATES}
    return setting.run(folder, **more)


def measure_speed(setting: Setting, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each recipe's steps, which take turns."""
    with distributed_session(tensor=1) as topology:
        steps = {name: Ours(run_of(recipe, setting, folder), topology) for name, recipe in RECIPES.items()}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(WARM_UP_STEPS + rounds):
            for name, step in steps.items():
                spent = seconds(step)
                if number >= WARM_UP_STEPS:
                    taken[name].append(spent)
    return taken


def measure_memory(setting: Setting, folder: Path, name: str) -> int:
    """Return the peak bytes of two steps, less what the process used before it had a model."""
    forget_peak(CPU)
    before = peak_bytes(CPU)
    with distributed_session(tensor=1) as topology:
        step = Ours(run_of(RECIPES[name], setting, folder), topology)
        for _ in range(2):
            step()
    return peak_bytes(CPU) - before


def child(what: dict[str, Any]) -> object:
    setting = Setting(**what["setting"])
    folder = Path(what["folder"])
    if what["measure"] == "speed":
        return measure_speed(setting, folder, what["rounds"])
    return measure_memory(setting, folder, what["name"])


def measure(setting: Setting, folder: Path, rounds: int) -> dict[str, Any]:
    given = {"setting": vars(setting), "folder": str(folder)}
    taken = in_own_process(MODULE, measure="speed", rounds=rounds, **given)
    peaks = {name: in_own_process(MODULE, measure="memory", name=name, **given) for name in RECIPES}
    plain = taken["float32"]
    return {
        name: {
            "tokens_per_second": setting.tokens / statistics.median(times),
            "time": statistics.median(own / other for own, other in zip(times, plain, strict=True)),
            "peak_bytes": peaks[name],
            "memory": peaks[name] / peaks["float32"],
        }
        for name, times in taken.items()
    }


def judged(found: dict[str, Any]) -> Iterator[tuple[str, float, str, bool]]:
    """Yield each figure that has a target, and whether it meets it."""
    for length, lines in found["lengths"].items():
        dropped = lines["float32, dropout"]
        half = lines["bfloat16"]
        yield f"{length}: time with dropout", dropped["time"], "at most 1.15", dropped["time"] <= 1.15
        yield f"{length}: memory with dropout", dropped["memory"], "at most 1.25", dropped["memory"] <= 1.25
        ratio = lines["bfloat16, dropout"]["time"] / half["time"]
        yield f"{length}: time with dropout, bfloat16", ratio, "at most 1.15", ratio <= 1.15
        if found["machine"]["bf16_instructions"]:
            speed = 1 / half["time"]
            yield f"{length}: speed of bfloat16", speed, "at least 1.7", speed >= 1.7
            yield f"{length}: memory of bfloat16", half["memory"], "at most 0.7", half["memory"] <= 0.7


def show(found: dict[str, Any]) -> None:
    print(f"medium model, {found['tokens']} tokens per step; ratios to float32 without dropout")
    for length, lines in found["lengths"].items():
        for name, line in lines.items():
            memory = f"{line['peak_bytes'] / 2**30:7.2f} GiB {line['memory']:6.2f}x"
            print(f"{length:14}{name:20}{line['tokens_per_second']:8,.0f} tokens/s{line['time']:7.2f}x{memory}")
    if not found["machine"]["bf16_instructions"]:
        print("this CPU has no bfloat16 instructions: no target for its speed")
    for text, value, mark, met in judged(found):
        print(f"{'met   ' if met else 'SHORT '} {text}: {value:.2f}, target: {mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--tokens", type=int, default=9_216, help="per step; a multiple of every length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child)))
        return
    found: dict[str, Any] = {"machine": machine(), "tokens": args.tokens, "rounds": args.rounds, "lengths": {}}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        write_text(folder, VOCAB_SIZES["medium"])
        for length in args.lengths:
            setting = Setting("medium", length, cached=True, tokens=args.tokens)
            found["lengths"][str(setting)] = measure(setting, folder, args.rounds)
    show(found)
    if args.output:
        args.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
