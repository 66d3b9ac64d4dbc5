"""Hold out the last part of each file, for people who have one file only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_style.base.errors import UserError
from megatron_style.data.readers.inputs import InputFile


def hold_out(files: Iterable[InputFile], share: float) -> tuple[list[InputFile], list[InputFile]]:
    """Cut each file at the line end next to its last `share`, by bytes, and return the parts before and after it. Text
    next to each other is alike, so a part in one piece is a harder test than lines from everywhere."""
    kept = []
    held_out = []
    for file in files:
        if file.compression or file.format not in ("text", "jsonl"):
            raise UserError(
                f"--valid-share: {file.path} can only be read from its beginning; give --valid FILE instead, or "
                f"decompress it"
            )
        cut = _cut(file, share)
        kept.append(replace(file, end=cut))
        held_out.append(replace(file, start=cut))
    return kept, held_out


def _cut(file: InputFile, share: float) -> int:
    size = file.path.stat().st_size
    with file.path.open("rb") as opened:
        opened.seek(max(0, int(size * (1 - share)) - 1))
        opened.readline()
        cut = opened.tell()
    if cut >= size:
        raise UserError(
            f"--valid-share {share}: nothing of {file.path} would be held out, because its last line is longer than "
            f"that; use a larger share"
        )
    return cut
