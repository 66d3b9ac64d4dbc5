"""Build the engine of a run."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfigError

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.engine.ds_config import (
    check_one_home,
    clip_norm,
    complete_ds_config,
    explained,
    monitor_of,
    read_ds_config,
    speaks,
)
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.extensions import announced_compilations
from megatron_style.engine.optimizer import make_optimizer, parameter_groups
from megatron_style.engine.zero_layout import initialise_partitioned
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import StageSchedule

# What DeepSpeed raises about settings, as opposed to memory, devices or the network.
_WRONG_SETTINGS = (
    DeepSpeedConfigError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ImportError,
    NotImplementedError,
)


@announced_compilations()
def build_engine(run: RunConfig, schedule: StageSchedule, vocab_size: int, topology: Topology) -> TrainingEngine:
    user = read_ds_config(run.deepspeed)
    check_one_home(user, run)
    ds_config = complete_ds_config(user, run, schedule.stages, data_parallel=topology.data.size)
    parallel = run.parallel
    model = Shortformer(
        run.model, vocab_size, topology.tensor, recompute=parallel.recompute, sequence=parallel.sequence
    )
    optimizer: torch.optim.Optimizer | list[dict[str, Any]]
    if "optimizer" in user:
        weight_decay = user["optimizer"].get("params", {}).get("weight_decay")
        optimizer = parameter_groups(model, run.optimizer.decay or "matrices", weight_decay)
    else:
        offload = user.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
        optimizer = make_optimizer(run.optimizer, model, on_cpu=offload == "cpu")
    try:
        if ds_config.get("zero_optimization", {}).get("stage", 0) == 3:
            initialise_partitioned(model, run.seed, topology, ds_config)
        else:
            initialise(model, run.seed, topology.tensor)
        return TrainingEngine(
            model,
            optimizer,
            ds_config,
            topology,
            clip_norm=clip_norm(user, run),
            max_skipped=run.optimizer.max_skipped,
            cache=parallel.cache,
            speaks=speaks(user),
        )
    except _WRONG_SETTINGS as error:
        raise explained(error, user, run.deepspeed) from error
    except Exception as error:
        if (monitor := monitor_of(error)) is None:
            raise
        reason = " ".join(f"{error}".split())
        raise UserError(f"{monitor}: refuses to start: {reason}; or leave it out of the run") from error
