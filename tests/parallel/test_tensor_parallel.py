"""Tensor parallelism changes where numbers are computed, never which."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_style.config.model import ModelConfig
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise, layout_of, layouts_of, shard, unshard
from megatron_style.parallel.topology import Axis, Topology

VOCAB_SIZE = 37  # divides by no number of ranks; the middle band of five tokens leaves a rank of four with none
VOCABULARIES = {
    "adaptive": {"kind": "adaptive", "cutoffs": [13, 18], "factor": 2},
    "tied": {"kind": "tied"},
    "untied": {"kind": "untied"},
}


def config_of(vocabulary: str, positions: str = "infused") -> ModelConfig:
    data = {"layers": 2, "hidden_size": 16, "heads": 4, "ffn_size": 32, "positions": positions,
            "vocabulary": VOCABULARIES[vocabulary]}  # fmt: skip
    return ModelConfig.parse(data, source="test")


def build(config: ModelConfig, axis: Axis, *, recompute: bool) -> Shortformer:
    model = Shortformer(config, VOCAB_SIZE, axis, recompute=recompute)
    initialise(model, seed=1, axis=axis)
    return model.double()


def loss_over_segments(model: Shortformer) -> torch.Tensor:
    ids = torch.randint(0, VOCAB_SIZE, (3, 25), generator=torch.Generator().manual_seed(1))
    cache, losses = model.empty_memory(rows=3, capacity=6), []
    for start in range(0, 24, 8):
        nll, cache, *_ = model(ids[:, start : start + 8], ids[:, start + 1 : start + 9], cache)
        losses.append(nll.mean())
    return torch.stack(losses).mean()


def expect_same(config: ModelConfig, recompute: bool, loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    axis = Topology.of_world(tensor=dist.get_world_size()).tensor
    model = build(config, axis, recompute=recompute)
    mine = loss_over_segments(model)
    mine.backward()
    torch.testing.assert_close(mine.detach(), loss, rtol=1e-9, atol=1e-9)
    for name, param in model.named_parameters():
        dim = layout_of(param).shard_dim
        expected = gradients[name] if dim is None else shard(gradients[name], dim, axis.size)[axis.rank]
        torch.testing.assert_close(
            param.grad, expected, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


CASES = list(product(VOCABULARIES, [False, True]))
ON_FOUR_RANKS = [("adaptive", True), ("tied", False)]


@pytest.mark.parametrize(
    ("world", "vocabulary", "recompute"),
    [
        *(pytest.param(world, *case) for world, case in product([1, 2], CASES)),
        *(
            pytest.param(4, *case, marks=pytest.mark.slow if case in ON_FOUR_RANKS else pytest.mark.sweep)
            for case in CASES
        ),
    ],
)
def test_loss_and_gradients_equal_one_process(world: int, vocabulary: str, recompute: bool) -> None:
    config = config_of(vocabulary)
    model = build(config, Axis(), recompute=False)
    loss = loss_over_segments(model)
    loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    run_ranks(world, expect_same, config, recompute, loss.detach(), gradients)


@pytest.mark.parametrize("ways", [2, 4])
def test_every_grid_starts_from_the_same_weights(ways: int) -> None:
    whole = dict(build(config_of("adaptive"), Axis(), recompute=False).named_parameters())
    for rank in range(ways):
        axis = Axis(size=ways, rank=rank)
        for name, param in build(config_of("adaptive"), axis, recompute=False).named_parameters():
            dim = layout_of(param).shard_dim
            expected = whole[name] if dim is None else shard(whole[name], dim, ways)[rank]
            assert torch.equal(param, expected), name


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 7])
def test_split_then_merge_is_identity(ways: int) -> None:
    model = build(config_of("adaptive"), Axis(), recompute=False)
    layouts = layouts_of(model)
    for name, param in model.named_parameters():
        dim = layouts[name].shard_dim
        if dim is not None:
            parts = shard(param.detach(), dim, ways)
            assert {part.shape for part in parts} == {layouts[name].shard_shape(ways)}
            assert torch.equal(unshard(parts, dim, param.shape[dim]), param)
