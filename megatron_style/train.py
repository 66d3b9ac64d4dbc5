"""Train a Shortformer. Read this file first: it is the training loop, top to bottom.

deepspeed --module megatron_style.train run_configs/quickstart.yaml
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("train")  # reads the run file first, then imports this file and calls train: the imports below take seconds

import math
import time
from dataclasses import replace

from megatron_style.base.errors import Diverged, Stopped
from megatron_style.checkpoint.origin import Progress
from megatron_style.checkpoint.store import CheckpointStore
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from megatron_style.config.train_arguments import parse_train_arguments
from megatron_style.data.corpus import Corpus, keep_tokenizer, open_text
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.preflight import check_only, preflight
from megatron_style.engine.session import distributed_session
from megatron_style.engine.spikes import look_for_spike
from megatron_style.formats.model_folder import export
from megatron_style.formats.start import open_start
from megatron_style.inference.held_out import held_out
from megatron_style.journal.journal import Journal
from megatron_style.parallel.collectives import broadcast_json
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.learning_rate import learning_rate_at
from megatron_style.schedule.stages import StageSchedule
from megatron_style.supervision.run_guard import guard_run
from megatron_style.supervision.signals import StopSignals, leave_early
from megatron_style.supervision.stop import StopRequest

_LAST = 3  # updates that must not all be skipped at the end; in fp16 a single one is normal
_REMEDY = "resume from an earlier checkpoint with a lower learning rate"


def main() -> None:
    arguments = parse_train_arguments()
    run = load_run(arguments.run_file, arguments.settings)
    train(run, resume_from=arguments.resume_from, dry_run=arguments.dry_run, profile=arguments.profile)


def train(
    run: RunConfig,
    signals: StopSignals | None = None,
    *,
    resume_from: int | None = None,
    dry_run: bool = False,
    profile: int | None = None,
) -> None:
    signals = signals or StopSignals(react=leave_early)
    with (
        distributed_session(tensor=run.parallel.tensor) as topology,
        guard_run(run.output.path, signals, timeout=run.output.heartbeat_timeout) as (heartbeat, terminal),
    ):
        run, corpus = open_text(run.on_ranks(topology.data.size), check_ids=topology.is_first)
        checkpoints = CheckpointStore(run, topology)
        origin = checkpoints.origin(resume_from) or open_start(run, topology)
        schedule = StageSchedule(
            run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size, history=origin.history
        )
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        progress = origin.load(engine, schedule)
        if dry_run:
            check_only(engine, schedule.stages_from(progress.step), is_first=topology.is_first)
        if topology.is_first:
            keep_tokenizer(corpus, run.output.path)
        request = StopRequest(signals, run.output, engine.device)

        with (
            Journal(
                run, schedule, engine, topology, first_step=progress.step, terminal=terminal, profile_steps=profile
            ) as journal,
            checkpoints,
        ):
            heartbeat.at(progress.step, "preflight")
            for stage, peak in preflight(engine, schedule.stages_from(progress.step)):
                journal.preflight(stage, peak)
            for step in range(progress.step, schedule.total_steps):
                heartbeat.at(step, "training")
                journal.saved(step + 1, checkpoints.finished())  # raises what went wrong in the background
                plan = schedule.plan(step)
                if schedule.opens_stage(step):
                    journal.stage_opens(plan)
                begin = time.monotonic()
                loss, caches = accumulate_gradients(engine, corpus, plan, progress.caches, topology, run.seed)
                # Frees the old caches, whose memory the update needs.
                progress = replace(progress, step=step + 1, caches=caches)
                losses, spike = look_for_spike(run.optimizer.spike, progress.losses, loss.nll, topology)
                progress = replace(progress, losses=losses)
                rate = learning_rate_at(step, run.optimizer.learning_rate, schedule.total_steps)
                with engine.times.measure("update"):
                    update = engine.update(rate, spike=spike)

                stage_ends = schedule.closes_stage(step)
                asked = request.agreed()
                evaluates = due(progress.step, run.output.evaluate_every) or stage_ends
                saves = due(progress.step, run.output.save_steps) or asked.save or stage_ends
                journal.step(plan, loss, update, time.monotonic() - begin,
                             show=due(progress.step, run.output.log_every) or saves or evaluates)  # fmt: skip
                if spike is not None and spike.action == "stop":
                    raise Diverged(f"step {progress.step}: {spike} (optimizer.spike); {_REMEDY}")
                if evaluates:
                    heartbeat.at(progress.step, "evaluating")
                    progress = evaluated(progress, run, corpus, engine, schedule, topology, journal)
                    saves = saves or (run.output.keep_best and progress.is_best)
                if progress.step == schedule.total_steps and engine.skipped_in_a_row >= min(_LAST, progress.step):
                    raise Diverged(f"the gradients of the last steps are not finite; {_REMEDY}")
                if stage_ends:
                    journal.stage_closes(plan)
                if saves:  # last, so that a resumed run has everything of this step on record
                    heartbeat.at(progress.step, "saving")
                    journal.flush(progress.step)
                    checkpoints.save(engine, progress, schedule)
                    request.saved()
                if asked.stop and progress.step < schedule.total_steps:
                    journal.saved(progress.step, checkpoints.finished(wait=True))
                    raise Stopped(f"stopped after step {progress.step}: {asked.stop}; start it again to resume")
            journal.saved(progress.step, checkpoints.finished(wait=True))
            export(engine.state.full_weight, run, corpus, schedule, is_first=topology.is_first)
            engine.sum_up()
            journal.finished(progress.best and progress.best.step)


def evaluated(
    progress: Progress,
    run: RunConfig,
    corpus: Corpus,
    engine: TrainingEngine,
    schedule: StageSchedule,
    topology: Topology,
    journal: Journal,
) -> Progress:
    """Score every held-out text, and return the progress with the loss of the main one."""
    for name in corpus.valid:
        is_main = name == corpus.main_valid
        found = held_out(engine.model, corpus, name, run.output, schedule.stages[-1], topology.data)
        journal.held_out(progress.step, found, name, is_main=is_main)
        if not math.isfinite(found.loss):
            raise Diverged(f"step {progress.step}: the held-out loss is {found.loss}; {_REMEDY}")
        if is_main:
            progress = progress.evaluated(broadcast_json(found.loss), found.text_digest)
    return progress


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
