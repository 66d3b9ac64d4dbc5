"""The content of an untrusted file and the text of a model cannot control the terminal that shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_style.data.word_dictionary import WordDictionary
from tests.support.launch import ROOT
from tests.support.screen import Screen, on_a_terminal
from tests.support.tiny import VOCAB_SIZE, write_tiny_model
from tests.support.written_runs import WrittenRun, write_run

ESCAPE = "\x1b]0;mine\x07"


@pytest.fixture
def generate(tmp_path: Path) -> list[str]:
    """The command; every word that its model can write holds an escape sequence."""
    words = {f"{ESCAPE}{number}": 1 for number in range(VOCAB_SIZE - 4)}
    write_tiny_model(tmp_path / f"model{ESCAPE}", tokenizer=WordDictionary(words))
    flags = ["--prompt", f"{ESCAPE}1 strange{ESCAPE}", "--tokens", "30"]
    return [sys.executable, "-m", "megatron_style.generate", str(tmp_path / f"model{ESCAPE}"), *flags]


@pytest.mark.slow
def test_generated_text_on_a_terminal(generate: list[str]) -> None:
    """The screen knows no escape sequence but those of a progress bar."""
    written = on_a_terminal(generate, columns=100)
    assert "\x1b" not in written
    assert "\x07" not in written
    screen = Screen()
    screen.feed(written)
    assert sum(line.count(r"\x1b]0;mine\x07") for line in screen.lines) > 5
    assert any(line.startswith("note: not in the model's dictionary") for line in screen.lines)


@pytest.mark.slow
def test_generated_text_in_a_pipe(generate: list[str]) -> None:
    done = subprocess.run(generate, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count(ESCAPE) > 5
    assert ESCAPE not in done.stderr


def test_the_name_of_a_folder_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / f"pages{ESCAPE}").mkdir()
    run, output = write_run(tmp_path / "run", WrittenRun(())), tmp_path / f"pages{ESCAPE}" / "report.html"
    words = [sys.executable, "-m", "megatron_style.report", run, "--output", output]
    written = on_a_terminal(words, columns=100)
    assert "\x1b" not in written
    assert r"pages\x1b]0;mine\x07/report.html" in written.replace("\r\n", "")
    assert output.is_file()
