"""Beam search for the continuation with the largest mean log-probability per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_style.inference.next_token import NextToken, next_tokens
from megatron_style.inference.sampling import Walk, open_walk
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
) -> Iterator[Hypothesis]:
    """Yield the best text so far after each token; the last one is the result. Of all texts found that are `ended` or
    have all their tokens, it has the best score."""
    walk = open_walk(model, rows=beams, segment_length=segment_length, cache_length=cache_length)
    features_BD = walk.read([eos, *prompt])[None]
    live = [Hypothesis()]
    done: list[Hypothesis] = []
    for length in range(1, tokens + 1):
        if length > 1:
            features_BD = _advance(walk, live, beams, features_BD.device)
        following = next_tokens(model.vocabulary, features_BD)
        longer = _extend(live, following, 2 * beams)  # twice as many, since some may end
        live = []
        for text in longer:
            (done if ended(text.tokens) else live).append(text)
        live = live[:beams]
        done = sorted(done, key=lambda text: -text.score)[:1]
        yield max(done + live, key=lambda text: text.score)
        # A longer text is never likelier, so no live text can exceed this score.
        if not live or (done and done[0].score >= live[0].log_prob / tokens):
            return


def _advance(walk: Walk, live: Sequence[Hypothesis], beams: int, device: torch.device) -> Tensor:
    """Return the features after each live text [B, D]. Spare rows repeat the first text and are ignored."""
    rows = [*live, *[live[0]] * (beams - len(live))]
    walk.select([text.row for text in rows])
    return walk.step(torch.tensor([text.tokens[-1] for text in rows], device=device))[: len(live)]


def _extend(live: Sequence[Hypothesis], following: Sequence[NextToken], count: int) -> list[Hypothesis]:
    """Return the likeliest texts that are one token longer; ties in the order of the live texts."""
    longer = []
    for row, token in enumerate(following):
        log_probs, ids = token.likeliest(count)
        longer += [(live[row].log_prob + p, row, i) for p, i in zip(log_probs.tolist(), ids.tolist(), strict=True)]
    longer.sort(key=lambda found: -found[0])
    return [Hypothesis((*live[row].tokens, index), log_prob, row) for log_prob, row, index in longer[:count]]
