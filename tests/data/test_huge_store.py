"""A store of 10**12 tokens is opened on every rank without being read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_style.config.run_file import save_run
from megatron_style.data.store import open_store
from tests.support.huge_store import write_huge_store
from tests.support.runs import tiny_run

TOKENS = 10**12
ROOT = Path(__file__).resolve().parents[2]
# What every rank does before its first step, apart from the model. Prints megabytes of memory that it took.
RANK = """
import sys
from pathlib import Path
from megatron_style.config.run_file import load_run
from megatron_style.data.batch import read_batch
from megatron_style.data.corpus import open_corpus
from megatron_style.schedule.stages import StageSchedule

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

rank = int(sys.argv[2])
run = load_run(Path(sys.argv[1]))
before = peak()
corpus = open_corpus(run.data, check_ids=rank == 0)
schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=4)
plan = schedule.plan(schedule.total_steps - 2)
batch = read_batch([corpus.train[0].tokens], plan.read(data_rank=rank, micro=0), eos=corpus.eos)
assert batch.inputs.shape[1] == 128 and plan.tokens == 4 * 9216
print(peak() - before)
"""


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    try:
        write_huge_store(tmp_path / "train", TOKENS)
    except OSError as error:
        pytest.skip(f"a sparse file of 2 TB is needed, and this file system has none ({error})")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
def test_four_ranks_open_a_huge_store_and_plan_in_little_memory(huge: Path, cache: bool) -> None:
    data = {"train": str(huge / "train"), "valid": str(huge / "train"), "vocab_size": 40}
    run = tiny_run(stages=[{"segment_length": 128, "epochs": 1}], tokens_per_batch=9216, cache=cache, data=data)
    save_run(run, huge / "run.yaml")
    command = [sys.executable, "-c", RANK, str(huge / "run.yaml")]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in range(4)]
    taken = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert max(map(float, taken)) < 150, f"MB on each rank: {taken}"


def test_a_huge_store_is_read_at_its_end_as_at_its_beginning(huge: Path) -> None:
    with (huge / "train.bin").open("r+b") as file:
        file.seek(2 * (TOKENS - 1))
        file.write(np.array([7], "<u2").tobytes())
    store = open_store(huge / "train", check=False)
    assert (len(store), int(store.tokens[TOKENS - 1]), int(store.tokens[TOKENS - 2])) == (TOKENS, 7, 0)
