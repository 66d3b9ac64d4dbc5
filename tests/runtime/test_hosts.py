"""Hostfiles as people write them, right and wrong; asking hosts without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.config.errors import UserError
from megatron_style.runtime.hosts import Host, Unanswered, ask_all, read_hostfile, this_machine
from tests.support.launch import ROOT

WRONG = {
    "no slots": ("node1\n", "line 1: 'node1'; expected a host and its slots"),
    "no number": ("# mine\nnode1 slots=all\n", "line 2: 'node1 slots=all'"),
    "no slot": ("node1 slots=0\n", "line 1"),
    "spaces": ("node1 slots = 8\n", "line 1"),
    "something more": ("node1 slots=8 max_slots=9\n", "line 1"),
    "twice": ("node1 slots=8\nnode1 slots=8\n", "line 2: node1 stands there twice"),
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
