"""Beam search for the continuation with the largest mean log-probability per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_style.inference.decoder import Reading
from megatron_style.inference.next_token import NextToken, Predict, by_model
from megatron_style.inference.sampling import Walk, open_walk, stacked
from megatron_style.model.shortformer import Shortformer


@dataclass(frozen=True)
class Hypothesis:
    tokens: tuple[int, ...] = ()
    log_prob: float = 0.0
    row: int = 0  # of the walk: its text without the last token

    @property
    def score(self) -> float:
        """Return the log-probability per token; by the sum the shortest text would win."""
        return self.log_prob / len(self.tokens)


@torch.no_grad()
def beam_search(
    model: Shortformer,
    prompt: Sequence[int],
    *,
    beams: int,
    tokens: int,
    segment_length: int,
    cache_length: int,
    eos: int,
    ended: Callable[[Sequence[int]], bool],
    predict: Predict | None = None,
) -> Iterator[Hypothesis]:
    """Yield the best text so far after each token; the last one is the result. Of all texts found that are `ended` or
    have all their tokens, it has the best score. By default the model alone predicts."""
    predict = predict or by_model(model)
    walk = open_walk(model, rows=beams, segment_length=segment_length, cache_length=cache_length)
    reading = stacked([walk.read([eos, *prompt])])
    live = [Hypothesis()]
    done: list[Hypothesis] = []
    for length in range(1, tokens + 1):
        if length > 1:
            reading = _advance(walk, live, beams, reading.x.device)
        longer = _extend(live, predict(reading), 2 * beams)  # twice as many, since some may end
        live = []
        for text in longer:
            (done if ended(text.tokens) else live).append(text)
        live = live[:beams]
        done = sorted(done, key=lambda text: -text.score)[:1]
        yield max(done + live, key=lambda text: text.score)
        # A longer text is never likelier, so no live text can exceed this score.
        if not live or (done and done[0].score >= live[0].log_prob / tokens):
            return


def _advance(walk: Walk, live: Sequence[Hypothesis], beams: int, device: torch.device) -> Reading:
    """Read the last token of each live text. Spare rows repeat the first text and are ignored."""
    rows = [*live, *[live[0]] * (beams - len(live))]
    walk.select([text.row for text in rows])
    reading = walk.step(torch.tensor([text.tokens[-1] for text in rows], device=device))
    return Reading(*(part[: len(live)] for part in reading))


def _extend(live: Sequence[Hypothesis], following: Sequence[NextToken], count: int) -> list[Hypothesis]:
    """Return the likeliest texts that are one token longer; ties in the order of the live texts."""
    longer = []
    for row, token in enumerate(following):
        log_probs, ids = token.likeliest(count)
        longer += [(live[row].log_prob + p, row, i) for p, i in zip(log_probs.tolist(), ids.tolist(), strict=True)]
    longer.sort(key=lambda found: -found[0])
    return [Hypothesis((*live[row].tokens, index), log_prob, row) for log_prob, row, index in longer[:count]]
