"""A public archive on this machine: downloaded once, checked against its digest, unpacked."""

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
    members: Mapping[str, str]  # our name for a file of the archive -> its path in there

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def fetch(download: Download, folder: Path) -> dict[str, Path]:
    """The archive's members as files in `folder`; what is there already is used again."""
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
    """Of a file that somebody may have put there by hand, so it is named and not removed."""
    found = file_digest(archive)
    if found != expected:
        raise UserError(f"{archive}: has sha256 {found}, expected {expected}; remove it or replace it")


def _unpack(archive: Path, targets: Mapping[str, Path]) -> None:
    with zipfile.ZipFile(archive) as content:
        for member, target in targets.items():
            with atomic_file(target) as part, content.open(member) as source, part.open("wb") as file:
                shutil.copyfileobj(source, file, BLOCK)


def _blocks(url: str, archive: Path) -> Iterator[bytes]:
    """The answer, piece by piece. Only the network's errors arise in here: those of the disk are not the user's."""
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
