"""What a run will take, before a GPU is: memory, arithmetic, messages and time of each stage.

python -m megatron_style.plan run_configs/wikitext103_shortformer.yaml --set data.vocab_size=267744 --gpu v100-32gb
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megatron_style.base.command import (
    add_json_flag,
    add_set_flag,
    command_parser,
    log,
    run_command,
    show,
    show_table,
)
from megatron_style.base.errors import UserError
from megatron_style.base.units import duration, size
from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import load_run
from megatron_style.planning.calibration import measured_efficiency
from megatron_style.planning.estimate import RunEstimate, StageEstimate, estimate_run
from megatron_style.planning.hardware import GIB, GPUS, bytes_of, gpu_named
from megatron_style.planning.setup import sharding_of
from megatron_style.planning.text import text_facts
from megatron_style.planning.timing import Machine

DEFAULT_GPU, DEFAULT_EFFICIENCY, DEFAULT_COUNT = "a100-80gb", 0.4, 8


def main() -> None:
    args = parse_args()
    check_picture(args.picture)
    run, gpu = load_run(args.run, args.settings), gpu_named(args.gpu)
    counts = gpu_counts(args.gpus, run.parallel.tensor)
    memory = bytes_of(args.gpu_memory, "--gpu-memory") if args.gpu_memory else gpu.memory
    sharding, text = sharding_of(run, read_ds_file(run.deepspeed)), text_facts(run)
    machine = Machine(gpu, measured_efficiency(args.calibrate, gpu) if args.calibrate else efficiency(args.efficiency))
    plan = estimate_run(run, text, sharding, machine, gpus=counts, memory=memory)
    if text.tokens is None:
        log(f"{run.data.train}: not there yet; shares of the vocabulary are guessed, epochs have no length")
    if args.picture:
        from megatron_style.planning.picture import draw  # takes a second

        draw(plan, args.picture)
    if args.json:
        show(asdict(plan), as_json=True)
    else:
        show_plan(plan)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "plan",
        "Memory, arithmetic, communication and time of each stage of a run, computed from its files: no GPU is needed, "
        "and no corpus if the run file has data.vocab_size.",
        "python -m megatron_style.plan run_configs/wikitext103_shortformer.yaml --set data.vocab_size=267744 "
        "--gpu v100-32gb --gpus 8,64,512",
    )
    parser.add_argument("run", type=Path, metavar="RUN.yaml")
    add_set_flag(parser)
    parser.add_argument("--gpu", default=DEFAULT_GPU, metavar="NAME", help=f"one of {', '.join(GPUS)}")
    parser.add_argument("--gpu-memory", metavar="32GB", help="default: what the GPU has")
    parser.add_argument("--gpus", metavar="N,...", help=f"how many; several are compared; default: {DEFAULT_COUNT}")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--efficiency", metavar="0.4", default=str(DEFAULT_EFFICIENCY), help="share of the GPU's peak")
    speed.add_argument("--calibrate", type=Path, metavar="RUN_DIR", help="take the efficiency from a run on such GPUs")
    parser.add_argument("--picture", type=Path, metavar="plan.png", help="draw it too; .png or .svg")
    add_json_flag(parser)
    return parser.parse_args()


def check_picture(path: Path | None) -> None:
    if path is not None and (path.suffix not in (".png", ".svg") or not path.parent.is_dir() or path.is_dir()):
        raise UserError(f"--picture {path}: must be a .png or .svg in a folder that exists")


def efficiency(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--efficiency {text}: must be a share of the peak above 0 and up to 1, such as 0.4")
    return share


def gpu_counts(text: str | None, tensor: int) -> list[int]:
    if text is None:
        return [-(-DEFAULT_COUNT // tensor) * tensor]
    counts = [int(part) if part.strip().isascii() and part.strip().isdigit() else 0 for part in text.split(",")]
    if not all(count > 0 and count % tensor == 0 for count in counts):
        reason = f"multiples of parallel.tensor ({tensor})" if tensor > 1 else "numbers from 1 on"
        raise UserError(f"--gpus {text}: must be {reason}, such as {8 * tensor} or {8 * tensor},{64 * tensor}")
    return counts


def show_plan(plan: RunEstimate) -> None:
    text, totals, zero = plan.text, plan.totals, plan.sharding
    show(
        {
            "parameters": plan.parameters,
            "vocabulary": f"{text.vocab_size:,} tokens, by band {', '.join(f'{s:.1%}' for s in text.band_shares)}",
            "grid": f"{plan.data} data x {plan.tensor} tensor, ZeRO {zero.zero_stage}, {zero.precision}",
            "GPU": f"{plan.gpu}, {plan.memory / GIB:g} GiB, efficiency {plan.efficiency:.3g}",
            "steps": totals.steps,
            "tokens": totals.tokens,
            "FLOPs": totals.flops,
            "time": duration(totals.seconds),
            "time at the last length": duration(totals.seconds_at_last_length),
            "saved by stages": "unknown" if totals.saving is None else f"{totals.saving:.1%}",
        },
        as_json=False,
    )
    header = [f"stage {stage.stage.index + 1}" for stage in plan.stages]
    for title, rows in (("memory of a GPU", _MEMORY_ROWS), ("one step", _STEP_ROWS)):
        show_table([title, *header], ([name, *map(cell, plan.stages)] for name, cell in rows.items()))
    show_zero_stages(plan)
    if len(plan.scaling) > 1:
        show_scaling(plan)


def show_zero_stages(plan: RunEstimate) -> None:
    show_table(
        ["states of a GPU", "weights", "gradients", "optimizer", "sum"],
        (
            [f"ZeRO {stage}", *map(size, (s.weights, s.gradients, s.optimizer, s.weights + s.gradients + s.optimizer))]
            for stage, s in enumerate(plan.zero_stages)
        ),
    )  # fmt: skip


def show_scaling(plan: RunEstimate) -> None:
    show_table(
        ["GPUs", "step, s", "communication, s", "share", "tokens/s", ""],
        (
            [f"{scale.gpus:,}", f"{scale.step_seconds:.3g}", f"{scale.communication_seconds:.3g}",
             f"{scale.communication_share:.0%}", f"{scale.tokens_per_second:,.0f}",
             "communication dominates" if scale.dominates else ""]
            for scale in plan.scaling
        ),
    )  # fmt: skip


_MEMORY_ROWS: dict[str, Callable[[StageEstimate], object]] = {
    "weights": lambda plan: size(plan.memory.states.weights),
    "gradients": lambda plan: size(plan.memory.states.gradients),
    "optimizer": lambda plan: size(plan.memory.states.optimizer),
    "caches": lambda plan: size(plan.memory.caches),
    "buffers": lambda plan: size(plan.memory.states.buffers),
    "activations": lambda plan: size(plan.memory.activations.peak),
    "  of the blocks": lambda plan: size(plan.memory.activations.blocks),
    "  of embedding and logits": lambda plan: size(plan.memory.activations.vocabulary),
    "  without recompute": lambda plan: size(plan.unrecomputed),
    "  with recompute": lambda plan: size(plan.recomputed),
    "total": lambda plan: size(plan.memory.total),
    "and in host memory": lambda plan: size(plan.memory.states.host),
    "fits": lambda plan: plan.fits,
    "rows at once": lambda plan: f"{plan.stage.micro_rows} of {plan.stage.rows}",
    "largest micro_rows that fits": lambda plan: plan.largest_micro_rows or "none",
}
_STEP_ROWS: dict[str, Callable[[StageEstimate], object]] = {
    "segment + cache": lambda plan: f"{plan.stage.segment_length} + {plan.stage.cache_length}",
    "FLOPs a token": lambda plan: f"{plan.flops_per_token:.4g}",
    "  with dense attention": lambda plan: f"{plan.dense_flops_per_token:.4g}",
    "gradients sent, MB": lambda plan: f"{plan.traffic.gradients / 1e6:,.1f}",
    "weights sent, MB": lambda plan: f"{plan.traffic.weights / 1e6:,.1f}",
    "tensor-parallel sums sent, MB": lambda plan: f"{plan.traffic.tensor / 1e6:,.1f}",
    "arithmetic": lambda plan: duration(plan.time.compute),
    "update": lambda plan: duration(plan.time.update),
    "tensor-parallel messages": lambda plan: duration(plan.time.tensor),
    "data-parallel messages": lambda plan: duration(plan.time.data),
    "step": lambda plan: duration(plan.time.total),
    "steps": lambda plan: plan.extent.steps,
    "tokens": lambda plan: plan.extent.tokens,
    "stage": lambda plan: duration(plan.seconds),
}


if __name__ == "__main__":
    run_command(main)
