"""The display of a run: a bar that other output does not break, or plain lines."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_style.base.command import log
from megatron_style.base.events import TrainEvent
from megatron_style.base.run_folder import RunFolder
from megatron_style.base.terminal import Terminal, has_bar
from megatron_style.journal.console import Console, ProgressLine
from megatron_style.supervision.rank_log import rank_log
from tests.support.screen import Screen

EVENT = TrainEvent(
    step=120,
    stage=0,
    loss=4.32109,
    grad_norm=0.5,
    learning_rate=0.25,
    tokens=1_105_920,
    tokens_per_second=12_345.6,
    flops_per_second=1.5e12,
    memory_bytes=3 * 2**30,
)
LINE = ProgressLine(EVENT, total_steps=400, stages=2, share_done=0.5, seconds_left=3661.2)
FACTS = [
    "stage 1/2", "step 121/400", "[##########..........] 50%", "1:01:01 left", "loss 4.3211", "lr 0.25",
    "12,346 tokens/s", "1.5 TFLOP/s", "3.00 GiB", "1,105,920 tokens",
]  # fmt: skip


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen_of(stream: io.StringIO) -> Screen:
    screen = Screen()
    screen.feed(stream.getvalue())
    return screen


@given(st.lists(st.one_of(st.sampled_from(["word", "two words\n", "\n", "a\nb", ""]), st.integers(0, 3))))
def test_lines_above_a_bar_are_complete_however_they_are_written(actions: list[str | int]) -> None:
    """A number draws a bar of that number; 0 removes it."""
    stream, text, bar = io.StringIO(), "", ""
    terminal = Terminal(stream)
    for action in actions:
        if isinstance(action, int):
            bar = f"[bar {action}]" if action else ""
            terminal.draw(bar)
        else:
            terminal.write(action)
            text += action
    screen = screen_of(stream)
    *lines, last = text.split("\n")
    assert screen.lines == lines
    assert screen.last == (last or bar)


def test_a_line_of_another_rank_takes_the_place_of_the_bar() -> None:
    """Both have the same terminal, and only one draws; it draws again soon."""
    stream = io.StringIO()
    first, other = Terminal(stream), Terminal(stream)
    first.draw("[bar that is long]")
    other.write("short\n")
    first.draw("[bar]")
    screen = screen_of(stream)
    assert (screen.lines, screen.last) == (["short"], "[bar]")


def test_the_bar_shows_everything_where_there_is_room() -> None:
    bar = LINE.bar(121, 200)
    assert [bar.index(fact) for fact in FACTS] == sorted(bar.index(fact) for fact in FACTS)
    assert "(40% of peak)" in replace(LINE, peak_share=0.4).bar(121, 200)


@pytest.mark.parametrize("width", range(2, 160, 7))
def test_a_narrow_bar_leaves_facts_out_and_cuts_none(width: int) -> None:
    bar = LINE.bar(121, width)
    assert len(bar) < width
    left = bar
    for fact in FACTS:
        left = left.removeprefix(fact).lstrip()
    assert left == "" or width < 30


def test_the_line_says_the_same() -> None:
    line = replace(LINE, note=", skipped").line()
    for fact in ("step 120/400, stage 1/2", "loss 4.3211", "gradient norm 0.500", "learning rate 0.25", *FACTS[6:]):
        assert fact in line
    assert line.endswith("1:01:01 left, skipped")


def test_only_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert has_bar(Tty())
    assert not has_bar(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_bar(Tty())


@pytest.fixture
def deepspeed() -> Iterator[logging.StreamHandler[TextIO]]:
    """Its logger, as it is when DeepSpeed has been imported: with a handler that has a stream of its own."""
    handler = logging.StreamHandler()
    logging.getLogger("DeepSpeed").addHandler(handler)
    yield handler
    logging.getLogger("DeepSpeed").removeHandler(handler)


def say_everything(folder: Path, deepspeed: logging.StreamHandler[TextIO]) -> str:
    """As a rank does: lines of the run, of DeepSpeed, and the standing. What its log holds."""
    (folder / "logs").mkdir()
    with rank_log(folder, 0, "launch") as terminal:
        console = Console(400, terminal)
        console.after(119)
        console.show(LINE)
        log("step 120/400: held-out perplexity 50.00")
        deepspeed.emit(logging.makeLogRecord({"msg": "a word of DeepSpeed"}))
        console.after(121)
        console.close()
    return RunFolder(folder).log(0).read_text()


def test_a_terminal_has_the_bar_and_the_log_of_the_rank_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deepspeed: logging.StreamHandler[TextIO]
) -> None:
    stream = Tty()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    kept = say_everything(tmp_path, deepspeed)
    screen = screen_of(stream)
    assert screen.lines == ["step 120/400: held-out perplexity 50.00", "a word of DeepSpeed"]
    assert screen.last == ""
    assert any(line.startswith("stage 1/2  step 120/400") for line in screen.seen)
    assert kept.splitlines()[1:] == [LINE.line(), *screen.lines]
    assert not set(kept) & {"\r", "\x1b"}


def test_a_log_file_has_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deepspeed: logging.StreamHandler[TextIO]
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    kept = say_everything(tmp_path, deepspeed)
    assert stream.getvalue().splitlines() == kept.splitlines()[1:]
    assert stream.getvalue().splitlines()[0] == LINE.line()
    assert not set(stream.getvalue()) & {"\r", "\x1b"}
