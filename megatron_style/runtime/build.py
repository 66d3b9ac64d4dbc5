"""From a run to an engine that can train it."""

from __future__ import annotations

from megatron_style.config.run import RunConfig
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Topology
from megatron_style.runtime.ds_config import check_one_home, clip_norm, complete_ds_config, read_ds_config
from megatron_style.runtime.engine import TrainingEngine
from megatron_style.runtime.optimizer import make_optimizer
from megatron_style.schedule.stages import StageSchedule


def build_engine(run: RunConfig, schedule: StageSchedule, vocab_size: int, topology: Topology) -> TrainingEngine:
    user = read_ds_config(run.deepspeed)
    check_one_home(user, run)
    ds_config = complete_ds_config(user, run, schedule.stages, data_parallel=topology.data.size)
    model = Shortformer(run.model, vocab_size, topology.tensor, recompute=run.parallel.recompute)
    initialise(model, run.seed, topology.tensor)
    optimizer = None
    if "optimizer" not in user:
        offload = user.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
        optimizer = make_optimizer(run.optimizer, model.parameters(), on_cpu=offload == "cpu")
    return TrainingEngine(
        model,
        optimizer,
        ds_config,
        topology,
        clip_norm=clip_norm(user, run),
        max_skipped=run.optimizer.max_skipped,
    )
