"""The exported code for transformers is standalone and repeats the model's. It is compared part by part, so that a
failure names the part that differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_style.config.model import ModelFolderConfig
from megatron_style.formats.huggingface import folder as huggingface
from megatron_style.formats.huggingface.modeling_shortformer import ShortformerForCausalLM
from megatron_style.formats.source import ModelSource
from megatron_style.model.shortformer import Shortformer
from tests.support.tiny import tiny_config, tiny_model, weights_of

SEGMENTS = 3


def watch(module: nn.Module, seen: dict[str, list[Tensor]]) -> None:
    """Keep what the first block reads and what every sublayer gives, segment by segment."""

    def keep(name: str, output: Tensor | tuple[Tensor, Tensor | None]) -> None:
        values = output[0] if isinstance(output, tuple) else output  # our attention also gives a loss, or none
        seen.setdefault(name, []).append(values.detach())

    first, *_ = module.blocks
    first.attention_norm.register_forward_pre_hook(lambda _, inputs: keep("enter", inputs[0]))
    for index, block in enumerate(module.blocks):
        for part in ("attention_norm", "attention", "ffn_norm", "down"):
            name = f"blocks.{index}.{part}"
            block.get_submodule(part).register_forward_hook(lambda _, __, output, name=name: keep(name, output))


@torch.no_grad()
def parts_of_ours(model: Shortformer, config: ModelFolderConfig, ids: Tensor) -> dict[str, Tensor]:
    seen: dict[str, list[Tensor]] = {}
    watch(model, seen)
    memory = model.empty_memory(1, config.cache_length)
    for segment in ids.split(config.segment_length, 1):
        features, memory, *_ = model.features(segment, memory)
        seen.setdefault("vocabulary", []).append(model.vocabulary.log_probs(features[0])[None])
    return {name: torch.cat(parts, 1) for name, parts in seen.items()}


@torch.no_grad()
def parts_of_theirs(model: ShortformerForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    seen: dict[str, list[Tensor]] = {}
    watch(model, seen)
    logits = model(ids).logits
    return {name: torch.cat(parts, 1) for name, parts in seen.items()} | {"vocabulary": logits.log_softmax(-1)}


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
@pytest.mark.parametrize(
    "setting", [{"positions": "added"}, {"positions": "infused"}, {"layers": 3, "sandwich": 2}], ids=str
)
def test_every_part_computes_the_same(tmp_path: Path, kind: str, setting: dict[str, object]) -> None:
    config = tiny_config(kind, **setting)
    ours = tiny_model(config, torch.float32)
    weights = weights_of(ours)
    huggingface.write(tmp_path / "model", ModelSource(tmp_path, config, weights.__getitem__, lambda: None))
    theirs = ShortformerForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (1, SEGMENTS * config.segment_length), generator=generator)
    wanted = parts_of_ours(ours.double(), config, ids)
    found = parts_of_theirs(theirs, ids)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], atol=1e-9, rtol=0, msg=lambda told, name=name: f"{name}: {told}"
        )


def test_unknown_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="positions is 'rotary'"):
        ShortformerForCausalLM.config_class(positions="rotary")
