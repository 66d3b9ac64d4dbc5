"""A tokenizer that exists already: a `tokenizer.json`, as the Hugging Face libraries write it, used as it is.

A document is encoded as one text, newlines included, and followed by the tokenizer's own end token: a text begins as if
a document had just ended. Tokens that the library would add by itself are left out, and the name of a special token in
a text is text, or a document could forge ends.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatron_style.base.errors import UserError
from megatron_style.base.files import write_atomic
from megatron_style.base.json_text import parse_json
from megatron_style.data.tokenizer import BPE_FILE, MULTIPLE, PRETRAINED_FILE, Encoded, Tokenizer, read_model, split_at

SETTINGS_FILE = "tokenizer_config.json"
_NAMES_FILE = "special_tokens_map.json"


class PretrainedTokenizer(Tokenizer):
    def __init__(self, model: tokenizers.Tokenizer, eos: str, settings: dict[str, Any]) -> None:
        model.no_truncation()
        model.no_padding()
        if model.num_special_tokens_to_add(is_pair=False):
            model.post_processor = None
        model.encode_special_tokens = True  # the file does not store this setting
        self._model = model
        self._eos_name = eos
        self._settings = settings

    @classmethod
    def load(cls, path: Path) -> PretrainedTokenizer:
        """Load the file that `save` writes."""
        content = _json_object(path)
        try:
            model = read_model(json.dumps(content["tokenizer"]).encode(), path)
            return cls(model, _known(model, content["eos"], path), dict(content["settings"]))
        except (LookupError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: not a tokenizer as `prepare --tokenizer PATH` keeps it ({error!r})") from None

    @property
    def kind(self) -> str:
        return "pretrained"

    @property
    def vocab_size(self) -> int:
        return len(self.tokens())

    @cached_property
    def eos(self) -> int:
        found = self._model.token_to_id(self._eos_name)
        assert found is not None, "not checked"
        return found

    @cached_property
    def unk(self) -> int | None:
        name = _token_name(self._settings.get("unk_token"))
        return None if name is None else self._model.token_to_id(name)

    @cached_property
    def _tokens(self) -> list[str]:
        names = {index: token for token, index in self._model.get_vocab(with_added_tokens=True).items()}
        size = -(-(max(names) + 1) // MULTIPLE) * MULTIPLE
        return [names.get(index, f"<unused {index}>") for index in range(size)]

    def tokens(self) -> list[str]:
        return self._tokens

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self._eos_name, self._model.to_str()]).encode()).hexdigest()[:16]

    def encode_line(self, line: str) -> list[int]:
        return [*self.encode(line), self.eos]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        ids = array("i")
        sizes = array("i")
        for encoding in self._model.encode_batch_fast(list(texts), add_special_tokens=False):
            ids.extend(encoding.ids)
            sizes.append(len(encoding))
        words = sum(len(text.split()) for text in texts)
        lines = np.ones(len(texts), np.int64)
        return Encoded(np.frombuffer(ids, np.int32), np.frombuffer(sizes, np.int32), lines, words)

    def decode(self, ids: Iterable[int]) -> str:
        return "\n".join(self._model.decode(part, skip_special_tokens=False) for part in split_at(self.eos, ids))

    def save(self, folder: Path) -> None:
        content = {"eos": self._eos_name, "settings": self._settings, "tokenizer": parse_json(self._model.to_str())}
        write_atomic(folder / PRETRAINED_FILE, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def export(self, folder: Path) -> None:
        """Write the two files from which the transformers library reads the tokenizer, with the same ids for a text."""
        settings = {
            **{key: value for key, value in self._settings.items() if key != "auto_map"},
            "tokenizer_class": "PreTrainedTokenizerFast",  # others add tokens by themselves
            "bos_token": self._eos_name,
            "eos_token": self._eos_name,
            "padding_side": "left",
            "split_special_tokens": True,
        }
        write_atomic(folder / BPE_FILE, self._model.to_str(pretty=True) + "\n")
        write_atomic(folder / SETTINGS_FILE, json.dumps(settings, ensure_ascii=False, indent=2) + "\n")


def import_tokenizer(path: Path, eos: str | None = None) -> PretrainedTokenizer:
    """Read a tokenizer.json, or a folder with one; `eos` names the end token if the folder does not."""
    if (path / PRETRAINED_FILE).is_file():
        return PretrainedTokenizer.load(path / PRETRAINED_FILE)
    file = path / BPE_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"--tokenizer {path}: no {BPE_FILE} there; write one with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    model = read_model(file.read_bytes(), file)
    settings = _json_object(file.with_name(SETTINGS_FILE)) if file.with_name(SETTINGS_FILE).is_file() else {}
    names = _json_object(file.with_name(_NAMES_FILE)) if file.with_name(_NAMES_FILE).is_file() else {}
    found = eos or _token_name(settings.get("eos_token")) or _token_name(names.get("eos_token"))
    if found is None:
        raise UserError(
            f"--tokenizer {path}: names no end token; give the one that ends a text: --end-of-document TOKEN"
        )
    return PretrainedTokenizer(model, _known(model, found, file), settings)


def _known(model: tokenizers.Tokenizer, eos: str, path: Path) -> str:
    if model.token_to_id(eos) is None:
        raise UserError(f"{path}: has no token {eos!r}, the end token; name one that it has: --end-of-document TOKEN")
    return eos


def _token_name(value: Any) -> str | None:
    """Return the name of a token, which is written as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected a JSON object")
    return content
