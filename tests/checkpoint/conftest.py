"""What tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import write_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus for small runs."""
    write_corpus(tmp_path)
    return tmp_path
