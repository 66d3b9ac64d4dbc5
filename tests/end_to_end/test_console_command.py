"""`shortformer COMMAND`: one name for all commands, which imports only what the named one needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from megatron_style.__main__ import COMMANDS, main
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from tests.support.launch import ROOT
from tests.support.tiny import Done, expect_refusal, run_here


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Done:
    """Run `shortformer WORDS` in this process."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/shortformer", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return Done(left.value.code, *capsys.readouterr())


def test_every_command_is_in_the_table() -> None:
    modules = {path.stem for path in (ROOT / "megatron_style").glob("*.py")} - {"__init__", "__main__"}
    assert set(COMMANDS) == modules


def test_help_lists_every_command() -> None:
    done = run_here(main, "--help")
    assert (done.code, done.err) == (0, "")
    for name, about in COMMANDS.items():
        assert any(line.split() == [name, *about.split()] for line in done.out.splitlines())


def test_unknown_commands_are_refused_in_one_line() -> None:
    expect_refusal(run_here(main), "a command is missing", "--help")
    expect_refusal(run_here(main, "trian"), "trian: no such command", "did you mean 'train'?")
    expect_refusal(run_here(main, "os"), "os: no such command", "--help")


def test_a_command_calls_itself_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(monkeypatch, capsys, "report", "--help").out.startswith("usage: shortformer report ")
    wrong = typed(monkeypatch, capsys, "train", "--wrong")
    expect_refusal(wrong, "`shortformer train --help`")
    assert "usage: python -m megatron_style.report " in run_here(main, "report", "--help").out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("megatron_style --help", 0),
        ("megatron_style none", 2),
        ("megatron_style train --help", 0),
        ("megatron_style train --wrong", 2),
        ("megatron_style.train --help", 0),
        ("megatron_style.train --wrong", 2),
    ],
)
def test_help_and_refusals_import_nothing_that_takes_time(words: str, code: int) -> None:
    command = [sys.executable, "-X", "importtime", "-m", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "megatron_style.base.command" in imported
    assert not imported & {"torch", "numpy", "pydantic", "yaml", "deepspeed"}


def test_the_resolved_run_file_is_printed_without_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--set", "optimizer.clip_norm=0.25", "--set", "output.path=runs/never")
    done = typed(monkeypatch, capsys, "train", "run_configs/quickstart.yaml", *settings, "--print-config")
    assert done.code == 0
    printed = RunConfig.parse(yaml.safe_load(done.out), source="printed")
    assert printed == load_run(ROOT / "run_configs" / "quickstart.yaml", settings[1::2])
    assert printed.optimizer.clip_norm == 0.25
    assert "heartbeat_timeout: 15.0" in done.out, "defaults are printed too"
    assert not (ROOT / "runs" / "never").exists()
