"""The forms a model can have. Each is a module with `recognises(path)`, `read(path)` and, where we can, `write(path,
source)`; all of them speak of the same named tensors, so that any can become any other. A new one is a line here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megatron_style.base.errors import UserError
from megatron_style.checkpoint import manifest
from megatron_style.formats import fairseq, huggingface, model_folder, run_checkpoint, universal
from megatron_style.formats.source import ModelSource


class Readable(Protocol):
    def recognises(self, path: Path) -> bool: ...

    def read(self, path: Path) -> ModelSource: ...


FORMATS: tuple[Readable, ...] = (huggingface, model_folder, run_checkpoint, universal, fairseq)  # particular first


def open_model(path: Path) -> ModelSource:
    for form in FORMATS:
        if form.recognises(path):
            return form.read(path)
    raise UserError(
        f"{path}: neither a model folder (with {model_folder.CONFIG_FILE}) "
        f"nor a run or checkpoint (with {manifest.FILE})"
    )
