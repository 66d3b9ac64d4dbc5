"""Two hosts for all tests of this folder, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, cluster, why_not
from tests.support.launch import ROOT


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _hosts(tmp_path_factory, 2)


@pytest.fixture(scope="session")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from _hosts(tmp_path_factory, 4)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of its own, next to the current folder: the user's own `.deepspeed_env` lies in the real one."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("launch", "megatron_style", ".venv"):
        (root / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return root


def _hosts(tmp_path_factory: pytest.TempPathFactory, count: int) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp(f"hosts{count}"), count) as made:
        yield made
