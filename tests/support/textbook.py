"""The Shortformer written from the paper in plain loops, one token and one head at a time, in float64.

It shares no code with the package, so that it can test it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.config.model import ModelConfig

Array = NDArray[Any]
Weights = dict[str, Array]


def score_row(
    config: ModelConfig, vocab_size: int, w: Weights, tokens: list[int], L: int, C: int, eos: int
) -> list[float]:
    """Return -ln p of every token of one row, read in segments of L with a cache of the C tokens before."""
    cached: list[list[Array]] = [[] for _ in range(config.layers)]
    everything = [eos, *tokens]
    nll = []
    for start in range(0, len(tokens), L):
        segment = tokens[start : start + L]
        inputs = [tokens[start - 1] if start else eos, *segment[:-1]]
        remembered = min(C, start)
        firsts = [_first_seen(config, everything[start - remembered : start + i + 1]) for i in range(len(inputs))]
        hidden, cached = _decode(config, w, inputs, cached, C, firsts)
        nll += [_nll(config, vocab_size, w, h, target) for h, target in zip(hidden, segment, strict=True)]
    return nll


def _first_seen(config: ModelConfig, inputs: list[int]) -> int:
    """Return the place of the first token that the last one sees: all of them, or those of its document."""
    ends = [place for place, token in enumerate(inputs) if token == config.document_end]
    return ends[-1] if ends else 0


def position(p: int, size: int) -> Array:
    """Return the sinusoids of a position. The first token has position 2, as in the reference."""
    half = size // 2
    rates = [math.exp(-i * math.log(10000) / (half - 1)) for i in range(half)]
    return np.array([math.sin((p + 2) * r) for r in rates] + [math.cos((p + 2) * r) for r in rates])


def _decode(
    config: ModelConfig, w: Weights, inputs: list[int], cached: list[list[Array]], C: int, firsts: list[int]
) -> tuple[list[Array], list[list[Array]]]:
    D = config.hidden_size
    hidden = [_embed(config, w, token) * math.sqrt(D) for token in inputs]
    if config.positions != "infused":
        hidden = [h + position(i, D) for i, h in enumerate(hidden)]
    kept: list[list[Array]] = []
    fed = 0
    for sublayer in "s" * config.sandwich + "sf" * (config.layers - config.sandwich) + "f" * config.sandwich:
        if sublayer == "s":
            name = f"blocks.{len(kept)}."
            before = cached[len(kept)]
            seen = before + [_norm(h, w, name + "attention_norm.") for h in hidden]
            mixed = [
                _attend(config, w, name + "attention.", seen, len(before) + i, firsts[i]) for i in range(len(hidden))
            ]
            hidden = [h + m for h, m in zip(hidden, mixed, strict=True)]
            kept.append(seen[len(seen) - min(C, len(seen)) :])
        else:
            name = f"blocks.{fed}."
            for i, h in enumerate(hidden):
                inner = _linear(_norm(h, w, name + "ffn_norm."), w, name + "up.")
                hidden[i] = h + _linear(np.maximum(inner, 0), w, name + "down.")
            fed += 1
    return hidden, kept


def _attend(config: ModelConfig, w: Weights, name: str, seen: list[Array], me: int, first: int) -> Array:
    """Attend from token `me` to the tokens from `first` to itself; positions count from the oldest cached token."""
    D = config.hidden_size
    E = D // config.heads
    pos = [position(j, D) if config.positions == "infused" else np.zeros(D) for j in range(me + 1)]
    query = _linear(seen[me] + pos[me], w, name + "query.")
    out = np.zeros(D)
    for head in range(config.heads):
        part = slice(head * E, (head + 1) * E)
        logits = []
        for j in range(first, me + 1):
            key = _linear(seen[j] + pos[j], w, name + "key.")
            logits.append(float(query[part] @ key[part]) / math.sqrt(E))
        total = sum(math.exp(x - max(logits)) for x in logits)
        for j in range(first, me + 1):
            share = math.exp(logits[j - first] - max(logits)) / total
            out[part] += share * _linear(seen[j], w, name + "value.")[part]
    return _linear(out, w, name + "out.")


def _embed(config: ModelConfig, w: Weights, token: int) -> Array:
    if config.vocabulary.kind != "adaptive":
        vector: Array = w["vocabulary.table.weight"][token]
        return vector
    band = sum(token >= cutoff for cutoff in config.vocabulary.cutoffs)
    first = (0, *config.vocabulary.cutoffs)[band]
    name = f"vocabulary.bands.{band}."
    projected: Array = w[name + "projection"] @ w[name + "table.weight"][token - first]
    return projected


def _nll(config: ModelConfig, vocab_size: int, w: Weights, h: Array, target: int) -> float:
    if config.vocabulary.kind != "adaptive":
        table = (
            w["vocabulary.output_table.weight"] if config.vocabulary.kind == "untied" else w["vocabulary.table.weight"]
        )
        return -_log_softmax([float(row @ h) for row in table])[target]
    edges = (0, *config.vocabulary.cutoffs, vocab_size)
    head = [float(row @ h) for row in w["vocabulary.bands.0.table.weight"]]
    head += [float(row @ h) for row in w["vocabulary.clusters"]]
    band = sum(target >= cutoff for cutoff in config.vocabulary.cutoffs)
    if band == 0:
        return -_log_softmax(head)[target]
    name = f"vocabulary.bands.{band}."
    narrow = w[name + "projection"].T @ h
    inside = [float(row @ narrow) for row in w[name + "table.weight"]]
    return -_log_softmax(head)[edges[1] + band - 1] - _log_softmax(inside)[target - edges[band]]


def _log_softmax(logits: list[float]) -> list[float]:
    peak = max(logits)
    total = peak + math.log(sum(math.exp(x - peak) for x in logits))
    return [x - total for x in logits]


def _linear(x: Array, w: Weights, name: str) -> Array:
    return w[name + "weight"] @ x + w[name + "bias"]


def _norm(x: Array, w: Weights, name: str) -> Array:
    centred = x - x.mean()
    scaled: Array = centred / math.sqrt(float((centred**2).mean()) + 1e-5)
    return scaled * w[name + "weight"] + w[name + "bias"]
