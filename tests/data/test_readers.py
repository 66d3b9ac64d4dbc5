"""Every reader: good, empty, truncated, wrong key, not UTF-8; files, patterns and folders of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_style.base.errors import UserError
from megatron_style.data.readers.chunks import ReadOptions, chunks_of
from megatron_style.data.readers.inputs import InputFile, find_inputs, warn_of_records
from megatron_style.data.readers.parse import Texts, read_texts
from tests.support.input_files import COMPRESS, write_input

TEXTS = ["first line\nsecond line", "", "straße 猫\u2028x", "last " * 50]
COMPRESSED = [f"{kind}{end}" for kind in (".txt", ".jsonl") for end in COMPRESS if end]
SUFFIXES = [".txt", ".jsonl", ".parquet", ".arrow", *COMPRESSED]


def read(path: Path, *, chunk_bytes: int = 4096, key: str = "text", skip_bad: bool = False) -> list[Texts]:
    options = ReadOptions(key, skip_bad, chunk_bytes)
    return [read_texts(chunk, options) for chunk in chunks_of([InputFile.at(path)], options)]


def texts_of(found: Sequence[Texts]) -> list[str]:
    """The documents; those of a text file are one."""
    texts = [text for part in found for text in part.texts]
    return texts if found[0].are_documents else ["".join(texts)]


def expected_of(path: Path) -> list[str]:
    return ["".join(f"{text}\n" for text in TEXTS)] if ".txt" in path.name else TEXTS


@pytest.mark.parametrize("chunk_bytes", [1, 7, 30, 4096])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_good_files_give_their_texts_in_chunks_of_any_size(tmp_path: Path, suffix: str, chunk_bytes: int) -> None:
    path = write_input(tmp_path / f"x{suffix}", TEXTS)
    found = read(path, chunk_bytes=chunk_bytes)
    assert texts_of(found) == expected_of(path)
    assert sum(part.left_out for part in found) == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(max_size=200).map(lambda data: data.replace(b"\0", b"\n")), st.integers(1, 60))
@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_a_stream_is_cut_after_complete_lines_only(tmp_path: Path, end: str, data: bytes, chunk_bytes: int) -> None:
    path = tmp_path / f"x.txt{end}"
    path.write_bytes(COMPRESS[end](data) if data else b"")
    options = ReadOptions(chunk_bytes=chunk_bytes, skip_bad=True)
    parts = [chunk.content for chunk in chunks_of([InputFile.at(path)], options)]
    assert b"".join(part.data for part in parts) == data
    assert all(part.data.endswith(b"\n") for part in parts[:-1])
    for part in parts if data else []:
        assert data[part.start :].startswith(part.data)
        assert part.first_line == 1 + data[: part.start].count(b"\n")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_file_is_refused_or_counted(tmp_path: Path, suffix: str) -> None:
    texts: list[str] = []
    path = write_input(
        tmp_path / f"x{suffix}", pa.array(texts, pa.string()) if suffix in (".parquet", ".arrow") else texts
    )
    with pytest.raises(UserError, match=f"x{suffix}: is empty"):
        read(path)
    (part,) = read(path, skip_bad=True)
    assert (part.texts, part.left_out) == ([], 1)


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix not in (".txt", ".jsonl")])
def test_a_truncated_file_is_refused_or_read_up_to_its_end(tmp_path: Path, suffix: str) -> None:
    path = write_input(tmp_path / f"x{suffix}", [f"{number} some words to compress" for number in range(2000)])
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])
    with pytest.raises(UserError, match=rf"x{suffix}: .*(damaged|truncated)"):
        read(path)
    found = read(path, skip_bad=True)
    assert sum(part.left_out for part in found) == 1
    assert f"x{suffix}: " in str([part.first_left_out for part in found])
    texts = [line for text in texts_of(found) for line in text.splitlines()]
    assert texts == [f"{number} some words to compress" for number in range(len(texts))]
    assert texts or not suffix.endswith((".gz", ".xz"))  # a block of the others cannot be read in part


def test_a_truncated_record_is_one_that_is_left_out(tmp_path: Path) -> None:
    path = write_input(tmp_path / "x.jsonl", TEXTS)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"x\.jsonl:4: is not a JSON record .*--skip-bad"):
        read(path)
    (part,) = read(path, skip_bad=True)
    assert (part.texts, part.left_out) == (TEXTS[:3], 1)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".parquet", ".arrow"])
def test_a_wrong_key_is_named_with_those_that_are_there(tmp_path: Path, suffix: str) -> None:
    path = write_input(tmp_path / f"x{suffix}", TEXTS, key="content")
    with pytest.raises(UserError, match=rf"x{suffix}.* has no (key|column) `text`.*content"):
        read(path)
    assert texts_of(read(path, key="content")) == TEXTS


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl", ".jsonl.xz"])
def test_bytes_that_are_not_utf8_are_named_or_left_out(tmp_path: Path, suffix: str) -> None:
    path = write_input(tmp_path / f"x{suffix}", ["good", "caf__", "good"])
    end = path.suffix if path.suffix in COMPRESS else ""
    plain = (tmp_path / "plain").with_suffix(suffix.removesuffix(end))
    data = write_input(plain, ["good", "caf__", "good"]).read_bytes().replace(b"caf__", b"caf\xe9")
    path.write_bytes(COMPRESS[end](data))
    with pytest.raises(UserError, match=r"x.*: byte \d+ .*is not UTF-8|x.*:2: byte \d+ of the line is not UTF-8"):
        read(path)
    found = read(path, skip_bad=True)
    assert texts_of(found) == (["good\ngood\n"] if ".txt" in suffix else ["good", "good"])
    assert [part.left_out for part in found] == [1]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl", ".jsonl.xz"])
def test_a_byte_order_mark_at_the_beginning_is_no_text(tmp_path: Path, suffix: str) -> None:
    mark = b"\xef\xbb\xbf"
    plain = write_input(tmp_path / f"x{suffix.rpartition('.')[0] or suffix}", TEXTS)
    end = Path(suffix).suffix if Path(suffix).suffix in COMPRESS else ""
    path = tmp_path / f"marked{suffix}"
    path.write_bytes(COMPRESS[end](mark + plain.read_bytes()))
    assert texts_of(read(path, chunk_bytes=7)) == expected_of(path)
    path.write_bytes(COMPRESS[end](mark + b"\xff"))
    with pytest.raises(UserError, match=r"byte 3 is not UTF-8|:1: byte 0 of the line is not UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1, 2]", "is not a JSON object but a list"),
        ('{"text": null}', "`text` is null"),
        ('{"text": 7}', "`text` is int"),
        ('{"text": "a\\u0000b"}', "NUL character"),
        ('{"text": "\\ud800"}', "half a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "has no key `text`, but none"),
        ('{"text": "unclosed', "is not a JSON record"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 4096])
def test_a_bad_record_is_named_by_its_line(tmp_path: Path, line: str, reason: str, chunk_bytes: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n{{"text": "too"}}\n')
    with pytest.raises(UserError, match=rf"x\.jsonl:3: .*{reason}"):
        read(path, chunk_bytes=chunk_bytes)
    found = read(path, chunk_bytes=chunk_bytes, skip_bad=True)
    assert texts_of(found) == ["good", "too"]
    assert sum(part.left_out for part in found) == 1


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_rows_without_text_and_columns_of_numbers(tmp_path: Path, suffix: str) -> None:
    path = write_input(tmp_path / f"x{suffix}", ["a", "b", None, "d"])
    with pytest.raises(UserError, match=f"x{suffix}: row 3: `text` is null"):
        read(path, chunk_bytes=1)
    assert texts_of(read(path, skip_bad=True)) == ["a", "b", "d"]
    with pytest.raises(UserError, match="its column `text` holds int64; expected strings"):
        read(write_input(tmp_path / f"y{suffix}", [1, 2]))


def test_a_dictionary_encoded_column_is_text(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), tmp_path / "x.parquet")
    assert texts_of(read(tmp_path / "x.parquet")) == ["a", "b", "a"]


@pytest.mark.parametrize("end", [".gz", ".bz2", ".xz", ".zst"])
def test_several_streams_in_one_file_are_read_one_after_the_other(tmp_path: Path, end: str) -> None:
    path = tmp_path / f"x.txt{end}"
    path.write_bytes(COMPRESS[end](b"a\nb") + COMPRESS[end](b"c\n"))
    assert texts_of(read(path)) == ["a\nbc\n"]


@pytest.mark.parametrize("end", [".gz", ".bz2", ".xz", ".zst"])
def test_what_is_not_compressed_is_refused(tmp_path: Path, end: str) -> None:
    path = tmp_path / f"x.txt{end}"
    path.write_bytes(b"plain text, by its name compressed\n" * 10)
    with pytest.raises(UserError, match=f"x.txt{end}: damaged"):
        read(path)


@pytest.mark.parametrize(("suffix", "library"), [(".txt.zst", "zstandard"), (".parquet", "pyarrow")])
def test_a_missing_library_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, library: str
) -> None:
    path = write_input(tmp_path / f"x{suffix}", TEXTS)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"`pip install {library}`"):
        read(path)


# Files, patterns and folders


def names(paths: Sequence[Path]) -> list[tuple[str, str, str | None]]:
    return [(file.name, file.format, file.compression) for file in find_inputs(paths)]


def test_a_mixed_folder_is_read_in_the_order_of_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl.zst", "a.txt", "deep/c.parquet", "d.arrow", "E.JSONL", "f.txt.gz"):
        write_input(tmp_path / name.lower(), TEXTS)
        (tmp_path / name.lower()).rename(tmp_path / name)
    for name in (".hidden.txt", "_SUCCESS", "README.md"):
        (tmp_path / name).write_text("x")
    assert names([tmp_path]) == [
        ("E.JSONL", "jsonl", None),
        ("a.txt", "text", None),
        ("b.jsonl.zst", "jsonl", "zstd"),
        ("d.arrow", "arrow", None),
        ("deep/c.parquet", "parquet", None),
        ("f.txt.gz", "text", "gzip"),
    ]
    assert "1 files of other kinds are left out, README.md first" in capsys.readouterr().err
    options = ReadOptions()
    found = [read_texts(chunk, options) for chunk in chunks_of(find_inputs([tmp_path]), options)]
    assert sum(len(part.texts) for part in found) == 4 * len(TEXTS) + 2


def test_patterns_are_expanded_and_names_without_a_format_are_text(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c[1].txt", "notes"):
        (tmp_path / name).write_text("x\n")
    assert [name for name, *_ in names([tmp_path / "?.txt"])] == ["a.txt", "b.txt"]
    assert names([tmp_path / "c[1].txt", tmp_path / "notes"]) == [("c[1].txt", "text", None), ("notes", "text", None)]
    with pytest.raises(UserError, match=r"\*\.xml: no file matches this pattern"):
        find_inputs([tmp_path / "*.xml"])
    with pytest.raises(UserError, match=r"a parquet file is compressed inside"):
        find_inputs([tmp_path / "x.parquet.gz"])


def save_dataset(folder: Path, **more: object) -> Path:
    """Write a folder as `datasets` saves it: Arrow streams, and their order in state.json."""
    folder.mkdir(parents=True)
    files = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_input(folder / files[0], TEXTS[:2])
    write_input(folder / files[1], TEXTS[2:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files], **more}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "saved")
    options = ReadOptions()
    found = [read_texts(chunk, options) for chunk in chunks_of(find_inputs([folder]), options)]
    assert [text for part in found for text in part.texts] == TEXTS


def test_a_saved_dataset_that_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    save_dataset(tmp_path / "dict" / "train")
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UserError, match=r"holds the splits train; name the folder of one"):
        find_inputs([tmp_path / "dict"])
    with pytest.raises(UserError, match="save it after flatten_indices"):
        find_inputs([save_dataset(tmp_path / "chosen", _indices_files=[{"filename": "i"}])])
    outside = save_dataset(tmp_path / "outside", _data_files=[{"filename": "../x.arrow"}])
    with pytest.raises(UserError, match=r"names \.\./x\.arrow, which is not in its folder"):
        find_inputs([outside])
    (outside / "state.json").write_text("[]")
    with pytest.raises(UserError, match="not the state of a saved dataset"):
        find_inputs([outside])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_row_that_is_not_utf8_is_named_or_left_out(tmp_path: Path, suffix: str) -> None:
    path = write_input(tmp_path / f"x{suffix}", pa.array([b"good", b"caf\xe9", b"too"]).view(pa.string()))
    with pytest.raises(UserError, match=f"x{suffix}: row 2: byte 3 of the text is not UTF-8"):
        read(path)
    assert texts_of(read(path, skip_bad=True)) == ["good", "too"]


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', True),
        ('{"text": "a"}\nplain\n', False),
        ("[1]\n[2]\n", False),
        ("a\n", False),
        ('{"a": 1}\n', False),
    ],
)
def test_json_lines_that_are_named_like_plain_text_are_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, warns: bool
) -> None:
    path = tmp_path / "web.txt"
    path.write_text(text)
    (file,) = find_inputs([path])
    warn_of_records(file)
    told = capsys.readouterr().err
    assert ("warning: " in told and "name it web.jsonl" in told) == warns
    warn_of_records(InputFile.at(path.rename(path.with_suffix(".jsonl"))))
    assert capsys.readouterr().err == ""
