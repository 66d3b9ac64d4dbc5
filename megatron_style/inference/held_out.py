"""Evaluation on held-out text during training: the loss, also by position in the segment, and a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_style.config.model import EvaluationMode
from megatron_style.config.run import OutputConfig
from megatron_style.data.corpus import Corpus
from megatron_style.inference.greedy import continue_greedily
from megatron_style.inference.scoring import Protocol, score
from megatron_style.model.shortformer import Shortformer
from megatron_style.schedule.stages import Stage

_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class HeldOut:
    loss: float  # nats per token
    perplexity: float
    by_position: tuple[float, ...]
    prompt: str = ""
    text: str = ""
    text_digest: str = ""  # of the text and its vocabulary


def held_out(model: Shortformer, corpus: Corpus, output: OutputConfig, last: Stage) -> HeldOut:
    """Evaluate by the protocol of the run's last stage in every stage, so that stages can be compared. All ranks take
    part, and the state of the training does not change."""
    mode: EvaluationMode = "cached" if last.cache_length else "nonoverlapping"
    protocol = Protocol(
        mode, last.segment_length, last.cache_length, batch_rows=1 if last.cache_length else last.micro_rows
    )
    tokens = corpus.valid.tokens[: output.evaluate_tokens]
    found = score(model, tokens, protocol, eos=corpus.eos)
    prompt = tokens[:_PROMPT_TOKENS].tolist()
    written = continue_greedily(
        model,
        [corpus.eos, *prompt],
        output.sample_tokens,
        segment_length=last.segment_length,
        cache_length=last.cache_length,
    )
    return HeldOut(
        found.loss,
        found.perplexity,
        tuple(found.by_band(protocol)),
        _spelled(prompt, corpus),
        _spelled(written, corpus),
        corpus.held_out_digest(tokens),
    )


def _spelled(ids: Sequence[int], corpus: Corpus) -> str:
    """Return the text of the ids. Without a tokenizer these are numbers; ids beyond the tokenizer's become <unk>, since
    data.vocab_size may be larger."""
    if corpus.tokenizer is None:
        return " ".join(map(str, ids))
    tokenizer = corpus.tokenizer
    strange = tokenizer.eos if tokenizer.unk is None else tokenizer.unk
    return tokenizer.decode([token if token < tokenizer.vocab_size else strange for token in ids])
