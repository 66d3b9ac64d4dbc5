from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_style.base.errors import UserError
from megatron_style.data.index import MAGIC, Entries
from megatron_style.data.inspection import Inspection, inspect_ids
from megatron_style.data.store import TokenStoreWriter, open_store
from tests.support.oracle import ORACLE, needs_oracle

IDS = np.array([5, 6, 2, 2, 7, 2])
SIZES = np.array([3, 1, 2])


def write_dialect(
    prefix: Path, dtype: str, code: int, *, documents: bool, ids: np.ndarray = IDS, sizes: np.ndarray = SIZES
) -> Path:
    """A store as the other libraries write it, spelled out byte by byte."""
    data = ids.astype(dtype)
    offsets = (np.cumsum(sizes) - sizes) * data.itemsize
    index = MAGIC + struct.pack("<QBQ", 1, code, len(sizes))
    index += struct.pack("<Q", len(sizes) + 1) if documents else b""
    index += sizes.astype("<i4").tobytes() + offsets.astype("<i8").tobytes()
    index += np.arange(len(sizes) + 1, dtype="<i8").tobytes() if documents else b""
    prefix.with_suffix(".bin").write_bytes(data.tobytes())
    prefix.with_suffix(".idx").write_bytes(index)
    return prefix


@pytest.fixture
def fairseq_store(tmp_path: Path) -> Path:
    return write_dialect(tmp_path / "train", "<u2", 8, documents=False)


@needs_oracle
@pytest.mark.parametrize(("split", "tokens"), [("train", 195_890), ("valid", 21_756)])
def test_the_reference_store_is_read_and_written_back_byte_for_byte(tmp_path: Path, split: str, tokens: int) -> None:
    store = open_store(ORACLE / "data" / split, vocab_size=9848)
    assert len(store) == len(store.tokens) == tokens
    with TokenStoreWriter(tmp_path / split, vocab_size=9848) as writer:
        half = len(store.line_sizes) // 2
        cut = int(store.line_sizes[:half].sum())
        writer.append(store.tokens[:cut], store.line_sizes[:half])
        writer.append(store.tokens[cut:], store.line_sizes[half:])
    for end in ("bin", "idx"):
        assert (tmp_path / f"{split}.{end}").read_bytes() == (ORACLE / "data" / f"{split}.{end}").read_bytes()


@needs_oracle
def test_the_reference_stream_is_the_one_it_scored() -> None:
    targets = np.load(ORACLE / "nll" / "valid_targets.npz")["tokens"]
    np.testing.assert_array_equal(open_store(ORACLE / "data" / "valid").tokens, targets)


@pytest.mark.parametrize(
    ("dtype", "code", "documents"),
    [
        ("<u2", 8, False),  # fairseq
        ("<i4", 4, False),
        ("<i8", 5, False),
        ("<u2", 8, True),  # Megatron-LM, GPT-NeoX
        ("<i4", 4, True),
        ("<u2", 6, True),  # DeepSpeed
        ("<u4", 7, True),
        ("<u8", 8, True),
    ],
)
def test_every_dialect_is_recognised(tmp_path: Path, dtype: str, code: int, documents: bool) -> None:
    store = open_store(write_dialect(tmp_path / "x", dtype, code, documents=documents), vocab_size=8)
    assert store.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(store.tokens, IDS)
    np.testing.assert_array_equal(store.line_sizes, SIZES)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(st.lists(st.integers(0, 70_000), max_size=6), min_size=1, max_size=8).filter(any))
@pytest.mark.parametrize("vocab_size", [70_001])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, lines: list[list[int]]) -> None:
    with TokenStoreWriter(tmp_path / "x", vocab_size) as writer:
        for line in lines:
            writer.append(np.array(line, np.int64), np.array([len(line)]))
    store = open_store(tmp_path / "x", vocab_size)
    assert store.tokens.tolist() == [i for line in lines for i in line]
    assert store.line_sizes.tolist() == [len(line) for line in lines]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, "<u2"), (65_500, "<i4")])
def test_small_vocabularies_take_two_bytes_per_token(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    with TokenStoreWriter(tmp_path / "x", vocab_size) as writer:
        writer.append(IDS, SIZES)
    assert open_store(tmp_path / "x").dtype == np.dtype(dtype)


@pytest.mark.parametrize("name", ["train", "train.bin", "train.idx"])
def test_a_store_is_named_by_its_prefix_or_by_either_file(fairseq_store: Path, name: str) -> None:
    assert len(open_store(fairseq_store.with_name(name))) == 6


def test_a_prefix_may_contain_dots(tmp_path: Path) -> None:
    with TokenStoreWriter(tmp_path / "wiki.train", 10) as writer:
        writer.append(IDS, SIZES)
    assert len(open_store(tmp_path / "wiki.train")) == 6


def test_ids_outside_the_vocabulary_are_refused(fairseq_store: Path) -> None:
    with pytest.raises(UserError, match=r"train.bin: token 4 is id 7, outside the vocabulary of 7"):
        open_store(fairseq_store, vocab_size=7)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    ids = np.array([1, -3, 2, 2, 7, 2])
    with pytest.raises(UserError, match=r"token 1 is id -3"):
        open_store(write_dialect(tmp_path / "x", "<i4", 4, documents=False, ids=ids), vocab_size=8)


def test_a_store_whose_dtype_is_ambiguous_is_refused(tmp_path: Path) -> None:
    empty = np.array([], np.int64)
    with pytest.raises(UserError, match="ambiguous: dtype code 8 may mean uint16 or uint64"):
        open_store(write_dialect(tmp_path / "x", "<u2", 8, documents=True, ids=empty, sizes=np.array([0])))


def test_an_empty_store_is_refused(tmp_path: Path) -> None:
    empty = np.array([], np.int64)
    with pytest.raises(UserError, match=r"x\.bin: holds no tokens"):
        open_store(write_dialect(tmp_path / "x", "<i4", 4, documents=False, ids=empty, sizes=empty))


def test_float_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds float64 numbers"):
        open_store(write_dialect(tmp_path / "x", "<f8", 6, documents=True))


def test_a_truncated_bin_is_refused_with_both_sizes(fairseq_store: Path) -> None:
    fairseq_store.with_suffix(".bin").write_bytes(b"\5\0\6\0")
    with pytest.raises(UserError, match=r"train.bin: has 4 bytes, its index says 12: truncated"):
        open_store(fairseq_store)


def damaged_index(store: Path, change: str) -> bytes:
    index = bytearray(store.with_suffix(".idx").read_bytes())
    if change == "another magic":
        index[:7] = b"GARBAGE"
    elif change == "the older kind":
        index[:8] = b"TNTIDX\0\0"
    elif change == "version":
        index[9] = 2
    elif change == "code":
        index[17] = 99
    elif change == "cut":
        del index[-4:]
    elif change == "header cut":
        del index[20:]
    elif change == "negative size":
        index[26:30] = struct.pack("<i", -1)
    elif change == "gap":
        index[-8:] = struct.pack("<q", 10)
    return bytes(index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("another magic", "is not a token index: it starts with b'GARBAGE"),
        ("the older kind", "older TNTIDX kind"),
        ("version", "has version 2; expected 1"),
        ("code", "has dtype code 99"),
        ("cut", "has 58 bytes; 3 lines need 62"),
        ("header cut", "has 20 bytes, too few"),
        ("negative size", "negative line size"),
        ("gap", "do not follow one another"),
    ],
)
def test_an_index_of_another_kind_is_refused(fairseq_store: Path, change: str, message: str) -> None:
    fairseq_store.with_suffix(".idx").write_bytes(damaged_index(fairseq_store, change))
    with pytest.raises(UserError, match=message):
        open_store(fairseq_store)


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_missing_file_is_named(fairseq_store: Path, end: str) -> None:
    fairseq_store.with_suffix(f".{end}").unlink()
    with pytest.raises(UserError, match=rf"train\.{end}: no such file"):
        open_store(fairseq_store)


# A store is read completely once


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_again(*_: object) -> None:
        raise AssertionError("the store was read again")

    monkeypatch.setattr("megatron_style.data.store.inspect_ids", read_again)
    monkeypatch.setattr("megatron_style.data.index.Index.check", read_again)


def rewrite(path: Path, data: bytes) -> None:
    """Change a file later than the clock of the file system can miss."""
    later = path.stat().st_mtime_ns + 1_000_000_000
    path.write_bytes(data)
    os.utime(path, ns=(later, later))


def test_a_store_of_another_tool_is_read_when_it_is_first_seen_only(
    fairseq_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_store(fairseq_store)
    assert (first.inspection.largest_id, first.inspection.largest_at, first.inspection.tokens) == (7, 4, 6)
    forbid_reading(monkeypatch)
    assert open_store(fairseq_store, vocab_size=8).inspection == first.inspection
    with pytest.raises(UserError, match="token 4 is id 7, outside the vocabulary of 7"):
        open_store(fairseq_store, vocab_size=7)


def test_a_store_is_not_read_after_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_reading(monkeypatch)
    with TokenStoreWriter(tmp_path / "x", 8) as writer:
        writer.append(IDS, SIZES)
        writer.append(IDS[:3], SIZES[:1])
    made = open_store(tmp_path / "x", vocab_size=8).inspection
    monkeypatch.undo()
    (tmp_path / "x.checked.json").unlink()
    assert open_store(tmp_path / "x").inspection == made


def test_a_store_that_another_process_checks_is_opened_unread(
    fairseq_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_reading(monkeypatch)
    store = open_store(fairseq_store, check=False)
    assert (len(store), store.tokens.tolist()) == (6, IDS.tolist())


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_file_that_changed_since_is_read_again(fairseq_store: Path, end: str) -> None:
    open_store(fairseq_store, vocab_size=8)
    if end == "bin":
        rewrite(fairseq_store.with_suffix(".bin"), np.where(IDS == 7, 99, IDS).astype("<u2").tobytes())
        message = "token 4 is id 99, outside the vocabulary of 8"
    else:
        rewrite(fairseq_store.with_suffix(".idx"), damaged_index(fairseq_store, "negative size"))
        message = "negative line size"
    with pytest.raises(UserError, match=message):
        open_store(fairseq_store, vocab_size=8)


def test_a_change_while_the_store_is_read_is_noticed_at_the_next_start(
    fairseq_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_after(ids: Entries) -> Inspection:
        found = inspect_ids(ids)
        rewrite(ids.path, np.full(6, 99, "<u2").tobytes())
        return found

    monkeypatch.setattr("megatron_style.data.store.inspect_ids", change_after)
    open_store(fairseq_store, vocab_size=8)
    monkeypatch.undo()
    with pytest.raises(UserError, match="is id 99"):
        open_store(fairseq_store, vocab_size=8)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"store": 3}', b"\xff", b"7", "largest_id"])
def test_a_damaged_record_is_not_believed(fairseq_store: Path, damage: bytes | str) -> None:
    open_store(fairseq_store)
    record = fairseq_store.with_name("train.checked.json")
    if isinstance(damage, str):
        damage = record.read_bytes().replace(b'"largest_id": 7', b'"largest_id": 3')
        assert damage != record.read_bytes()
    record.write_bytes(damage)
    assert open_store(fairseq_store).inspection.largest_id == 7


def test_a_store_in_a_read_only_folder_is_read_once_and_the_folder_left_alone(
    fairseq_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fairseq_store.parent
    folder.chmod(0o555)  # which does not stop root: the mode is respected nevertheless
    try:
        open_store(fairseq_store)
        assert {path.name for path in folder.iterdir()} == {"train.bin", "train.idx"}
        forbid_reading(monkeypatch)
        assert open_store(fairseq_store).inspection.largest_id == 7
    finally:
        folder.chmod(0o755)


def test_a_store_works_where_no_record_can_be_kept(
    fairseq_store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_style.data.inspection._write", full)
    assert len(open_store(fairseq_store, vocab_size=8)) == 6
    assert "every start will check it again" in capsys.readouterr().err


def test_a_change_right_after_the_check_is_noticed(tmp_path: Path) -> None:
    for trial in range(20):
        with TokenStoreWriter(tmp_path / "x", 100) as writer:
            writer.append(IDS, SIZES)
        (tmp_path / "x.bin").write_bytes(np.full(6, 50 + trial, "<u2").tobytes())
        assert open_store(tmp_path / "x").inspection.largest_id == 50 + trial
