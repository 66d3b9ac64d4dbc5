"""Estimate memory, FLOPs, communication and time of each stage of a run, without a GPU.

python -m megatron_style.plan run_configs/wikitext103_shortformer.yaml --set data.vocab_size=267744 --gpu v100-32gb
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("plan")  # imports this file

import argparse
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_style.base.command import (
    add_json_flag,
    add_set_flag,
    argument_type,
    command_parser,
    log,
    show,
    show_table,
)
from megatron_style.base.cpu import bf16_instructions, describe_bf16
from megatron_style.base.errors import UserError
from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import ParallelConfig
from megatron_style.config.run_file import load_run
from megatron_style.planning.calibration import measured_efficiency
from megatron_style.planning.estimate import estimate_run
from megatron_style.planning.hardware import GPUS, bytes_of, gpu_named, with_peak
from megatron_style.planning.rows import summary, tables
from megatron_style.planning.setup import sharding_of
from megatron_style.planning.text import text_facts
from megatron_style.planning.timing import Machine

DEFAULT_GPU = "a100-80gb"
DEFAULT_EFFICIENCY = 0.4
DEFAULT_COUNT = 8


def main() -> None:
    args = parse_args()
    run = load_run(args.run, args.settings)
    counts = gpu_counts(args.gpus, run.parallel)
    sharding = sharding_of(run, read_ds_file(run.deepspeed))
    text = text_facts(run)
    gpu = with_peak(args.gpu, args.gpu_peak, sharding.precision) if args.gpu_peak else args.gpu
    efficiency = measured_efficiency(args.calibrate, gpu) if args.calibrate else args.efficiency
    machine = Machine(gpu, efficiency)
    estimate = estimate_run(run, text, sharding, machine, gpus=counts, memory=args.gpu_memory or gpu.memory)
    if text.tokens is None:
        stores = ", ".join(str(source.path) for source in run.data.sources)
        log(f"{stores}: does not exist yet; vocabulary shares are guessed, the length of an epoch is unknown")
    if sharding.precision == "bf16":
        log(f"this machine's CPU has {describe_bf16(bf16_instructions())}")
    if args.picture:
        from megatron_style.planning.picture import draw  # takes a second

        draw(estimate, args.picture, name=args.run.stem)
    if args.json:
        show(asdict(estimate), as_json=True)
        return
    show(summary(estimate), as_json=False)
    for table in tables(estimate):
        show_table(table.header, table.rows)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "plan",
        "Estimate memory, FLOPs, communication and time of each stage of a run from its files: no GPU is needed, and "
        "no corpus if the run file has data.vocab_size.",
        "python -m megatron_style.plan run_configs/wikitext103_shortformer.yaml --set data.vocab_size=267744 "
        "--gpu v100-32gb --gpus 8,64,512",
    )
    gpu = argument_type(gpu_named)
    memory = argument_type(partial(bytes_of, flag="--gpu-memory"))
    parser.add_argument("run", type=Path, metavar="RUN.yaml")
    add_set_flag(parser)
    parser.add_argument("--gpu", type=gpu, default=DEFAULT_GPU, metavar="NAME", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--gpu-memory", type=memory, metavar="32GB", help="default: that of the GPU")
    parser.add_argument("--gpu-peak", type=peak_flops, metavar="TFLOPS", help="in this precision; default: the GPU's")
    parser.add_argument(
        "--gpus", metavar="N,...", help=f"numbers of GPUs to compare; default: parallel.meant_for, else {DEFAULT_COUNT}"
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--efficiency", type=share_of_peak, metavar="0.4", default=DEFAULT_EFFICIENCY, help="share of the GPU's peak"
    )
    speed.add_argument("--calibrate", type=Path, metavar="RUN_DIR", help="measure the efficiency in a run on such GPUs")
    parser.add_argument("--picture", type=picture_file, metavar="plan.png", help="also draw the plan; .png or .svg")
    add_json_flag(parser)
    return parser.parse_args()


@argument_type
def picture_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg") or not path.parent.is_dir() or path.is_dir():
        raise UserError(f"--picture {path}: must be a .png or .svg in a folder that exists")
    return path


@argument_type
def peak_flops(text: str) -> float:
    """Return FLOP/s, given in TFLOP/s."""
    try:
        peak = float(text)
    except ValueError:
        peak = 0.0
    if not 0 < peak < math.inf:
        raise UserError(f"--gpu-peak {text}: must be dense TFLOP/s above 0, such as 989")
    return peak * 1e12


@argument_type
def share_of_peak(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--efficiency {text}: must be a share of the peak above 0 and up to 1, such as 0.4")
    return share


def gpu_counts(text: str | None, parallel: ParallelConfig) -> list[int]:
    """Return the numbers of GPUs to compare, checked against parallel.tensor of the run file."""
    tensor = parallel.tensor
    if text is None:
        return [parallel.meant_for or -(-DEFAULT_COUNT // tensor) * tensor]
    counts = [int(part) if part.strip().isascii() and part.strip().isdigit() else 0 for part in text.split(",")]
    if not all(count > 0 and count % tensor == 0 for count in counts):
        reason = f"multiples of parallel.tensor ({tensor})" if tensor > 1 else "numbers of at least 1"
        raise UserError(f"--gpus {text}: must be {reason}, such as {8 * tensor} or {8 * tensor},{64 * tensor}")
    return counts
