"""Damage the content of files: the bytes of any kind, and the values of structured kinds.

A mutation is a function of the content and a random generator, so a seed reproduces it."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_style.checkpoint.logical import is_plain
from megatron_style.data.index import HEADER

Mutation = Callable[[bytes, random.Random], bytes]

ODD: Sequence[Any] = (
    None, True, False, -1, 0, 1, 3, 7, 2**31, 2**63, 2**80, 10**400, -(2**63), 0.5, 1e308, -1e-320, float("nan"),
    float("inf"), "", "x" * 300, "\x1b[2J\x00", "²", "\ud800", "../..", "/etc/passwd", [], [[]], {}, {"a": {"b": []}},
    [None], "-1", "1e9", "*a", [0] * 1000, "global_step4", "auto",
)  # fmt: skip
ODD_KEYS = ("", "x\ny", "²", "\ud800", "stage " * 50, "__class__", "../x")
DEEP = 100_000


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the same bytes with some flipped, cut off, repeated or inserted."""
    place = rng.randrange(max(1, len(content)))
    match rng.randrange(5):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + rng.randbytes(rng.randrange(1, 9)) + content[place:]
        case 2:
            return content[:place] + content[place // 2 :]
        case 3:
            return content[:place] + content[place + rng.randrange(1, 9) :]
        case _:
            return content[:place] + rng.randbytes(1) + content[place + 1 :]


def in_words(content: bytes, rng: random.Random) -> bytes:
    """Return lines of words with some words or lines replaced, repeated, removed or exchanged."""
    lines = content.decode().split("\n")
    place = rng.randrange(len(lines))
    words = lines[place].split(" ")
    match rng.randrange(5):
        case 0:
            lines.insert(place, rng.choice(lines))
        case 1:
            del lines[place]
        case 2:
            lines[place] = lines[place][::-1]
        case _:
            words[rng.randrange(len(words))] = str(rng.choice(ODD))
            lines[place] = " ".join(words)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def in_json(content: bytes, rng: random.Random) -> bytes:
    return as_json(changed(json.loads(content), rng), rng)


def in_sealed_json(content: bytes, rng: random.Random) -> bytes:
    """Return the first line changed, which is JSON; the digest in the second is left to the caller."""
    return as_json(changed(json.loads(content.split(b"\n")[0]), rng), rng)


def in_json_lines(content: bytes, rng: random.Random) -> bytes:
    lines = [json.loads(line) for line in content.splitlines()]
    odd = [changed(line, rng) if rng.random() < 0.3 else line for line in lines]
    return b"".join(as_json(line, rng) + b"\n" for line in odd)


def as_json(data: Any, rng: random.Random) -> bytes:
    """Return the data as JSON, occasionally with text that no JSON writer would produce."""
    text = json.dumps(data)
    match rng.randrange(30):
        case 0:
            text = text.replace("1", "[" * DEEP + "]" * DEEP, 1)
        case 1:
            text = text.replace("{", '{"step": 1, "step": 2, ', 1)
        case 2:
            text = text.replace("1", "1" * 5000, 1)
    return text.encode()


def in_yaml(content: bytes, rng: random.Random) -> bytes:
    return yaml.safe_dump(changed(yaml.safe_load(content), rng)).encode("utf-8", "surrogatepass")


def in_index(content: bytes, rng: random.Random) -> bytes:
    """Return the index of a token store with another number in its header or in its lists."""
    fields: list[Any] = list(HEADER.unpack_from(content))
    if rng.random() < 0.5:
        fields[rng.randrange(1, 4)] = rng.choice([0, 1, 2, 3, 5, 6, 7, 8, 255])
    elif rng.random() < 0.5:
        fields[3] = rng.choice([2**31, 2**40, 2**62, 2**64 - 1])
    rest = bytearray(content[HEADER.size :])
    for _ in range(rng.randrange(3)):
        struct.pack_into("<i", rest, 4 * rng.randrange(len(rest) // 4), rng.choice([-1, 0, 1, 2**31 - 1]))
    return HEADER.pack(*fields) + bytes(rest)


def in_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Return the tensors with a changed header, whose length is right or odd too."""
    size = int.from_bytes(content[:8], "little")
    header = as_json(changed(json.loads(content[8 : 8 + size]), rng), rng)
    length = len(header) if rng.random() < 0.9 else rng.choice([0, 1, 2**31, 2**63, 2**64 - 1])
    return length.to_bytes(8, "little") + header + content[8 + size :]


def in_archive(content: bytes, rng: random.Random) -> bytes:
    """Return a .pt file whose members are damaged, swapped, duplicated, compressed or missing; the archive is valid."""
    members = _members(content)
    name = rng.choice(list(members))
    kind = zipfile.ZIP_STORED
    repeated = []
    match rng.randrange(7):
        case 0:
            del members[name]
        case 1:
            other = rng.choice(list(members))
            members[name], members[other] = members[other], members[name]
        case 2:
            members[rng.choice(["", "../x", "/tmp/x", "data.pkl", "archive/data/0"])] = members.pop(name)
        case 3:
            repeated = [(name, damaged(members[name], rng))]
        case 4:
            kind = zipfile.ZIP_DEFLATED
        case _:
            members[name] = damaged(members[name], rng)
    return _zipped([*members.items(), *repeated], kind)


def in_state(content: bytes, rng: random.Random) -> bytes:
    """Return a .pt file whose nested values are changed, some into tensors of an odd kind."""
    return _saved(changed(copy.deepcopy(_state(content)), rng, odd=[*ODD, argparse.Namespace(a=1)]))


def poisoned(marker: Path) -> Mutation:
    """Make a mutation after which a .pt file would create the marker, if it were unpickled without care."""

    def mutate(content: bytes, rng: random.Random) -> bytes:
        payload = Payload(marker, rng.choice(["system", "open", "eval"]))
        members = _members(content)
        (pickled,) = (name for name in members if name.endswith("data.pkl"))
        match rng.randrange(4):
            case 0:
                members[pickled] = pickle.dumps(payload, protocol=2)
            case 1:
                return pickle.dumps(payload, protocol=rng.randrange(6))
            case 2:
                return _saved(payload, zipped=False)
            case _:
                state = copy.deepcopy(_state(content))
                path = rng.choice(_paths(state)[1:])
                _fields(_holder(state, path))[path[-1]] = payload
                return _saved(state)
        return _zipped(list(members.items()), zipfile.ZIP_STORED)

    return mutate


class Payload:
    """A malicious pickle: a call that creates a file."""

    def __init__(self, marker: Path, how: str) -> None:
        self._marker = str(marker)
        self._how = how

    def __reduce__(self) -> tuple[Any, ...]:
        match self._how:
            case "system":
                return os.system, (f"touch {self._marker}",)
            case "open":
                return open, (self._marker, "w")
            case _:
                return eval, (f"open({self._marker!r}, 'w')",)


def changed(data: Any, rng: random.Random, odd: Sequence[Any] = ODD) -> Any:
    """Return nested data, which is changed in place: up to three values are replaced, removed or moved to odd keys."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        paths = _paths(data)[1:]
        if not paths:
            return rng.choice(odd)
        path = rng.choice(paths)
        holder = _fields(_holder(data, path))
        match rng.randrange(4):
            case 0:
                del holder[path[-1]]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(ODD_KEYS)] = holder.pop(path[-1])
            case _ if is_plain(holder[path[-1]]) and rng.random() < 0.8:
                holder[path[-1]] = _odd_tensor(holder[path[-1]], rng)
            case _:
                holder[path[-1]] = copy.deepcopy(rng.choice(odd))
    return data


def _odd_tensor(tensor: Tensor, rng: random.Random) -> Tensor:
    one = torch.ones(())
    makers: Sequence[Callable[[], Tensor]] = (
        lambda: torch.zeros(0),
        lambda: one,
        lambda: tensor.to(torch.int64),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.bool(),
        lambda: tensor.to(torch.float8_e4m3fn),
        lambda: tensor.to_sparse(),
        lambda: tensor.to("meta"),
        lambda: tensor.reshape(-1),
        lambda: tensor.unsqueeze(0),
        lambda: one.expand(tensor.shape),
        lambda: one.expand(2**36),  # a few bytes that claim to be 256 GiB
        lambda: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else one,
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    )
    return rng.choice(makers)()


def _paths(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside nested data, beginning with the data itself."""
    fields = _fields(data)
    children = fields.items() if isinstance(fields, dict) else enumerate(fields)
    inner = (_paths(value, (*here, key)) for key, value in children)
    return [here, *(path for paths in inner for path in paths)]


def _fields(data: Any) -> Any:
    """Return the container whose items can be changed, if the value has one."""
    if isinstance(data, dict | list):
        return data
    return vars(data) if isinstance(data, argparse.Namespace) else []


def _holder(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = _fields(data)[key]
    return data


@cache
def _state(content: bytes) -> Any:
    """Return the content of one of our own .pt files, which is unpickled without restrictions."""
    return torch.load(io.BytesIO(content), weights_only=False)


def _saved(state: Any, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def _members(content: bytes) -> dict[str, bytes]:
    """Return the members of the archive as torch would write it; DeepSpeed leaves out the checksums."""
    with zipfile.ZipFile(io.BytesIO(_saved(_state(content)))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zipped(members: Sequence[tuple[str, bytes]], kind: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, kind)
    return buffer.getvalue()


BY_SUFFIX: Mapping[str, Sequence[Mutation]] = {
    ".json": (damaged, in_json, in_json),
    ".jsonl": (damaged, in_json_lines),
    ".yaml": (damaged, in_yaml, in_yaml),
    ".idx": (damaged, in_index),
    ".bin": (damaged,),
    ".txt": (damaged, in_words),
    "": (damaged, in_words),
    ".safetensors": (damaged, in_safetensors, in_safetensors),
    ".pt": (damaged, in_archive, in_state, in_state, in_state),
}
