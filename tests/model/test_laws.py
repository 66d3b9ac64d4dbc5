"""What every kind of model obeys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.config.model import EvaluationMode, ModelFolderConfig
from megatron_style.formats.certificate import fixed_text, streamed_nll
from megatron_style.formats.formats import FORMATS, check_holds
from megatron_style.formats.source import ModelSource, unheld
from megatron_style.inference.decoder import Decoder
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.model.attention import attention_of
from megatron_style.model.shape import parameters
from megatron_style.model.shortformer import Output, Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise, layout_of, shard
from megatron_style.parallel.topology import Axis, Topology
from megatron_style.rehearsal.live_bytes import bytes_of
from tests.support.models import MODELS, model_config
from tests.support.tiny import weights_of

every_model = pytest.mark.parametrize("name", MODELS)
ROWS = 3


def build(name: str, axis: Axis | None = None, *, recompute: bool = False, sequence: bool = False) -> Shortformer:
    """Return a model whose norms and biases are no longer the identity, which would hide a mix-up."""
    config = model_config(name)
    axis = axis or Axis()
    model = Shortformer(config.model, config.vocab_size, axis, recompute=recompute, sequence=sequence)
    initialise(model, 1, axis)
    with torch.no_grad():
        for path, param in model.named_parameters():
            if param.dim() == 1:
                full = torch.randn(layout_of(param).shape, generator=torch.Generator().manual_seed(len(path)))
                dim = layout_of(param).shard_dim
                param.add_(0.3 * (full if dim is None else shard(full, dim, axis.size)[axis.rank]))
    return model.double()


def text_of(config: ModelFolderConfig, tokens: int, rows: int = ROWS) -> Tensor:
    return torch.randint(0, config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(7))


def outputs_of(model: Shortformer, ids: Tensor, config: ModelFolderConfig) -> Iterator[Output]:
    """Yield what a model makes of a text, read in segments."""
    memory = model.empty_memory(len(ids), config.cache_length)
    length = config.segment_length
    for start in range(0, ids.shape[1] - 1, length):
        inputs = ids[:, start : start + length]
        targets = ids[:, start + 1 : start + length + 1]
        output = model(inputs[:, : targets.shape[1]], targets, memory, key=True)
        memory = output.memory
        yield output


def losses_of(model: Shortformer, ids: Tensor, config: ModelFolderConfig) -> Tensor:
    """Return the loss of each token but the first."""
    return torch.cat([output.nll for output in outputs_of(model, ids, config)], 1)


def trained(model: Shortformer, config: ModelFolderConfig) -> tuple[Tensor, Output]:
    """Return the mean of the losses that training adds up, over three segments and a short one, and what the model
    makes of the third."""
    ids = text_of(config, 3 * config.segment_length + 4)
    outputs = list(outputs_of(model, ids, config))
    losses = [output.nll.mean() + sum(output.auxiliary.values()) for output in outputs]
    return torch.stack(losses).mean(), outputs[2]


def can_decode(name: str) -> bool:
    return attention_of(model_config(name).model).can_decode


@every_model
def test_a_token_moves_no_loss_before_it(name: str) -> None:
    config = model_config(name)
    model = build(name)
    ids = text_of(config, 3 * config.segment_length + 1, rows=1)
    with torch.no_grad():
        before = losses_of(model, ids, config)
        for place in range(1, ids.shape[1] - 1):
            changed = ids.clone()
            changed[:, place] = (changed[:, place] + 11) % config.vocab_size
            after = losses_of(model, changed, config)
            torch.testing.assert_close(after[:, : place - 1], before[:, : place - 1], atol=1e-13, rtol=0)
            assert (after[:, place - 1 :] - before[:, place - 1 :]).abs().max() > 1e-6


@every_model
def test_the_table_of_shapes_is_the_models(name: str) -> None:
    config = model_config(name)
    found = {path: tuple(param.shape) for path, param in build(name).named_parameters()}
    assert list(found) == list(parameters(config.model, config.vocab_size))
    assert found == {path: shape.shape for path, shape in parameters(config.model, config.vocab_size).items()}


WAYS = {  # by the number of tensor-parallel ranks: recompute, sequence parallelism
    1: [(True, False), (False, True)],
    2: [(False, False), (True, True)],
    4: [(True, False), (False, True)],
}


def divisible(name: str) -> ModelFolderConfig:
    """Return a configuration whose segments can be divided among four ranks."""
    config = model_config(name)
    return config.model_copy(update={"segment_length": 8, "cache_length": 8 if config.model.cache else 0})


def expect_same(name: str, loss: Tensor, gradients: dict[str, Tensor], key: Tensor, remembered: int) -> None:
    axis = Topology.of_world(tensor=dist.get_world_size()).tensor
    for recompute, sequence in WAYS[axis.size]:
        model = build(name, axis, recompute=recompute, sequence=sequence)
        mine, third = trained(model, divisible(name))
        mine.backward()
        expect_close(model, mine.detach(), loss, gradients)
        if axis.size > 1:  # the bytes of storages: a view would keep more than its share
            assert bytes_of(third.memory.layers) * axis.size == remembered
        torch.testing.assert_close(third.key, key, rtol=1e-9, atol=1e-9)


def expect_close(model: Shortformer, mine: Tensor, loss: Tensor, gradients: dict[str, Tensor]) -> None:
    axis = model.axis
    torch.testing.assert_close(mine, loss, rtol=1e-9, atol=1e-9)
    for path, param in model.named_parameters():
        dim = layout_of(param).shard_dim
        expected = gradients[path] if dim is None else shard(gradients[path], dim, axis.size)[axis.rank]
        torch.testing.assert_close(
            param.grad, expected, rtol=1e-9, atol=1e-9, msg=lambda text, path=path: f"{path}: {text}"
        )


ON_FOUR_RANKS = {"shortformer", "baseline", "transformer-xl-adaptive", "compressive", "routing-first-local"}


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=() if name in ON_FOUR_RANKS else pytest.mark.slow)
        for name, world in product(MODELS, (1, 2))
    ]
    + [
        pytest.param(name, 4, marks=pytest.mark.slow if name in ON_FOUR_RANKS else pytest.mark.sweep) for name in MODELS
    ],
)
def test_tensor_parallel_ranks_and_recompute_equal_one_process(name: str, world: int) -> None:
    model = build(name)
    loss, third = trained(model, divisible(name))
    loss.backward()
    gradients = {path: param.grad for path, param in model.named_parameters()}
    assert all(grad is not None and grad.abs().max() > 0 for path, grad in gradients.items() if "key.bias" not in path)
    assert third.key is not None
    remembered = sum(layer.nbytes for layer in third.memory.layers)
    run_ranks(world, expect_same, name, loss.detach(), gradients, third.key.detach(), remembered)


@pytest.mark.parametrize("name", [name for name in MODELS if can_decode(name)])
@pytest.mark.parametrize(("L", "C"), [(6, 6), (4, 7), (5, 0), (1, 3)])
def test_token_by_token_equals_segment_by_segment(name: str, L: int, C: int) -> None:
    config = model_config(name)
    model = build(name)
    text = text_of(config, 23, rows=2)
    found = []
    memory = model.empty_memory(2, C)
    with torch.no_grad():
        for segment in text.split(L, 1):
            x, memory, key, *_ = model.features(segment, memory)
            found.append(torch.stack([x, key]))
    features = torch.cat(found, 2)
    decoder = Decoder(model, rows=2, segment_length=L, cache_length=C)
    for row in range(2):
        reading = torch.stack(decoder.read(text[row, :9], row=row))
        torch.testing.assert_close(reading, features[:, row, 8], atol=1e-12, rtol=0)
    for place in range(9, text.shape[1]):
        reading = torch.stack(decoder.step(text[:, place]))
        torch.testing.assert_close(reading, features[:, :, place], atol=1e-12, rtol=0)


@every_model
def test_layer_by_layer_gives_what_the_model_gives(name: str) -> None:
    config = model_config(name)
    model = build(name)
    source = ModelSource(Path("model"), config, weights_of(model).__getitem__, lambda: None)
    text = fixed_text(config)
    mode: EvaluationMode = "cached" if config.cache_length else "nonoverlapping"
    protocol = Protocol(mode, config.segment_length, config.cache_length)
    expected = score(model, text[1:].numpy(), protocol, eos=int(text[0])).nll
    np.testing.assert_allclose(streamed_nll(source, text), expected, atol=1e-12)


@every_model
def test_a_form_holds_a_model_or_refuses_it_by_the_name_of_a_setting(name: str, tmp_path: Path) -> None:
    config = model_config(name)
    weights = weights_of(build(name).float())
    source = ModelSource(tmp_path, config, weights.__getitem__, lambda: None)
    for form in FORMATS:
        write = getattr(form, "write", None)
        if write is None:
            continue
        if refused := list(unheld(config.model, form.HOLDS)):
            with pytest.raises(UserError, match=f"model.{refused[0][0]} is .*cannot hold"):
                check_holds(form, source)
            continue
        path = tmp_path / ("model.pt" if "fairseq" in form.NAME else form.__name__)
        write(path, source)
        read = form.read(path)
        assert read.config.model == config.model
        for key, weight in weights.items():
            torch.testing.assert_close(read.weight(key), weight, atol=0, rtol=0)
