"""The forms that a model can have. Each is a module that is a `Format`; all of them name the same tensors, so that any
can be converted to any other. A new one is a module and a row of `FORMATS`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from megatron_style.base.errors import UserError
from megatron_style.formats import fairseq, model_folder, run_checkpoint, transformer_xl, universal
from megatron_style.formats.huggingface import folder as huggingface
from megatron_style.formats.source import Holds, ModelSource, unheld


class Format(Protocol):
    NAME: str  # for users
    FILES: frozenset[str]  # file names that mark a folder as one of this form, so that it may be replaced
    HOLDS: Holds  # settings of the model that it can express

    def recognises(self, path: Path) -> bool: ...

    def read(self, path: Path) -> ModelSource:
        """Return unsharded tensors by name, each read when it is asked for."""


class Writable(Format, Protocol):
    def write(self, path: Path, source: ModelSource) -> None:
        """Write a folder or file that does not exist yet, with one tensor in memory at a time."""


FORMATS: tuple[Format, ...] = (
    huggingface,
    transformer_xl,
    model_folder,
    run_checkpoint,
    universal,
    fairseq,
)  # most specific first


def open_model(path: Path) -> ModelSource:
    for form in FORMATS:
        if form.recognises(path):
            return form.read(path)
    known = ", ".join(form.NAME for form in FORMATS)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; a model is expected: {known}")
    raise UserError(f"{path}: is not a model in any known form; expected one of these: {known}")


def check_holds(form: Format, source: ModelSource) -> None:
    """Refuse a model that the form cannot express, rather than write a different one."""
    for key, value in unheld(source.config.model, form.HOLDS):
        raise UserError(f"{source.path}: model.{key} is {value}, which {form.NAME} cannot hold; export another form")
