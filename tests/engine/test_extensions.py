"""Compiling an extension of DeepSpeed is announced, and the lock of a killed compilation does not hang the start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from megatron_style.engine.extensions import announce, announced_compilations, is_stale


def test_a_compilation_is_announced_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    announce("cpu_adam", tmp_path)
    assert "compiling DeepSpeed's extension cpu_adam" in capfd.readouterr().err
    (tmp_path / "cpu_adam.so").touch()
    announce("cpu_adam", tmp_path)
    assert capfd.readouterr().err == ""


def test_the_lock_of_a_killed_compilation_is_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = tmp_path / "lock"
    held = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch does, which keeps it open
    assert not is_stale(lock)
    announce("cpu_adam", tmp_path)
    assert lock.exists()
    os.close(held)
    announce("cpu_adam", tmp_path)
    assert not lock.exists()
    assert f"{lock}: removed" in capfd.readouterr().err


def test_deepspeed_asks_through_this_door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The method that is replaced is the one by which DeepSpeed compiles."""
    called = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("megatron_style.engine.extensions.announce", lambda name, folder: called.append((name, folder)))
    monkeypatch.setattr(OpBuilder, "jit_load", lambda builder, verbose=True: "loaded")
    builder = type("Builder", (OpBuilder,), {"absolute_name": str, "sources": list})("an_op")
    with announced_compilations():
        assert builder.load() == "loaded"
    assert called == [("an_op", tmp_path / "an_op")]
    assert builder.load() == "loaded"
    assert len(called) == 1
