"""Train a Shortformer. Read this file first: it is the complete program, top to bottom.

deepspeed --module megatron_style.train run_configs/quickstart.yaml
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style.__main__ import start

    start("train")  # parses the flags first, then imports this file and calls main: the imports below take seconds

import math
import time
from dataclasses import replace

import torch

from megatron_style.base.errors import Diverged, Stopped
from megatron_style.base.files import remove_leftovers
from megatron_style.base.run_folder import RunFolder
from megatron_style.checkpoint.origin import Progress
from megatron_style.checkpoint.store import CheckpointStore
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig, SpikeConfig, load_run
from megatron_style.config.train_arguments import parse_train_arguments
from megatron_style.data.batch import read_batch
from megatron_style.data.corpus import Corpus, keep_tokenizer, open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import LossShare, TrainingEngine
from megatron_style.engine.preflight import preflight
from megatron_style.engine.session import distributed_session
from megatron_style.engine.spikes import Spike, extend_window, find_spike, loss_of_all_ranks
from megatron_style.formats.model_folder import write_atomically
from megatron_style.formats.source import ModelSource
from megatron_style.formats.start import open_start
from megatron_style.inference.held_out import held_out
from megatron_style.journal.journal import Journal
from megatron_style.model.memory import Memory
from megatron_style.parallel.randomness import Noise, derive_key, seed_sharded_dropout
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.learning_rate import learning_rate_at
from megatron_style.schedule.stages import StageSchedule, StepPlan
from megatron_style.supervision.run_guard import guard_run
from megatron_style.supervision.signals import StopSignals, leave_early
from megatron_style.supervision.stop import StopRequest

_LAST = 3  # updates that must not all be skipped at the end; in fp16 a single one is normal
_REMEDY = "resume from an earlier checkpoint with a lower learning rate"


def main(signals: StopSignals | None = None) -> None:
    run_file, settings = parse_train_arguments()
    train(load_run(run_file, settings), signals)


def train(run: RunConfig, signals: StopSignals | None = None) -> None:
    signals = signals or StopSignals(react=leave_early)
    with (
        distributed_session(tensor=run.parallel.tensor) as topology,
        guard_run(run.output.path, signals) as (heartbeat, terminal),
    ):
        corpus = open_corpus(run.data, check_ids=topology.is_first)
        run.model.check_vocabulary(corpus.vocab_size)
        checkpoints = CheckpointStore(run, topology)
        origin = checkpoints.newest() or open_start(run, topology)
        schedule = StageSchedule(
            run, corpus_tokens=len(corpus.train), data_parallel=topology.data.size, history=origin.history
        )
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        progress = origin.load(engine, schedule)
        if topology.is_first:
            keep_tokenizer(corpus, run.output.path)
        stop = StopRequest(signals, after_seconds=run.output.stop_seconds, device=engine.device)

        with Journal(run, schedule, engine, topology, first_step=progress.step, terminal=terminal) as journal:
            heartbeat.at(progress.step, "preflight")
            for stage, peak in preflight(engine, schedule.stages_from(progress.step)):
                journal.preflight(stage, peak)
            for step in range(progress.step, schedule.total_steps):
                heartbeat.at(step, "training")
                plan = schedule.plan(step)
                if schedule.opens_stage(step):
                    journal.stage_opens(plan)
                begin = time.monotonic()
                loss, caches = accumulate_gradients(engine, corpus, plan, progress.caches, topology, run.seed)
                # Frees the old caches, whose memory the update needs.
                progress = replace(progress, step=step + 1, caches=caches)
                progress, spike = look_for_spike(run.optimizer.spike, progress, loss, topology)
                rate = learning_rate_at(step, run.optimizer.learning_rate, schedule.total_steps)
                update = engine.update(rate, spike=spike)

                stage_ends = schedule.closes_stage(step)
                reason = stop.agreed()
                saves = due(progress.step, run.output.save_every) or stage_ends or reason is not None
                journal.step(plan, loss, update, time.monotonic() - begin,
                             show=due(progress.step, run.output.log_every) or saves)  # fmt: skip
                if spike is not None and spike.action == "stop":
                    raise Diverged(f"step {progress.step}: {spike} (optimizer.spike); {_REMEDY}")
                if due(progress.step, run.output.evaluate_every) or stage_ends:
                    heartbeat.at(progress.step, "evaluating")
                    found = held_out(engine.model, corpus, run.output, schedule.stages[-1])
                    journal.held_out(progress.step, found)
                    progress = replace(progress, sound=sound_step(progress.step, found.loss))
                if progress.step == schedule.total_steps and engine.skipped_in_a_row >= min(_LAST, progress.step):
                    raise Diverged(f"the gradients of the last steps are not finite; {_REMEDY}")
                if stage_ends:
                    journal.stage_closes(plan)
                if saves:  # last, so that a resumed run has everything of this step on record
                    heartbeat.at(progress.step, "saving")
                    journal.flush(progress.step)
                    checkpoints.save(engine, progress, schedule)
                if reason and progress.step < schedule.total_steps:
                    raise Stopped(f"stopped after step {progress.step}: {reason}; start it again to resume")
            export(engine, run, corpus, schedule, topology)
            engine.sum_up()


def accumulate_gradients(
    engine: TrainingEngine,
    corpus: Corpus,
    plan: StepPlan,
    caches: tuple[Memory, ...],
    topology: Topology,
    seed: int,
) -> tuple[LossShare, tuple[Memory, ...]]:
    """Do the forward and backward passes of one step's micro-batches, each with its own lanes and memory."""
    stage = plan.stage
    share = torch.zeros((), device=engine.device)
    auxiliary: dict[str, torch.Tensor] = {}
    next_caches = []
    for micro in range(stage.accumulation):
        batch = read_batch(corpus.train.tokens, plan.read(data_rank=topology.data.rank, micro=micro), eos=corpus.eos)
        inputs, targets, counted = map(torch.from_numpy, (batch.inputs, batch.targets, batch.counted))
        memory = engine.model.empty_memory(stage.micro_rows, stage.cache_length) if plan.opens_lanes else caches[micro]
        noise = Noise(derive_key(seed, "dropout", plan.step, topology.data.rank, micro))
        seed_sharded_dropout(noise, tensor_rank=topology.tensor.rank)

        output = engine.forward(inputs, targets, memory, noise)
        micro_share = (output.nll * counted.to(engine.device, non_blocking=True)).sum() / plan.tokens
        further = {name: loss / stage.accumulation for name, loss in output.auxiliary.items()}
        total = micro_share * topology.data.size + sum(further.values())  # the engine takes the mean over the ranks
        engine.accumulate(total, is_last=micro == stage.accumulation - 1)

        share += micro_share.detach()
        for name, loss in further.items():
            auxiliary[name] = auxiliary.get(name, 0.0) + loss.detach()
        next_caches.append(output.memory)
    return LossShare(share, auxiliary), tuple(next_caches)


def look_for_spike(
    config: SpikeConfig | None, progress: Progress, share: LossShare, topology: Topology
) -> tuple[Progress, Spike | None]:
    """Compare the loss of the step with those before it, and keep it for later steps. A run without
    `optimizer.spike` does not wait for the loss."""
    if config is None:
        return replace(progress, losses=()), None
    loss = loss_of_all_ranks(share.nll, topology)
    spike = find_spike(config, progress.losses, loss)
    return replace(progress, losses=extend_window(config, progress.losses, loss)), spike


def export(engine: TrainingEngine, run: RunConfig, corpus: Corpus, schedule: StageSchedule, topology: Topology) -> None:
    weights = engine.full_weights()
    last = schedule.stages[-1]
    if topology.is_first:
        config = ModelFolderConfig(
            model=run.model,
            vocab_size=corpus.vocab_size,
            eos=corpus.eos,
            segment_length=last.segment_length,
            cache_length=last.cache_length,
            step=schedule.total_steps,
        )
        folder = RunFolder(run.output.path).model
        remove_leftovers(folder)  # safe, since this run holds the folder's lock
        write_atomically(folder, ModelSource(folder, config, weights.__getitem__, lambda: corpus.tokenizer))


def sound_step(step: int, held_out_loss: float) -> int:
    """Return the step if the held-out loss is finite; otherwise the run has diverged."""
    if not math.isfinite(held_out_loss):
        raise Diverged(f"step {step}: the held-out loss is {held_out_loss}; {_REMEDY}")
    return step


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
