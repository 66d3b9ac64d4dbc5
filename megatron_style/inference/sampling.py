"""Sampling text from a model, token by token. The cache works as in training: a segment grows to its length, then
becomes the cache of the next. So the context grows from one segment to two and drops back, however long the text is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.inference.decoder import Decoder, Reading
from megatron_style.inference.next_token import Floats, Ids, NextToken, Predict, by_model, pick
from megatron_style.model.attention import attention_of
from megatron_style.model.documents import ages_of
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.randomness import derive_key

CHARACTER = 4  # the most bytes of one in UTF-8, and so the most tokens that it can span
PART = "\ufffd"  # a part of a character, decoded


@dataclass(frozen=True)
class Sampler:
    """The choice of the next token. Temperature 0 is greedy; temperature, top_k and top_p apply in this order."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def choose(self, following: NextToken, u: float) -> int:
        """Return the token for one number u in [0, 1]; if u is uniform, the token has the distribution asked for."""
        if self.temperature == 0:
            return int(following.likeliest(1)[1][0])
        if self.temperature == 1 and self.top_k is None and self.top_p is None:
            return following.draw(u)
        probs, ids = self._candidates(following)
        if self.top_p is not None:
            order = np.argsort(-probs, kind="stable")
            probs = probs[order]
            ids = ids[order]
            probs = probs[probs.cumsum() - probs < self.top_p]  # the mass before each token: the first is always kept
        return int(ids[pick(probs, u)[0]])

    def _candidates(self, following: NextToken) -> tuple[Floats, Ids]:
        """Return probabilities and ids, before the cut by top_p."""
        if self.top_k is not None:
            log_probs, ids = following.likeliest(self.top_k)
        elif self.top_p is not None and self.temperature == 1:
            log_probs, ids = following.nucleus(self.top_p)
            return np.exp(log_probs, dtype=np.float64), ids
        else:
            log_probs, ids = following.everything()
        # The maximum is subtracted first, or a tiny temperature would make all scores -inf.
        with np.errstate(over="ignore"):
            scores = (log_probs.astype(np.float64) - log_probs.max()) / self.temperature
        return np.exp(scores) / np.exp(scores).sum(), ids


class Walk(Protocol):
    """Rows of text that a model reads token by token: a `Decoder`, or a `Reencoder` for models that it cannot serve."""

    def read(self, ids: Sequence[int], *, row: int = 0) -> Reading:
        """Append a text of any length to one row."""

    def step(self, ids_B: Tensor) -> Reading:
        """Append one token to every row."""

    def select(self, rows: Sequence[int]) -> None:
        """Replace each row i by row `rows[i]`."""


class Reencoder:
    """A walk for models with added positions, which cannot be subtracted again: each token re-encodes its segment."""

    def __init__(self, model: Shortformer, *, rows: int, segment_length: int, cache_length: int) -> None:
        self._model = model
        self._segment_length = segment_length
        empty: list[int] = []
        none = torch.tensor([-1], device=model.positions.table.device)
        # The open segment, the memory before it, and the age of the last token before it: replaced, never changed.
        self._rows = [(empty, model.empty_memory(1, cache_length), none)] * rows

    @torch.no_grad()
    def read(self, ids: Sequence[int], *, row: int = 0) -> Reading:
        open_segment, cache, age = self._rows[row]
        device = self._model.positions.table.device
        for segment in torch.tensor([*open_segment, *ids], device=device).split(self._segment_length):
            before = cache
            age_before = age
            ages = None
            if (document_end := self._model.config.document_end) is not None:
                ages = ages_of(segment[None], document_end, age_before)
                age = ages[:, -1]
            x_BTD, cache, key_BTD, *_ = self._model.features(segment[None], before, ages)
        self._rows[row] = segment.tolist(), before, age_before
        return Reading(x_BTD[0, -1], key_BTD[0, -1])

    def step(self, ids_B: Tensor) -> Reading:
        return stacked([self.read([token], row=row) for row, token in enumerate(ids_B.tolist())])

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]


def stacked(rows: Sequence[Reading]) -> Reading:
    """Return the readings of single rows as one."""
    return Reading(*(torch.stack(part) for part in zip(*rows, strict=True)))


def open_walk(model: Shortformer, *, rows: int, segment_length: int, cache_length: int) -> Walk:
    if problem := model.config.foresight:
        raise UserError(problem)
    kind = Decoder if attention_of(model.config).can_decode else Reencoder
    return kind(model, rows=rows, segment_length=segment_length, cache_length=cache_length)


def generate(
    model: Shortformer,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    *,
    segment_length: int,
    cache_length: int,
    eos: int,
    seed: int,
    first: int = 0,
    predict: Predict | None = None,
) -> Iterator[list[int]]:
    """Yield one token for each prompt, endlessly; the caller stops, as in `islice(generate(...), 100)`.

    A prompt is read as if a line had just ended. Its text depends on the seed and on its number, which counts from
    `first`, but not on the other prompts. By default the model alone predicts."""
    walk = open_walk(model, rows=len(prompts), segment_length=segment_length, cache_length=cache_length)
    reading = stacked([walk.read([eos, *prompt], row=row) for row, prompt in enumerate(prompts)])
    generators = [generator_of(seed, first + row) for row in range(len(prompts))]
    yield from write_on(predict or by_model(model), walk, reading, sampler, generators)


def generator_of(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_key(seed, number))


@torch.no_grad()
def write_on(
    predict: Predict, walk: Walk, reading: Reading, sampler: Sampler, generators: Sequence[torch.Generator]
) -> Iterator[list[int]]:
    """Yield one token for each row. It is read when the next is asked for: the walk has not seen the last one."""
    while True:
        tokens = [
            sampler.choose(following, float(torch.rand((), dtype=torch.float64, generator=generator)))
            for following, generator in zip(predict(reading), generators, strict=True)
        ]
        yield tokens
        reading = walk.step(torch.tensor(tokens, device=reading.x.device))


class Continuation:
    """A text that grows token by token: the part that can be shown, and whether it has ended."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, line_end: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._line_end = line_end
        self.tokens: list[int] = []
        self.ended = False
        self._shown: list[str] = []
        self._held = ""  # decoded, but perhaps the beginning of a stop

    @property
    def text(self) -> str:
        return "".join(self._shown)

    def add(self, token: int) -> str:
        """Add a token. Return the text that can be shown now: no part of a character, and no part of a stop."""
        self.tokens.append(token)
        # The text of a token depends on the character before it, not on the entire text.
        before = self._decode(slice(-CHARACTER - 1, -1))
        after = self._decode(slice(-CHARACTER - 1, None))
        self._held += after.removesuffix(PART)[len(before.removesuffix(PART)) :]
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.ended = True
        elif self._line_end and token == self._tokenizer.eos:
            self._held = self._held[:-1]
            self.ended = True
        return self._show()

    def finish(self) -> str:
        """End the text. Return the rest of it that has not been shown."""
        if not self.ended:
            self._held += PART if self._decode(slice(-CHARACTER, None)).endswith(PART) else ""
            self.ended = True
        return self._show()

    def _decode(self, which: slice) -> str:
        return self._tokenizer.decode(self.tokens[which])

    def _show(self) -> str:
        begun = max((_begun(stop, self._held) for stop in self._stops), default=0)
        certain = len(self._held) - (0 if self.ended else begun)
        self._shown.append(self._held[:certain])
        self._held = self._held[certain:]
        return self._shown[-1]


def _begun(stop: str, text: str) -> int:
    """Return the number of characters of `stop` with which the text ends, if it may become a stop."""
    return max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
