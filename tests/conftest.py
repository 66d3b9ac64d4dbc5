"""Shared set-up: one thread per process, so that ranks do not compete for cores, and no time limit per example, because
a busy machine would exceed it."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

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


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the records of stores in read-only folders out of the user's cache."""
    with patch("megatron_style.data.inspection.DEFAULT_CACHE", tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def always_by_onednn() -> Iterator[None]:
    """Let oneDNN multiply in float32 whatever the size, as it does in models that are larger than those of tests."""
    with patch("megatron_style.parallel.device.products.LEAST", 1):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus for small runs."""
    from tests.support.training import write_corpus  # imports DeepSpeed, which takes seconds

    write_corpus(tmp_path)
    return tmp_path
