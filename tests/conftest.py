"""Shared set-up: one thread per process, so that ranks do not compete for cores, and no time limit per example, because
a busy machine would exceed it."""

import gc
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
import torch._dynamo
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    gc.freeze()  # else each collection of garbage, in each forked rank too, visits all that the tests have imported


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus for small runs."""
    from tests.support.training import write_corpus  # imports DeepSpeed, which takes seconds

    write_corpus(tmp_path)
    return tmp_path
