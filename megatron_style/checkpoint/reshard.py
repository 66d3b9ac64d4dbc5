"""Write a checkpoint for another grid without that grid: its ranks run here, on the CPU, one process each."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.checkpoint.manifest import Manifest, open_checkpoint
from megatron_style.checkpoint.store import CheckpointStore
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import save_run
from megatron_style.data.corpus import tokenizer_of_run
from megatron_style.engine.build import build_engine
from megatron_style.engine.session import distributed_session
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.stages import StageSchedule


def reshard(path: Path, output: Path, *, tensor: int, data: int) -> None:
    """Write `output` as the folder of a run with this one checkpoint."""
    if output.exists() and any(output.iterdir()):
        raise UserError(f"--output {output}: exists and is not empty; choose a new folder")
    folder, manifest = open_checkpoint(path)
    update = manifest.history[-1][1]
    if update % data:
        raise UserError(f"--data {data}: must divide the {update} tokens of an update, which stay as they are")
    settings = json.loads(json.dumps(manifest.run))
    settings["parallel"]["tensor"] = tensor
    settings["data"]["tokens_per_batch"] = update // data
    settings["output"]["path"] = str(output)
    settings["deepspeed"] = str(output / "ds_config.json")
    run = RunConfig.parse(settings, source=str(folder))
    output.mkdir(parents=True, exist_ok=True)
    (output / "ds_config.json").write_text(json.dumps(manifest.ds_config, indent=2) + "\n", encoding="utf-8")
    run_ranks(tensor * data, _write_rank, run, folder, manifest)
    save_run(run, RunFolder(output).run_file)
    tokenizer = tokenizer_of_run(folder.parent.parent, run.data)
    if tokenizer is not None:
        tokenizer.save(output)


def _write_rank(run: RunConfig, folder: Path, manifest: Manifest) -> None:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        schedule = StageSchedule(
            run,
            corpus_tokens=manifest.source_tokens,
            data_parallel=topology.data.size,
            history=manifest.history,
        )
        engine = build_engine(run, schedule, manifest.vocab_size, topology)
        store = CheckpointStore(run, topology)
        progress = store.restore(folder, manifest, engine, schedule)
        store.save(engine, progress, schedule)
        store.finished(wait=True)
