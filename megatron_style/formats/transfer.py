"""Convert a model from one form to another, with proof: the output is read back and compared before it gets its name.

Memory does not depend on the size of the model or its grid. It holds one parameter with its optimizer state, for the
certificate the larger of a block and the vocabulary in float64, and at most `EXTRA_MEMORY` in addition, if the process
has called `return_freed_memory`."""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_style.base.errors import RunFailed, UserError
from megatron_style.base.files import put_in_place, write_atomic
from megatron_style.base.json_text import parse_json
from megatron_style.base.model_files import SHARD_BYTES
from megatron_style.data.word_dictionary import WordDictionary
from megatron_style.formats import fairseq, model_folder, run_checkpoint, transformer_xl
from megatron_style.formats.certificate import FILE, Certificate, certify
from megatron_style.formats.formats import FORMATS, Writable, check_holds, open_model
from megatron_style.formats.huggingface import folder as huggingface
from megatron_style.formats.source import ModelSource
from megatron_style.model.shape import count_parameters

Facts = dict[str, object]  # what is reported
EXTRA_MEMORY = 16 * 2**20
_OURS = frozenset[str]().union(*(form.FILES for form in FORMATS))
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def import_fairseq(
    checkpoint: Path, dictionary: Path, output: Path, *, overwrite: bool, shard_size: int = SHARD_BYTES
) -> Facts:
    if not dictionary.is_file():
        raise UserError(f"--dictionary {dictionary}: no such file; fairseq's dict.txt is expected")
    words = WordDictionary.load(dictionary)
    source = fairseq.read(checkpoint)
    if words.vocab_size != source.config.vocab_size:
        raise UserError(
            f"{dictionary}: makes {words.vocab_size} ids, but {checkpoint} has vectors for "
            f"{source.config.vocab_size}; the dictionary it was trained with is needed"
        )
    source = replace(source, tokenizer=lambda: words)
    return _facts(output, source, _to_folder(source, output, overwrite=overwrite, shard_size=shard_size))


def import_transformer_xl(folder: Path, output: Path, *, overwrite: bool, shard_size: int = SHARD_BYTES) -> Facts:
    source = transformer_xl.read(folder)
    certificate = _to_folder(source, output, overwrite=overwrite, shard_size=shard_size)
    flags = {"evaluate_with": transformer_xl.evaluation_flags(folder) or None}
    return _facts(output, source, certificate) | flags


def export_model(
    model: Path, output: Path, *, overwrite: bool, optimizer: bool, shard_size: int = SHARD_BYTES
) -> Facts:
    source = open_model(model)
    if optimizer and source.state is None:
        raise UserError(f"{model}: holds no optimizer state, so --optimizer has nothing to export")
    source = source if optimizer else source.without_optimizer()
    return _facts(output, source, _to_folder(source, output, overwrite=overwrite, shard_size=shard_size))


def _to_folder(source: ModelSource, output: Path, *, overwrite: bool, shard_size: int) -> Certificate:
    write = partial(model_folder.write, shard_bytes=shard_size)
    return transfer(source, model_folder, output, write=write, overwrite=overwrite)


def export_huggingface(model: Path, output: Path, *, overwrite: bool, shard_size: int = SHARD_BYTES) -> Facts:
    source = open_model(model).without_optimizer()
    write = partial(huggingface.write, shard_bytes=shard_size)
    certificate = transfer(source, huggingface, output, huggingface.certify_export, write=write, overwrite=overwrite)
    return _facts(output, source, certificate) | {"computed_by": certificate.computed_by}


def export_as(form: Writable, model: Path, output: Path, *, overwrite: bool) -> Facts:
    source = open_model(model)
    return _facts(output, source, transfer(source, form, output, overwrite=overwrite))


def reshard_checkpoint(checkpoint: Path, output: Path, *, tensor: int, data: int) -> Facts:
    # DeepSpeed reads this on import. The ranks of the other grid may be many, and need no accelerator.
    os.environ["DS_ACCELERATOR"] = "cpu"
    from megatron_style.checkpoint.reshard import reshard  # imports DeepSpeed, which takes seconds

    reshard(checkpoint, output, tensor=tensor, data=data)
    source = run_checkpoint.read(checkpoint)
    certificate = certify(source, run_checkpoint.read(output))
    deliver(output, certificate, output)
    return _facts(output, source, certificate) | {"tensor": tensor, "data": data}


def verify(first: Path, second: Path, *, tolerance: float) -> Facts:
    found = certify(open_model(first), open_model(second), tolerance=tolerance)
    return {
        "tensors": found.tensors,
        "largest_weight_difference": found.largest_weight_difference,
        "largest_nll_difference": found.largest_nll_difference,
        "equal": found.passed,
    }


def _facts(output: Path, source: ModelSource, certificate: Certificate) -> Facts:
    config = source.config
    return {
        "output": str(output),
        "parameters": count_parameters(config.model, config.vocab_size),
        "vocabulary": config.vocab_size,
        "steps": config.step,
        "optimizer": "kept" if source.state else "none",
        "largest_nll_difference": certificate.largest_nll_difference,
    }


def transfer(
    source: ModelSource,
    form: Writable,
    output: Path,
    certifier: Callable[[ModelSource, ModelSource], Certificate] = certify,
    *,
    write: Callable[[Path, ModelSource], None] | None = None,
    overwrite: bool = False,
) -> Certificate:
    """Write the model in another form, with a certificate in the output's folder or next to its file. A model that was
    made from another source is replaced only with `overwrite`. `write` is the form's own, with settings."""
    check_holds(form, source)
    model_folder.check_place(output, _OURS)
    if not overwrite:
        _check_same_source(output, source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as directory:
        written = Path(directory) / output.name
        (write or form.write)(written, source)
        certificate = certifier(source, form.read(written))
        deliver(written, certificate, output)
    return certificate


def _check_same_source(output: Path, source: ModelSource) -> None:
    if not output.is_dir() or not any(output.iterdir()):
        return
    try:
        made_from = parse_json((output / FILE).read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, LookupError, TypeError):
        made_from = None
    if made_from != str(source.path):
        origin = f"made from {made_from}" if made_from else "of unknown origin"
        raise UserError(f"--output {output}: holds a model {origin}; use --overwrite to replace it, or another folder")


def deliver(written: Path, certificate: Certificate, output: Path) -> None:
    """Give the output its name or, if the certificate failed, one that says so."""
    target = output if certificate.passed else output.with_name(f"{output.name}.failed")
    text = json.dumps(certificate.as_data(), indent=2) + "\n"
    if written.is_dir():
        (written / FILE).write_text(text, encoding="utf-8")
    if written != target:
        put_in_place(written, target)
    if not target.is_dir():
        write_atomic(target.with_name(f"{target.name}.{FILE}"), text)
    if not certificate.passed:
        raise RunFailed(
            f"{target}: differs from {certificate.source} by {certificate.largest_nll_difference:.2g} nats and "
            f"{certificate.largest_weight_difference:.2g} in a weight, above the tolerance of {certificate.tolerance:g}"
        )


def return_freed_memory() -> None:
    """Stop glibc from learning to keep freed tensors of up to 32 MB, about a block, for later ones."""
    with suppress(AttributeError):  # other C libraries have no mallopt
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
