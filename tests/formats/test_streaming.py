"""A conversion's memory does not grow with the depth of a model or its grid, here of eight tensor-parallel ranks under
ZeRO 3. Only anonymous memory counts: the system can drop pages of mapped files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_style.checkpoint.origin import Progress
from megatron_style.checkpoint.store import CheckpointStore
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.engine.build import build_engine
from megatron_style.engine.session import distributed_session
from megatron_style.formats import model_folder
from megatron_style.formats.formats import open_model
from megatron_style.formats.source import ModelSource, parameters_of
from megatron_style.formats.transfer import EXTRA_MEMORY
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.stages import StageSchedule
from tests.support.resuming import make_run
from tests.support.training import write_corpus

ROOT = Path(__file__).resolve().parents[2]
STATUS = "/proc/{}/status"
LARGE = {"layers": 8, "hidden_size": 384, "heads": 8, "ffn_size": 1536}  # with its state, 180 MB
TINY = {"layers": 2, "hidden_size": 16, "heads": 8, "ffn_size": 32}
pytestmark = pytest.mark.skipif(not Path(STATUS.format("self")).exists(), reason="Linux tells what a process holds")


def save_after_one_step(run: RunConfig, vocab_size: int) -> None:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        schedule = StageSchedule(run, corpus_tokens=1200, data_parallel=1)
        engine = build_engine(run, schedule, vocab_size, topology)
        ids = torch.arange(8)[None]
        nll, *_ = engine.forward(ids, ids, engine.model.empty_memory(1, 0), None)
        engine.accumulate(nll.mean(), is_last=True)
        engine.update(0.001)
        CheckpointStore(run, topology).save(engine, Progress(1), schedule)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large and a tiny checkpoint with AdamW's state, and the large one as a folder with NAG's."""
    folder = tmp_path_factory.mktemp("streaming")
    write_corpus(folder)
    adam = {"name": "adamw", "learning_rate": {"peak": 0.001}}
    for name, sizes, vocab_size, ranks in (("large", LARGE, 2048, 8), ("tiny", TINY, 50, 1)):
        model = sizes | {"vocabulary": {"kind": "tied"}}
        run = make_run(folder, name, tensor=ranks, zero=3, steps=2, model=model, optimizer=adam)
        run_ranks(ranks, save_after_one_step, run, vocab_size)
    write_with_momentum(folder / "large_nag", open_model(folder / "large"))
    return folder


def write_with_momentum(folder: Path, source: ModelSource) -> None:
    data = source.config.as_data()
    config = ModelFolderConfig.parse(data | {"training": data["training"] | {"optimizer": "nag"}}, source=str(folder))
    with_momentum = replace(source, config=config, state=lambda name: {"momentum_buffer": source.weight(name)})
    model_folder.write_atomically(folder, with_momentum)


@pytest.fixture(scope="module")
def at_least(folder: Path) -> int:
    """What the command holds whatever it converts."""
    return peak_of("export", folder / "tiny", "--output", folder / "exported", "--optimizer")


def peak_of(*words: object) -> int:
    line = [sys.executable, "-m", "megatron_style.convert", *map(str, words), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process, most = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE), 0
    while process.poll() is None:
        most = max(most, held_by(process.pid))
        time.sleep(0.001)
    assert json.loads(process.communicate()[0])["largest_nll_difference"] == 0
    return most


def held_by(pid: int) -> int:
    lines = Path(STATUS.format(pid)).read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def allowed(config: ModelFolderConfig, state_bytes: int) -> int:
    """One parameter with so many bytes of state for each of its numbers, the vocabulary or a block in float64, and
    what `transfer` states. Much less than the weights alone, or this would prove nothing."""
    counts = {name: math.prod(layout.shape) for name, layout in parameters_of(config).items()}
    vocabulary, block = (
        sum(count for name, count in counts.items() if name.startswith(prefix)) for prefix in ("vocab", "blocks.0.")
    )
    most = (4 + state_bytes) * max(counts.values()) + 8 * max(vocabulary, block) + EXTRA_MEMORY
    assert most < 0.85 * 4 * sum(counts.values())
    return most


@pytest.mark.parametrize(
    ("kind", "flags", "source", "state_bytes"),
    [
        pytest.param(*("export", [], "large", 0), marks=pytest.mark.sweep),
        pytest.param("export", ["--optimizer"], "large", 8, marks=pytest.mark.sweep),
        pytest.param(*("export-fairseq", [], "large", 0), marks=pytest.mark.sweep),
        pytest.param("export-fairseq", [], "large_nag", 8, marks=pytest.mark.sweep),  # in float64
        pytest.param(*("export-universal", [], "large", 8), marks=pytest.mark.sweep),
    ],
)
def test_a_conversion_holds_little(
    folder: Path, at_least: int, tmp_path: Path, kind: str, flags: list[str], source: str, state_bytes: int
) -> None:
    output = tmp_path / ("out.pt" if kind == "export-fairseq" else "out")
    held = peak_of(kind, folder / source, "--output", output, *flags) - at_least
    most = allowed(open_model(folder / "large_nag").config, state_bytes)
    assert held < most, f"{held / 2**20:.1f} MB, {most / 2**20:.1f} MB are allowed"
