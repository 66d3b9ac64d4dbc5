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
from tests.support.oracle import oracle_is_here
from tests.support.transformer_xl import Arrays, recorded

LENGTH = 12
RECORDED = ["prenorm_a", "postnorm", "meanpool"]


def their_names(layer: int, norm: str) -> Iterator[tuple[str, str, bool]]:
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
        for ours, theirs, transposed in their_names(layer, model.config.norm):
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
