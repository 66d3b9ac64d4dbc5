"""A rank selects its own device before the first collective. Without an accelerator, a stand-in records the calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_style.base.errors import UserError
from megatron_style.base.launchers import OPEN_MPI
from megatron_style.engine import session
from megatron_style.hosts.launcher import find_launcher
from megatron_style.parallel.topology import Topology


class StandInAccelerator:
    """Four devices and NCCL, as far as a session asks for them."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def device_name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return 4

    def communication_backend_name(self) -> str:
        return "nccl"

    def set_device(self, index: int) -> None:
        self._calls.append(("set_device", index))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a session does with device and process group, in order; nothing of it happens."""
    noted: list[tuple[Any, ...]] = []

    def note(*call: Any) -> Any:
        return lambda *args, **_: noted.append((*call, *args))

    monkeypatch.setattr(session, "get_accelerator", lambda: StandInAccelerator(noted))
    monkeypatch.setattr(session.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(session.dist, "init_process_group", note("init_process_group"))
    monkeypatch.setattr(session.deepspeed, "init_distributed", note("init_distributed"))
    monkeypatch.setattr(session.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(session.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(session.dist, "barrier", note("barrier"))
    monkeypatch.setattr(session.dist, "destroy_process_group", note("destroy_process_group"))
    monkeypatch.setattr(Topology, "of_world", note("first collective"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.setenv(name, "")  # so that what the session sets is taken back
        monkeypatch.delenv(name)
    return noted


def enter_and_leave() -> None:
    with session.distributed_session(tensor=1):
        pass


def test_under_a_launcher_the_device_comes_before_the_process_group(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    enter_and_leave()
    assert calls[:3] == [("set_device", 2), ("init_distributed", "nccl"), ("first collective",)]


def test_under_mpirun_too(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI does not say LOCAL_RANK; it has to be found first."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setenv(OPEN_MPI.hosts, "2")
    found = replace(find_launcher(), adopt=lambda _: monkeypatch.setenv("LOCAL_RANK", "3"))
    assert found.name == "mpirun"
    monkeypatch.setattr(session, "find_launcher", lambda: found)
    enter_and_leave()
    assert calls[:3] == [("set_device", 3), ("init_distributed", "nccl"), ("first collective",)]


def test_one_process_without_a_launcher_uses_the_accelerators_own_backend(calls: list[tuple[Any, ...]]) -> None:
    enter_and_leave()
    expected = [("set_device", 0), ("init_process_group", "nccl"), ("init_distributed", "nccl"), ("first collective",)]
    assert calls[:4] == expected


def test_more_processes_than_devices_are_refused(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "4", "LOCAL_RANK": "4", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"LOCAL_RANK is 4, but this process sees 4 cuda device\(s\); start at most"):
        enter_and_leave()
    assert calls == []
