"""Table 10, the largest batches that fit a GPU, by the planner's formulas: the paper's model, whatever the scale."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.config.run_file import load_run
from megatron_style.config.shipped import shipped_file
from megatron_style.paper.runs import Model
from megatron_style.planning.estimate import USABLE
from megatron_style.planning.hardware import gpu_named
from megatron_style.planning.memory import estimate_memory
from megatron_style.planning.setup import Kernels, Setup, Sharding
from megatron_style.planning.text import zipf_shares
from megatron_style.schedule.stages import Stage

WIKITEXT_VOCAB = 267_744
# The paper trained in fp16 with kernels of 2020: attention holds its matrix (the softmax in fp32, as torch's plain
# kernel still has it); logits, their logarithms and the gradient of each are fp16.
KERNELS_OF_2020 = Kernels(fused_attention=False, bytes_kept_per_score=4, bytes_needed_per_score=4, widened_scores=0)
REFERENCE = Sharding(zero_stage=1, precision="fp16", bucket=0)  # one GPU: no shards, but fp32 master weights
_MOST_ROWS = 1 << 12


@dataclass(frozen=True)
class PlannedStage:
    """A stage of training that is planned, not run."""

    model: Model
    length: int


@dataclass(frozen=True)
class LargestBatch:
    """Rows of a stage that fit a V100 of 32 GB."""

    def read(self, stage: PlannedStage) -> int:
        return largest_batch(stage)


def largest_batch(stage: PlannedStage) -> int:
    model = load_run(shipped_file(f"run_configs/wikitext103_{stage.model}.yaml")).model
    shares = zipf_shares(model, WIKITEXT_VOCAB)
    setup = Setup(model, WIKITEXT_VOCAB, shares, REFERENCE, kernels=KERNELS_OF_2020)
    room = USABLE * gpu_named("v100-32gb").memory - 4 * setup.parameters  # fairseq keeps full gradients too

    def fits(rows: int) -> bool:
        shape = Stage(0, stage.length, stage.length if model.cache else 0, rows, micro_rows=rows)
        return estimate_memory(setup, shape).total <= room

    low, high = 0, _MOST_ROWS  # memory grows with rows: bisect
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
