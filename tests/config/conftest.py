from __future__ import annotations

import pytest
from deepspeed.accelerator import get_accelerator


@pytest.fixture
def fp16_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: DeepSpeed knows no fp16 on the CPU, and so it is refused here."""
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
