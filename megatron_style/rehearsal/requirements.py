"""The requirements of a run, found without a launch: which hosts and numbers of processes fit, how large a checkpoint
is."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_style.base.command import Finding
from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus, open_text
from megatron_style.data.store import store_files
from megatron_style.hosts.diagnosis import Demands, diagnose
from megatron_style.hosts.hosts import Host
from megatron_style.model.shape import count_parameters
from megatron_style.parallel.topology import check_world
from megatron_style.schedule.stages import StageSchedule

_BYTES_A_PARAMETER = 16  # the most: float32 weights and two moments, and a copy of the weights at half precision


def check_hosts(hosts: Sequence[Host], run: RunConfig | None) -> list[Finding]:
    """Ask the hosts and, if all of them answer, check the run on the processes that a launch would start."""
    diagnosis = diagnose(hosts, demands_of(run) if run else Demands())
    findings = list(diagnosis.findings)
    if run and diagnosis.processes is not None:
        findings.append(judge_run(run, diagnosis.processes))
    return findings


def demands_of(run: RunConfig) -> Demands:
    return Demands(
        folder=run.output.path,
        files=tuple(path for prefix in run.data.prefixes for path in store_files(prefix)),
        checkpoint_bytes=bytes_of_checkpoint(run),
        checkpoints=run.output.keep_last + 1,  # the next one is written before the oldest is removed
    )


def check_run(run: RunConfig, world: int) -> int:
    """Return the run's number of steps on `world` processes, or refuse it with the message with which `train` would."""
    from megatron_style.engine.ds_config import check_one_home, complete_ds_config, read_ds_config  # takes seconds

    check_world(world, run.parallel.tensor)
    data_parallel = world // run.parallel.tensor
    run, corpus = open_text(run.on_ranks(data_parallel))
    schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=data_parallel)
    user = read_ds_config(run.deepspeed)
    check_one_home(user, run)
    complete_ds_config(user, run, schedule.stages, data_parallel=data_parallel)
    return schedule.total_steps


def judge_run(run: RunConfig, world: int) -> Finding:
    """Say whether `train` would start on this number of processes."""
    try:
        steps = check_run(run, world)
    except UserError as error:
        return Finding("FAIL", "run", str(error))
    return Finding("ok", "run", f"{steps:,} steps on {world} process(es)")


def bytes_of_checkpoint(run: RunConfig) -> int | None:
    """Return an estimate, or `None` without a readable corpus: the size depends on the vocabulary."""
    try:
        vocab_size = open_corpus(run.data, check_ids=False).vocab_size
        model = run.model.with_vocabulary(vocab_size)
    except UserError:
        return None
    return _BYTES_A_PARAMETER * count_parameters(model, vocab_size)
