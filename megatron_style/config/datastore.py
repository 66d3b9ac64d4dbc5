"""`manifest.json` of a kNN-LM datastore: what it holds, and what it was computed from."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, JsonValue

from megatron_style.config.model import Count, Width
from megatron_style.config.section import Section

KeyDtype = Literal["float16", "float32"]
KEY_DTYPES: tuple[KeyDtype, ...] = get_args(KeyDtype)
_VALUE_BYTES = 4  # int32: the authors' int16 is too small for a vocabulary of 267,744


class DatastoreManifest(Section):
    format_version: Literal[1] = 1
    model: str  # digest of the weights
    text: str  # digest of the tokens
    vocab_size: Annotated[int, Field(gt=0, le=2**31)]
    hidden_size: Width
    dtype: KeyDtype
    count: Count
    walk: dict[str, JsonValue]  # how the text was read: the protocol of `evaluate`, and the dtype of the model

    @property
    def key_bytes(self) -> int:
        return self.count * self.hidden_size * {"float16": 2, "float32": 4}[self.dtype]

    @property
    def value_bytes(self) -> int:
        return self.count * _VALUE_BYTES

    @property
    def search_flops(self) -> int:
        """Return the FLOPs of one exact search: a product of the query with every key."""
        return 2 * self.count * self.hidden_size
