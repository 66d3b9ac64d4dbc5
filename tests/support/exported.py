"""Small models as folders for transformers, and the results of this project's own code for them."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.tokenizer import BpeTokenizer, Tokenizer
from megatron_style.data.word_dictionary import WordDictionary
from megatron_style.formats.huggingface import folder as huggingface
from megatron_style.formats.huggingface.modeling_shortformer import ShortformerForCausalLM
from megatron_style.formats.source import ModelSource
from megatron_style.inference.sampling import Sampler, generate
from megatron_style.model.shortformer import Shortformer
from tests.support.tiny import (
    VOCAB_SIZE,
    tiny_config,
    tiny_model,
    weights_of,
)

KINDS = ["adaptive", "tied", "untied"]
VARIANTS = [
    tiny_config(kind, positions=positions, cache=cache)
    for kind in KINDS
    for positions in ("infused", "added")
    for cache in (True, False)
]
EOS = 2
PROMPT = [5, 9, 30]
LINES = ["the cat sat on the mat", "the dog sat  on the log", "straße 猫 \t\x85 <unk> </s>"]
TEXTS = [
    "the cat\nsat",
    "",
    "\n",
    "\n\n the  dog \n",
    "straße 猫 nowhere\r\n\x85\x1c x<unk>y <unk>",
    "a </s>b\n\n\nthe",
]


def name_of(config: ModelFolderConfig) -> str:
    model = config.model
    return f"{model.vocabulary.kind}-{model.positions}-{'cached' if model.cache else 'alone'}"


def words() -> WordDictionary:
    return WordDictionary.build(Counter(word for line in LINES for word in line.split()))


def byte_pairs() -> BpeTokenizer:
    return BpeTokenizer.train(LINES * 20, vocab_size=300)


def source_of(config: ModelFolderConfig, tokenizer: Tokenizer | None = None) -> ModelSource:
    weights = weights_of(tiny_model(config, torch.float32))
    return ModelSource(Path("source"), config, weights.__getitem__, lambda: tokenizer)


def export(folder: Path, config: ModelFolderConfig, tokenizer: Tokenizer | None = None) -> Path:
    huggingface.write(folder, source_of(config, tokenizer))
    return folder


def load(folder: Path) -> ShortformerForCausalLM:
    model: ShortformerForCausalLM = ShortformerForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def our_model(config: ModelFolderConfig) -> Shortformer:
    """Return the model of an export: its weights are float32 numbers, and it computes in float64."""
    return tiny_model(config, torch.float32).double()


@torch.no_grad()
def our_log_probs(config: ModelFolderConfig, ids: list[int]) -> Tensor:
    model = our_model(config)
    cache = model.empty_memory(1, config.cache_length)
    parts = []
    for segment in torch.tensor([ids]).split(config.segment_length, 1):
        features, cache, *_ = model.features(segment, cache)
        parts.append(model.vocabulary.log_probs(features[0]))
    return torch.cat(parts)


def our_greedy(config: ModelFolderConfig, prompt: list[int], tokens: int) -> list[int]:
    stream = generate(
        our_model(config),
        [prompt],
        Sampler(temperature=0),
        segment_length=config.segment_length,
        cache_length=config.cache_length,
        eos=EOS,
        seed=1,
    )
    return [token for (token,) in islice(stream, tokens)]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    ids, mask = torch.ones(2, len(rows), max(map(len, rows)), dtype=torch.long)
    for row, text in enumerate(rows):
        gap = ids.shape[1] - len(text)
        place = slice(gap, None) if side == "left" else slice(0, len(text))
        mask[row] = 0
        ids[row, place] = torch.tensor(text)
        mask[row, place] = 1
    return ids, mask
