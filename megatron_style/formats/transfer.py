"""Convert a model from one form to another, with proof: the output is read back and compared before it gets its name.

Memory does not depend on the size of the model or its grid. It holds one parameter with its optimizer state, for the
certificate the larger of a block and the vocabulary in float64, and at most `EXTRA_MEMORY` in addition, if the process
has called `return_freed_memory`."""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_style.base.errors import RunFailed, UserError
from megatron_style.base.files import put_in_place, write_atomic
from megatron_style.base.json_text import parse_json
from megatron_style.formats.certificate import FILE, Certificate, certify
from megatron_style.formats.formats import FORMATS, Writable, check_holds
from megatron_style.formats.model_folder import check_place
from megatron_style.formats.source import ModelSource

EXTRA_MEMORY = 16 * 2**20
_OURS = frozenset[str]().union(*(form.FILES for form in FORMATS))
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def transfer(
    source: ModelSource,
    form: Writable,
    output: Path,
    certifier: Callable[[ModelSource, ModelSource], Certificate] = certify,
    *,
    overwrite: bool = False,
) -> Certificate:
    """Write the model in another form, with a certificate in the output's folder or next to its file. A model that was
    made from another source is replaced only with `overwrite`."""
    check_holds(form, source)
    check_place(output, _OURS)
    if not overwrite:
        _check_same_source(output, source)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as directory:
        written = Path(directory) / output.name
        form.write(written, source)
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
