from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_style.base.errors import UserError
from megatron_style.data.readers.chunks import ReadOptions, chunks_of
from megatron_style.data.readers.inputs import InputFile
from megatron_style.data.readers.parse import read_texts
from megatron_style.data.text import check_text_file, lines_of


def lines_in(path: Path, chunk_bytes: int) -> list[str]:
    options = ReadOptions(chunk_bytes=chunk_bytes)
    chunks = list(chunks_of([InputFile.at(path)], options))
    assert [chunk.closes for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return [line for chunk in chunks for text in read_texts(chunk, options).texts for line in lines_of(text)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text("aé猫 \u2028\x85\x0c", max_size=12), min_size=1, max_size=12), st.integers(1, 40), st.booleans()
)
def test_chunks_of_any_size_hold_the_same_lines(tmp_path: Path, lines: list[str], size: int, closed: bool) -> None:
    path = tmp_path / "text"
    text = "\n".join(lines) + ("\n" if closed or not lines[-1] else "")
    path.write_bytes(text.encode())
    assert lines_in(path, size) == lines


def test_a_line_longer_than_many_chunks_stays_complete(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"short\n" + b"x" * 1000 + b"\nlast")
    assert [len(line) for line in lines_in(path, 10)] == [5, 1000, 4]


def test_windows_line_ends_lose_their_carriage_return(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\r\nb\rc\r\n")
    assert lines_in(path, 100) == ["a", "b\rc"]


def test_bytes_that_are_not_utf8_are_named_by_their_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"fine\n" * 5 + b"caf\xe9\n")
    with pytest.raises(UserError, match="text: byte 28 is not UTF-8"):
        lines_in(path, 10)


def test_nul_bytes_are_refused_as_binary(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"fine\n" * 5 + b"\0\n")
    with pytest.raises(UserError, match="byte 25 is NUL, so this is a binary file"):
        lines_in(path, 10)


def test_what_cannot_be_text_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, message in (("missing", "no such file"), ("empty", "is empty"), (".", "not a regular file")):
        with pytest.raises(UserError, match=message):
            check_text_file(tmp_path / name)
