"""Evaluation on held-out text during training: the loss, also by position in the segment, and a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_style.config.model import EvaluationMode
from megatron_style.config.run import OutputConfig
from megatron_style.data.corpus import Corpus
from megatron_style.inference.greedy import continue_greedily
from megatron_style.inference.scoring.protocol import Protocol, rows_at_once
from megatron_style.inference.scoring.score import score
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.topology import Axis
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
    scored_tokens: int = 0


def held_out(model: Shortformer, corpus: Corpus, name: str, output: OutputConfig, last: Stage, axis: Axis) -> HeldOut:
    """Evaluate on the held-out text of this name by the protocol of the run's last stage in every stage, so that stages
    can be compared. Only the main text is continued by a sample. The ranks of the data axis share the text, all others
    repeat; the state of the training does not change."""
    protocol = protocol_of(last)
    tokens = corpus.valid[name].tokens[: output.evaluate_tokens]
    found = score(model, tokens, protocol, eos=corpus.eos, axis=axis)
    prompt = tokens[:_PROMPT_TOKENS].tolist()
    written = continue_greedily(
        model,
        [corpus.eos, *prompt],
        output.sample_tokens if name == corpus.main_valid else 0,
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
        len(tokens),
    )


def protocol_of(stage: Stage) -> Protocol:
    """Return the protocol of a stage. A pass has no more rows than a micro-batch of the training, which is known to fit
    into memory, or than keep a device busy, so that the ranks get even shares."""
    mode: EvaluationMode = "cached" if stage.cache_length else "nonoverlapping"
    rows = min(stage.micro_rows, rows_at_once(stage.segment_length))
    return Protocol(mode, stage.segment_length, stage.cache_length, batch_rows=rows)


def _spelled(ids: Sequence[int], corpus: Corpus) -> str:
    """Return the text of the ids. Without a tokenizer these are numbers; ids beyond the tokenizer's become <unk>, since
    data.vocab_size may be larger."""
    if corpus.tokenizer is None:
        return " ".join(map(str, ids))
    tokenizer = corpus.tokenizer
    strange = tokenizer.eos if tokenizer.unk is None else tokenizer.unk
    return tokenizer.decode([token if token < tokenizer.vocab_size else strange for token in ids])
