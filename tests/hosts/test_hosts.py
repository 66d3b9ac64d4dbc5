"""Hostfiles, right and wrong, and questions to hosts, without real ones."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_style.base.errors import UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.hosts.hosts import Host, Unanswered, ask_all, read_hostfile, this_machine
from megatron_style.supervision.process import this_process
from megatron_style.supervision.record import RankRecord, now, read_records, write_record
from tests.support.launch import ROOT

WRONG = {
    "no slots": ("node1\n", "line 1: 'node1'; expected a host and its slots"),
    "no number": ("# mine\nnode1 slots=all\n", "line 2: 'node1 slots=all'"),
    "no slot": ("node1 slots=0\n", "line 1"),
    "spaces": ("node1 slots = 8\n", "line 1"),
    "something more": ("node1 slots=8 max_slots=9\n", "line 1"),
    "twice": ("node1 slots=8\nnode1 slots=8\n", "line 2: duplicate host node1"),
    "empty": ("\n# nothing\n", "names no host"),
}


def test_hosts_come_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode2 slots=8\n\n  10.0.0.1\tslots=4   # the old one\nuser@node3 slots=1\n")
    assert read_hostfile(path) == (Host("node2", 8), Host("10.0.0.1", 4), Host("user@node3", 1))


def test_the_example_is_right() -> None:
    assert [host.slots for host in read_hostfile(ROOT / "launch" / "hostfile.example")] == [8, 8]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, case: str) -> None:
    text, told = WRONG[case]
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as error:
        read_hostfile(path)
    assert str(path) in str(error.value)


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read as a hostfile"):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(UserError, match="cannot be read as a hostfile"):
        read_hostfile(tmp_path)


def test_a_question_is_answered_or_ended(tmp_path: Path) -> None:
    here = this_machine()
    assert here.ask("look", path=str(tmp_path)) == {"found": True}
    assert abs(here.clock_offset()) < 1
    with pytest.raises(Unanswered, match="KeyError"):
        here.ask("the way")
    with pytest.raises(Unanswered, match="took too long"):
        here.ask("call", limit=1, address="127.0.0.1", port=1, seconds=30)


def test_a_silent_host_does_not_keep_the_others_from_answering() -> None:
    def ask(host: Host) -> str:
        if host.name == "b":
            raise Unanswered("no")
        return host.name.upper()

    a, b, c = hosts = [Host(name, 1) for name in "abc"]
    answers, silent = ask_all(hosts, ask)
    assert answers == {a: "A", c: "C"}
    assert list(silent) == [b]


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=touch", "a;touch", "$(touch)", "`touch`", "a|b", "a'b", 'a"b', "a\\b"]
)
def test_a_host_that_a_shell_would_take_for_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "hosts").write_text(f"{name} slots=1\n")
    with pytest.raises(UserError, match=r"line 1: .*; expected a host and its slots"):
        read_hostfile(tmp_path / "hosts")


def test_a_name_never_becomes_an_option_of_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        words.extend(command)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    Host("node1").run("true", 1)
    assert words[-3:] == ["--", "node1", "true"]


@pytest.mark.parametrize(
    "change",
    [
        {"host": 'node"; touch executed; "'},
        {"host": "$(touch executed)"},
        {"host": "-oProxyCommand=x"},
        {"pid": "1; touch executed"},
        {"pid": -1},
        {"pid": True},
        {"started": "$(touch executed)"},
        {"rank": None},
        {"beats": "many"},
        {"phase": "dancing"},
        {"unknown": 1},
    ],
)
def test_an_odd_record_of_a_rank_is_not_there(tmp_path: Path, change: dict[str, Any]) -> None:
    """It would go into commands on other hosts, and into the heartbeat's comparisons."""
    record = RankRecord(**asdict(this_process()), rank=1, launch="a", step=3, phase="training", time=now())
    (tmp_path / "ranks").mkdir()
    write_record(tmp_path, record)
    assert read_records(tmp_path)[1].record == record
    RunFolder(tmp_path).host_records(1).write_text(json.dumps(asdict(record) | change) + "\n")
    assert read_records(tmp_path) == {}
