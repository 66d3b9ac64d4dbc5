"""The Compressive Transformer: recorded outputs of its authors' code, in float64, and what trains the compression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_style.config.model import ModelConfig
from megatron_style.model.shortformer import Output, Shortformer
from megatron_style.parallel.randomness import Noise, seed_sharded_dropout
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis
from tests.support.models import MODELS
from tests.support.oracle import oracle_is_here
from tests.support.tiny import tiny_config
from tests.support.transformer_xl import Arrays, recorded

LENGTH = 12
RECORDED = ["prenorm_a", "postnorm", "meanpool"]


def their_names(layer: int) -> Iterator[tuple[str, str, bool]]:
    """Yield our name and theirs of each parameter of a layer, and whether theirs is transposed."""
    attention = f"layer_{layer}.multihead_attention"
    for ours, theirs in (
        ("query", "query.linear.w"),
        ("key", "key.linear.w"),
        ("value", "value.linear.w"),
        ("out", "linear.w"),
        ("distance", "relative_keys.linear.w"),
        ("slot_distance", "relative_keys_0.linear.w"),
    ):
        yield f"attention.{ours}.weight", f"{attention}.{theirs}", True
    yield "attention.out.bias", f"{attention}.linear.b", False
    for ours, theirs in (("content_bias", "r_w_bias"), ("distance_bias", "r_r_bias"), ("slot_bias", "r_r_bias_0")):
        yield f"attention.{ours}", f"{attention}.{theirs}", False
    for ours, theirs in (("up", "linear_0"), ("down", "linear_1")):
        yield f"{ours}.weight", f"layer_{layer}.mlp.{theirs}.w", True
        yield f"{ours}.bias", f"layer_{layer}.mlp.{theirs}.b", False
    for ours, theirs in (("attention_norm", ""), ("ffn_norm", "_1")):
        wrapper = f"layer_{layer}.residual_dropout_wrapper{theirs}.layer_norm"
        yield f"{ours}.weight", f"{wrapper}.gamma", False
        yield f"{ours}.bias", f"{wrapper}.beta", False


def theirs_as_ours(model: Shortformer, arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    """Return their arrays with this prefix by our names, in our shapes."""
    params = dict(model.named_parameters())
    found = {"vocabulary.table.weight": torch.from_numpy(arrays[f"{prefix}.embedding"])}
    for layer in range(model.config.layers):
        for ours, theirs, transposed in their_names(layer):
            array = torch.from_numpy(arrays[f"{prefix}.{theirs}"])
            name = f"blocks.{layer}.{ours}"
            found[name] = array.T if transposed else array.reshape(params[name].shape)
    return found


def their_kernels(arrays: Arrays, prefix: str) -> dict[str, Tensor]:
    """Return their convolutions [rate, in, out] as kernels [out, rate x in]."""
    found = {}
    for layer, name in enumerate(("conv_compressor", "conv_compressor_1")):
        array = torch.from_numpy(arrays[f"{prefix}.{name}.conv_1d.w"])
        found[f"blocks.{layer}.compression.kernel.weight"] = array.flatten(0, 1).T
    return found


@torch.no_grad()
def their_model(kind: str) -> tuple[Shortformer, Arrays]:
    arrays = recorded(f"compressive_{kind}")
    weights = recorded("compressive_prenorm_a") if kind == "meanpool" else arrays
    function = "mean" if kind == "meanpool" else "convolution"
    settings = {
        "layers": 2,
        "hidden_size": 32,
        "heads": 4,
        "ffn_size": 64,
        "positions": "relative",
        "norm": "after" if arrays["post_norm"] else "before",
        "memory": {"compressed": int(arrays["compressed"]), "rate": int(arrays["rate"]), "function": function},
        "vocabulary": {"kind": "tied"},
    }
    model = Shortformer(ModelConfig.parse(settings, source="oracle"), 50).double()
    found = theirs_as_ours(model, weights, "w")
    if function == "convolution":
        found |= their_kernels(weights, "w")
    params = dict(model.named_parameters())
    assert params.keys() == found.keys()
    for name, param in params.items():
        param.copy_(found[name])
    return model, dict(weights) | dict(arrays)


def walk(model: Shortformer, arrays: Arrays) -> Iterator[Output]:
    ids = torch.from_numpy(arrays["ids"])
    memory = model.empty_memory(len(ids), int(arrays["memory"]))
    for inputs, targets in zip(ids[:, :-1].split(LENGTH, 1), ids[:, 1:].split(LENGTH, 1), strict=True):
        output = model(inputs, targets, memory)
        memory = output.memory
        yield output


@oracle_is_here
@pytest.mark.parametrize("kind", RECORDED)
def test_scores_memories_and_losses_are_those_of_the_authors_code(kind: str) -> None:
    model, arrays = their_model(kind)
    for segment, output in enumerate(walk(model, arrays)):
        expected = arrays["nll"][:, segment * LENGTH : (segment + 1) * LENGTH]
        np.testing.assert_allclose(output.nll.detach().numpy(), expected, atol=1e-9, rtol=0)
        loss = output.auxiliary.get("compression", torch.zeros(()))
        assert loss.item() == pytest.approx(arrays["aux"][segment], abs=1e-9)
        for layer, held in enumerate(output.memory.layers):
            if f"memory_{segment}.{layer}" in arrays:
                names = (f"compressed_{segment}.{layer}", f"memory_{segment}.{layer}")
                expected = np.concatenate([arrays[name] for name in names], axis=1)
                np.testing.assert_allclose(held.numpy(), expected, atol=1e-9, rtol=0)


@oracle_is_here
@pytest.mark.parametrize("kind", ["prenorm_a", "postnorm"])
def test_gradients_are_those_of_the_authors_code(kind: str) -> None:
    model, arrays = their_model(kind)
    *_, last = walk(model, arrays)
    last.nll.mean().backward(retain_graph=True)
    expected: dict[str, Any] = theirs_as_ours(model, arrays, "grad_nll")
    for name, param in model.named_parameters():
        if name in expected:
            assert param.grad is not None, name
            np.testing.assert_allclose(param.grad.numpy(), expected[name].numpy(), atol=1e-9, rtol=0, err_msg=name)
        else:
            assert param.grad is None, f"{name}: the language loss must not train the compression"
    model.zero_grad()
    last.auxiliary["compression"].backward()
    kernels = their_kernels(arrays, "grad_aux")
    for name, param in model.named_parameters():
        if name in kernels:
            assert param.grad is not None, name
            np.testing.assert_allclose(param.grad.numpy(), kernels[name].numpy(), atol=1e-9, rtol=0, err_msg=name)
        else:
            assert param.grad is None, f"{name}: the compression's loss must train nothing else"


TRAINED = ["compressive", "compressive-before", "compressive-shortformer"]
DROPOUT = {"hidden": 0.3, "attention": 0.2, "activation": 0.2}


def built(name: str, *, recompute: bool = False, **changes: Any) -> Shortformer:
    config = tiny_config(**(MODELS[name] | changes))
    model = Shortformer(config.model, config.vocab_size, recompute=recompute)
    initialise(model, 3, Axis())
    return model.double()


def some_ids(tokens: int) -> Tensor:
    return torch.randint(0, 37, (3, tokens), generator=torch.Generator().manual_seed(1))


def read_twice(model: Shortformer, noise: Noise | None = None) -> Output:
    """Return what the model makes of a segment after another one."""
    ids = some_ids(13)
    memory = model(ids[:, :6], ids[:, 1:7], model.empty_memory(3, 6)).memory
    if noise is not None:
        seed_sharded_dropout(noise, tensor_rank=0)
    output: Output = model(ids[:, 6:12], ids[:, 7:], memory, noise)
    return output


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("recompute", [False, True])
def test_each_loss_trains_its_own_weights_only(name: str, recompute: bool) -> None:
    model = built(name, recompute=recompute, dropout=DROPOUT)
    output = read_twice(model, Noise(5))
    output.auxiliary["compression"].backward(retain_graph=True)
    for path, param in model.named_parameters():
        assert (param.grad is not None) == ("compression" in path), path
    model.zero_grad()
    output.nll.mean().backward()
    for path, param in model.named_parameters():
        assert (param.grad is None) == ("compression" in path), path


@pytest.mark.parametrize("name", TRAINED)
def test_with_dropout_recomputed_losses_and_gradients_are_the_same(name: str) -> None:
    found = []
    for recompute in (False, True):
        model = built(name, recompute=recompute, dropout=DROPOUT)
        output = read_twice(model, Noise(5))
        (output.nll.mean() + output.auxiliary["compression"]).backward()
        found.append((output.auxiliary["compression"].detach(), [param.grad for param in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_the_loss_has_its_weight_and_exists_in_training_only() -> None:
    memory = {"compressed": 4, "rate": 2}
    single = read_twice(built("compressive")).auxiliary["compression"]
    triple = read_twice(built("compressive", memory=memory | {"loss_weight": 3.0})).auxiliary["compression"]
    torch.testing.assert_close(triple, 3 * single)
    with torch.no_grad():
        assert read_twice(built("compressive")).auxiliary == {}
    assert read_twice(built("compressive-mean")).auxiliary == {}


@pytest.mark.parametrize("function", ["convolution", "mean", "max"])
def test_slots_are_made_of_the_oldest_tokens_of_memory_and_segment(function: str) -> None:
    """The memory of 4 tokens is shorter than the segment, so that some tokens are compressed at once."""
    model = built("compressive-shortformer", layers=1, memory={"compressed": 5, "rate": 3, "function": function})
    ids = some_ids(12)
    seen = model.blocks[0].attention_norm(model.embed(ids)).detach()
    memory = model.empty_memory(3, 4)
    with torch.no_grad():
        for segment in ids.split(6, 1):
            memory = model.features(segment, memory).memory
    read = torch.cat([seen.new_zeros(3, 4, 16), seen], 1)[:, :12]
    groups = read.unflatten(1, (4, 3))
    if function == "convolution":
        kernel = model.blocks[0].compression.kernel.weight.detach()  # type: ignore[union-attr]
        slots = groups.flatten(2) @ kernel.T
    else:
        slots = groups.mean(2) if function == "mean" else groups.amax(2)
    expected = torch.cat([torch.zeros(3, 1, 16), slots, seen[:, -4:]], 1)
    torch.testing.assert_close(memory.layers[0], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_last_segment_may_have_any_length(name: str, tokens: int) -> None:
    """One token fills no group, and five leave one out; the losses are those of the complete segment's beginning."""
    model = built(name)
    ids = some_ids(13)
    memory = model(ids[:, :6], ids[:, 1:7], model.empty_memory(3, 6)).memory
    complete = model(ids[:, 6:12], ids[:, 7:], memory)
    short = model(ids[:, 6 : 6 + tokens], ids[:, 7 : 7 + tokens], memory)
    torch.testing.assert_close(short.nll, complete.nll[:, :tokens], atol=1e-12, rtol=0)
    assert short.memory.length == complete.memory.length
    (short.nll.mean() + short.auxiliary["compression"]).backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in model.parameters())
