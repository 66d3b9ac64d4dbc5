"""Download a public archive once, check it against its digest, and unpack it."""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.base.files import atomic_file
from megatron_style.data.progress import byte_progress
from megatron_style.data.text import file_digest

BLOCK = 1 << 20
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Download:
    url: str
    sha256: str
    members: Mapping[str, str]  # our name of a file -> its path in the archive

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def fetch(download: Download, folder: Path) -> dict[str, Path]:
    """Return the archive's members as files in `folder`; those that exist are reused."""
    targets = {name: folder / Path(member).name for name, member in download.members.items()}
    if all(target.is_file() for target in targets.values()):
        return targets
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / download.file_name
    if not archive.is_file():
        _download(download, archive)
    _check_digest(archive, download.sha256)
    _unpack(archive, {download.members[name]: target for name, target in targets.items()})
    return targets


def _download(download: Download, archive: Path) -> None:
    with atomic_file(archive) as part:
        digest = hashlib.sha256()
        with part.open("wb") as file:
            for block in _blocks(download.url, archive):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != download.sha256:
            raise UserError(
                f"{download.url}: the download has sha256 {digest.hexdigest()}, expected {download.sha256}; "
                "it was removed, try again"
            )


def _check_digest(archive: Path, expected: str) -> None:
    """Refuse a wrong archive without removing it, since a user may have put it there by hand."""
    found = file_digest(archive)
    if found != expected:
        raise UserError(f"{archive}: has sha256 {found}, expected {expected}; remove it or replace it")


def _unpack(archive: Path, targets: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(archive) as content:
        for member, target in targets.items():
            with atomic_file(target) as part, content.open(member) as source, part.open("wb") as file:
                shutil.copyfileobj(source, file, BLOCK)


def _blocks(url: str, archive: Path) -> Iterator[bytes]:
    """Yield the response in blocks. Only errors of the network become a UserError: the disk is not the user's input."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            size = response.headers.get("Content-Length")
            with byte_progress(f"downloading {archive.name}", int(size) if size else None) as advance:
                while block := response.read(BLOCK):
                    advance(len(block))
                    yield block
    except (OSError, HTTPException) as error:
        raise UserError(
            f"cannot download {url} ({error}); fetch it elsewhere and place it at {archive}, then run this again"
        ) from error
