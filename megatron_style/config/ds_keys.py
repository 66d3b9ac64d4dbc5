"""The verdict on each key of a ds_config: the one table that the trainer and `docs/ds_config.md` read.

A key is honoured (DeepSpeed acts on it, or this project does), agreed (it may be present if it says what the run file
says), or refused. What the table does not know is refused as unknown; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_ALL_STAGES = (0, 1, 2, 3)
_SHARDED = (1, 2, 3)


@dataclass(frozen=True)
class Rule:
    verdict: Literal["honoured", "agreed", "refused"]
    why: str  # what it does here; for a refused key, what is wrong with it and what to do
    stages: tuple[int, ...] = _ALL_STAGES  # of ZeRO; at any other the key would have no effect
    off: tuple[Any, ...] = (False, None)  # for a refused key, the values that ask for nothing

    def asks_for_nothing(self, value: object) -> bool:
        return value in self.off or (isinstance(value, dict) and value.get("enabled", True) is False)


def _honoured(why: str, stages: tuple[int, ...] = _ALL_STAGES) -> Rule:
    return Rule("honoured", why, stages)


def _agreed(why: str) -> Rule:
    return Rule("agreed", why)


def _refused(why: str, *off: object) -> Rule:
    return Rule("refused", why, off=(*off, False, None) if off != (True,) else (True, None))


_NVME = "offloading to NVMe is not supported; offload to the cpu"
_EXPERT = "there are no experts in this model; remove it"
_REMOVED = "DeepSpeed 0.19 has removed it; remove it"

RULES: Mapping[str, Rule] = {
    # the batch, which belongs to the run file
    "train_batch_size": _agreed("left out, it is derived for each stage"),
    "train_micro_batch_size_per_gpu": _agreed("left out, it is derived for each stage"),
    "gradient_accumulation_steps": _agreed("left out, it is derived for each stage"),
    "gradient_clipping": _agreed("the norm to clip at, here or as optimizer.clip_norm of the run file"),
    "zero_allow_untested_optimizer": _refused("NAG is always allowed; remove it", True),
    "zero_force_ds_cpu_optimizer": _refused("the run file chooses the optimizer; set it to false or remove it"),
    "managed_gradient_accumulation": _refused("the trainer drives accumulation itself; remove it", True),
    "gradient_allreduce_op": _refused("the loss is a mean over all ranks; remove it", "mean"),
    # optimizer and schedule
    "optimizer.type": _honoured("one of those below, in place of optimizer.name of the run file"),
    "optimizer.params": _honoured("passed to that optimizer"),
    "optimizer.legacy_fusion": _refused("it belongs to fp16 without ZeRO; remove it"),
    "scheduler.type": _honoured("one of those below, in place of optimizer.learning_rate of the run file"),
    "scheduler.params": _honoured("passed to that schedule"),
    # precision
    "bf16.enabled": _honoured("weights and activations in bf16, master weights in float32"),
    "bf16.check_grad_overflow": _refused("a gradient that is not finite must not be applied; remove it", True),
    "bf16.immediate_grad_update": _refused("it has no effect with ZeRO; remove it"),
    "bf16.bf16_master_weights_and_grads": _refused("checkpoints hold master weights in float32; remove it"),
    "bf16.bf16_optimizer_states": _refused("checkpoints hold the optimizer's state in float32; remove it"),
    "fp16.enabled": _honoured("weights and activations in fp16, master weights in float32"),
    "fp16.loss_scale": _honoured("0: dynamic"),
    "fp16.initial_scale_power": _honoured("the first scale is 2 to this power"),
    "fp16.loss_scale_window": _honoured("steps without overflow before the scale is doubled"),
    "fp16.hysteresis": _honoured("overflows before the scale is halved"),
    "fp16.consecutive_hysteresis": _honoured("a step without overflow restores the hysteresis"),
    "fp16.min_loss_scale": _honoured("the scale is never lower"),
    "fp16.auto_cast": _refused("token ids are not to be cast; remove it"),
    "fp16.fp16_master_weights_and_grads": _refused("checkpoints hold master weights in float32; remove it"),
    "torch_autocast": _refused("use bf16 or fp16, which keep master weights in float32"),
    "amp": _refused(f"{_REMOVED}; use bf16 or fp16"),
    "data_types.grad_accum_dtype": _honoured("fp32: gradients of micro-batches are summed in float32"),
    "data_types.param_dtype": _refused("bf16 and fp16 decide it; remove it"),
    "data_types.buffer_dtype": _refused("the only buffer is the table of positions, in float32; remove it"),
    "data_types.keep_in_fp32_modules": _refused("the only buffer is the table of positions; remove it", "auto"),
    "communication_data_type": _refused("at ZeRO 2 DeepSpeed ignores it in bf16; use data_types.grad_accum_dtype"),
    "seq_parallel_communication_data_type": _refused("DeepSpeed's sequence parallelism is not used; remove it"),
    "prescale_gradients": _honoured("gradients are divided by the ranks before they are summed"),
    "gradient_predivide_factor": _honoured("with prescale_gradients: by this much before, the rest after"),
    "sparse_gradients": _refused(_REMOVED),
    # ZeRO
    "zero_optimization.stage": _honoured("0: nothing is sharded, 1: optimizer state, 2: gradients too, 3: weights too"),
    "zero_optimization.overlap_comm": _honoured("reductions run while backward computes", _SHARDED),
    "zero_optimization.contiguous_gradients": _honoured("gradients are copied into one buffer", _SHARDED),
    "zero_optimization.reduce_scatter": _honoured("reduce-scatter in place of all-reduce", _SHARDED),
    "zero_optimization.reduce_bucket_size": _honoured("elements reduced at once", _SHARDED),
    "zero_optimization.use_multi_rank_bucket_allreduce": _honoured("one bucket for several ranks", (1, 2)),
    "zero_optimization.allgather_partitions": _honoured("all-gather in place of broadcasts", (1, 2)),
    "zero_optimization.allgather_bucket_size": _honoured("elements gathered at once", (1, 2)),
    "zero_optimization.ignore_unused_parameters": _honoured("all parameters are used", _SHARDED),
    "zero_optimization.sub_group_size": _honoured("elements updated at once", (3,)),
    "zero_optimization.stage3_prefetch_bucket_size": _honoured("elements gathered ahead", (3,)),
    "zero_optimization.stage3_param_persistence_threshold": _honoured("smaller parameters are not sharded", (3,)),
    "zero_optimization.stage3_model_persistence_threshold": _honoured("the most elements that are not sharded", (3,)),
    "zero_optimization.stage3_max_live_parameters": _honoured("the most elements gathered at once", (3,)),
    "zero_optimization.stage3_max_reuse_distance": _honoured("parameters needed again sooner stay gathered", (3,)),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _honoured("all-reduce in place of all-gather", (3,)),
    "zero_optimization.stage3_allgather_sequential": _honoured("one parameter after the other is gathered", (3,)),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _honoured("a run always ends with a model", (3,)),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _honoured("a run always ends with a model", (3,)),
    "zero_optimization.stage3_module_granularity_threshold": _refused("weights would not be gathered; remove it", 0),
    "zero_optimization.zero_hpz_partition_size": _honoured("a second copy of the shards, over N ranks", (3,)),
    "zero_optimization.memory_efficient_linear": _honoured("linear layers keep no gathered weight", (3,)),
    "zero_optimization.leaf_module": _honoured("modules whose parameters are gathered together", (3,)),
    "zero_optimization.log_trace_cache_warnings": _honoured("warns when the order of modules changes", (3,)),
    "zero_optimization.override_module_apply": _honoured("Module.apply sees gathered parameters", (3,)),
    "zero_optimization.enable_sanity_checks": _honoured("compares what the ranks do", _SHARDED),
    "zero_optimization.round_robin_gradients": _refused("DeepSpeed's map of its weights is wrong with it; remove it"),
    "zero_optimization.parameter_alignment": _refused("checkpoints have no gaps between parameters; remove it"),
    "zero_optimization.compute_grad_norm": _refused("clipping and the record of a run need the norm; remove it", True),
    "zero_optimization.load_from_fp32_weights": _refused("a resumed run would differ; remove it", True),
    "zero_optimization.elastic_checkpoint": _refused("such a checkpoint cannot be loaded; runs resume on any grid"),
    "zero_optimization.pipeline_loading_checkpoint": _refused("there is no pipeline; remove it"),
    "zero_optimization.legacy_stage1": _refused(_REMOVED),
    "zero_optimization.zero_quantized_weights": _refused("grids would differ; remove it"),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused("all weights are trained; remove it"),
    "zero_optimization.zero_quantized_gradients": _refused("grids would differ; remove it"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _refused("Muon is not supported; remove it"),
    "zero_optimization.zenflow": _refused("updates would come a step late; remove it"),
    "zero_optimization.cpu_offload": _refused("use offload_optimizer: {device: cpu}"),
    "zero_optimization.cpu_offload_param": _refused("use offload_param: {device: cpu}"),
    "zero_optimization.cpu_offload_use_pin_memory": _refused("use offload_optimizer: {pin_memory: true}"),
    "zero_optimization.offload_optimizer.device": _honoured("cpu: optimizer state in host memory", _SHARDED),
    "zero_optimization.offload_optimizer.pin_memory": _honoured("pinned host memory", _SHARDED),
    "zero_optimization.offload_optimizer.ratio": _refused("all of the state is offloaded; remove it", 1.0),
    "zero_optimization.offload_optimizer.super_offload": _refused("it is untested; remove it"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _refused("it belongs to super_offload; remove it", 0.8),
    "zero_optimization.offload_optimizer.nvme_path": _refused(_NVME),
    "zero_optimization.offload_optimizer.buffer_count": _refused(_NVME, 4),
    "zero_optimization.offload_optimizer.pipeline_read": _refused(_NVME),
    "zero_optimization.offload_optimizer.pipeline_write": _refused(_NVME),
    "zero_optimization.offload_optimizer.fast_init": _refused(_NVME),
    "zero_optimization.offload_param.device": _honoured("cpu: weights in host memory", (3,)),
    "zero_optimization.offload_param.pin_memory": _honoured("pinned host memory", (3,)),
    "zero_optimization.offload_param.nvme_path": _refused(_NVME),
    "zero_optimization.offload_param.buffer_count": _refused(_NVME, 5),
    "zero_optimization.offload_param.buffer_size": _refused(_NVME, 1e8),
    "zero_optimization.offload_param.max_in_cpu": _refused(_NVME, 1e9),
    "aio": _refused(_NVME),
    "disable_allgather": _refused("DeepSpeed does not read it; remove it"),
    # watching
    "steps_per_print": _honoured("DeepSpeed's own line every N steps, on standard error"),
    "wall_clock_breakdown": _honoured("DeepSpeed's times of forward, backward and step, on standard error"),
    "memory_breakdown": _honoured("DeepSpeed's memory around each step, on standard error"),
    "dump_state": _honoured("DeepSpeed's settings at the start, on standard error"),
    "comms_logger.enabled": _honoured("a summary of DeepSpeed's collectives at the end, on standard error"),
    "comms_logger.prof_all": _honoured("all kinds of collectives"),
    "comms_logger.prof_ops": _honoured("only these kinds"),
    "comms_logger.verbose": _honoured("each collective as it happens"),
    "comms_logger.debug": _honoured("with the name of the caller"),
    "flops_profiler.enabled": _honoured("DeepSpeed's profile of one step"),
    "flops_profiler.profile_step": _honoured("of which step"),
    "flops_profiler.module_depth": _honoured("to which depth of modules"),
    "flops_profiler.top_modules": _honoured("how many modules at each depth"),
    "flops_profiler.detailed": _honoured("module by module"),
    "flops_profiler.output_file": _honoured("into a file"),
    "flops_profiler.recompute_fwd_factor": _honoured("forward passes that recompute adds"),
    "tensorboard.enabled": _honoured("DeepSpeed's own events in addition to the run's"),
    "tensorboard.output_path": _honoured("where"),
    "tensorboard.job_name": _honoured("under which name"),
    "csv_monitor.enabled": _honoured("the run's figures as CSV files"),
    "csv_monitor.output_path": _honoured("where"),
    "csv_monitor.job_name": _honoured("under which name"),
    "wandb.enabled": _honoured("the run's figures in Weights & Biases; needs its package"),
    "wandb.group": _honoured("which group"),
    "wandb.team": _honoured("which team"),
    "wandb.project": _honoured("which project"),
    "comet.enabled": _honoured("the run's figures in Comet; needs its package"),
    "comet.samples_log_interval": _honoured("how often"),
    "comet.project": _honoured("which project"),
    "comet.workspace": _honoured("which workspace"),
    "comet.api_key": _honoured("the key"),
    "comet.experiment_name": _honoured("under which name"),
    "comet.experiment_key": _honoured("which experiment"),
    "comet.online": _honoured("online or offline"),
    "comet.mode": _honoured("a new experiment or an old one"),
    "timers": _refused("it counts samples, which have several lengths here; output.log_every shows tokens per second"),
    "log_level": _refused("DeepSpeed's warnings are shown, and what the keys above ask for; remove it"),
    # checkpoints
    "checkpoint.tag_validation": _honoured("compares the names of checkpoints between ranks"),
    "checkpoint.load_universal": _refused("the run could not resume; `start` of the run file reads universal ones"),
    "checkpoint.use_node_local_storage": _refused("a checkpoint is complete in one place only; remove it"),
    "checkpoint.parallel_write": _refused("there is no pipeline; remove it"),
    "checkpoint.writer": _refused("it needs pipeline parallelism; remove it"),
    # other ways to train
    "activation_checkpointing": _refused("parallel.recompute of the run file decides it; remove it"),
    "compile": _refused("torch.compile is not faster here and recompiles for each shape; remove it"),
    "autotuning": _refused("it would end the run after a few steps; `plan` finds micro-batches"),
    "elasticity": _refused(f"{_REMOVED}; runs resume on any grid"),
    "curriculum_learning": _refused("stages of the run file are the curriculum; remove it"),
    "data_efficiency": _refused("the run file decides which text is read; remove it"),
    "dataloader_drop_last": _refused("every token is read; remove it"),
    "hybrid_engine": _refused("`generate` decodes; remove it"),
    "pipeline": _refused("there is no pipeline parallelism; remove it"),
    "tensor_parallel": _refused("parallel.tensor of the run file decides it; remove it", {}),
    "expert_parallel": _refused(_EXPERT),
    "use_data_before_expert_parallelism": _refused(_EXPERT),
    "weight_quantization": _refused("grids would differ; remove it"),
    "compression_training": _refused("grids would differ; remove it"),
    "vocabulary_size": _refused("the corpus decides it; remove it"),
    "disable_python_gc": _refused("it is untested; remove it"),
    "datastates": _refused("checkpoints are written by the trainer; remove it"),
}  # fmt: skip

OPTIMIZERS = ("Adam", "AdamW", "Lion", "SGD", "NAdam", "RAdam", "RMSprop")
NO_OPTIMIZERS: Mapping[str, str] = {
    "muon": "DeepSpeed computes it differently at each ZeRO stage and for each tensor-parallel shard",
    "adagrad": "ZeRO rebuilds it without its parameter groups, so that all parameters would decay",
    "lamb": "its trust ratio would be that of a ZeRO slice, not of a layer",
}
SETS_RATE = ("WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest")
SCALES_RATE = ("WarmupCosineLR",)  # multiplies the optimizer's own rate, which therefore has to be set
BLOCKS = frozenset(path.rpartition(".")[0] for path in RULES if "." in path)
