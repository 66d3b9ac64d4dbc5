"""The paper's comparison systems against recorded outputs, in float64."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_style.config.model import ModelConfig
from megatron_style.formats import transformer_xl as transformer_xl_form
from megatron_style.inference.decoder import Decoder
from megatron_style.model.memory import Memory, Reach
from megatron_style.model.shortformer import Shortformer
from tests.support.oracle import RecordedPositions, oracle_is_here
from tests.support.transformer_xl import Arrays, recorded, write_folder

pytestmark = oracle_is_here


@torch.no_grad()
def with_weights(config: Mapping[str, object], vocab_size: int, weights: Mapping[str, Tensor]) -> Shortformer:
    model = Shortformer(ModelConfig.parse(config, source="oracle"), vocab_size).double()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, param in parameters.items():
        param.copy_(weights[name].reshape(param.shape))
    return model


def sandwich_weights(arrays: Arrays) -> Iterator[tuple[str, Tensor]]:
    """Rename `w.s0.query.weight` to `blocks.0.attention.query.weight`, and so on."""
    for name, array in arrays.items():
        if name == "w.table":
            yield "vocabulary.table.weight", torch.from_numpy(array)
        elif name.startswith("w."):
            _, sublayer, part, kind = name.split(".")
            attention = sublayer[0] == "s"
            inner = f"attention.{part}" if attention else part
            norm = "attention_norm" if attention else "ffn_norm"
            place = norm if part == "norm" else inner
            yield f"blocks.{sublayer[1]}.{place}.{kind}", torch.from_numpy(array)


@pytest.mark.parametrize(("order", "k"), [("sfsfsfsf", 0), ("ssfsfsff", 1), ("sssfsfff", 2), ("ssssffff", 3)])
def test_a_sandwich_is_the_recorded_one(order: str, k: int) -> None:
    arrays = recorded("sandwich")
    config = {
        "layers": 4,
        "hidden_size": 16,
        "heads": 2,
        "ffn_size": 32,
        "positions": "added",
        "cache": False,
        "sandwich": k,
        "vocabulary": {"kind": "tied"},
    }
    model = with_weights(config, 60, dict(sandwich_weights(arrays)))
    model.positions = RecordedPositions(torch.from_numpy(arrays["positions"]))  # type: ignore[assignment]
    ids = torch.from_numpy(arrays["ids"])
    found = model(ids[:, :-1], ids[:, 1:], model.empty_memory(2, 0)).nll
    np.testing.assert_allclose(found.detach().numpy(), arrays[f"nll.{order}"], atol=1e-12)


LENGTH = 12  # tokens of a segment, unless the setting says otherwise
XL = ["plain", "div4", "plain_prenorm"]


def transformer_xl(folder: Path, kind: str) -> Shortformer:
    return transformer_xl_form.read(write_folder(folder / kind, kind)).load(torch.float64)


def settings_of(tag: str) -> tuple[int, int, Reach]:
    """Return segment length, memory and reach of a setting such as `mem40_tgt4_same_clamp15`."""
    found = re.fullmatch(r"mem(\d+)(?:_tgt(\d+))?(_same)?(?:_clamp(\d+))?", tag)
    assert found, tag
    memory, segment, same, clamp = found.groups()
    window = int(memory) if same else None
    return int(segment or LENGTH), int(memory), Reach(window, int(clamp) if clamp else None)


def tags_of(kind: str) -> list[str]:
    names = recorded(f"transformer_xl_{kind}_nll") if oracle_is_here.args[0] is False else ()
    return [name.removeprefix("nll_") for name in names if name.startswith("nll_") and "float32" not in name]


@torch.no_grad()
def walked(model: Shortformer, tag: str) -> tuple[Tensor, Memory]:
    ids = torch.from_numpy(recorded("transformer_xl_tokens")["ids"])
    length, capacity, reach = settings_of(tag)
    memory = model.empty_memory(len(ids), capacity, reach)
    parts = []
    for inputs, targets in zip(ids[:, :-1].split(length, 1), ids[:, 1:].split(length, 1), strict=True):
        output = model(inputs, targets, memory)
        memory = output.memory
        parts.append(output.nll)
    return torch.cat(parts, 1), memory


@pytest.mark.parametrize(("kind", "tag"), [(kind, tag) for kind in XL for tag in tags_of(kind)])
def test_transformer_xl_scores_as_the_authors_code(tmp_path: Path, kind: str, tag: str) -> None:
    arrays = recorded(f"transformer_xl_{kind}_nll")
    model = transformer_xl(tmp_path, kind)
    nll, memory = walked(model, tag)
    np.testing.assert_allclose(nll.numpy(), arrays[f"nll_{tag}"], atol=1e-9, rtol=0)
    remembered = {name: array for name, array in arrays.items() if name.startswith(f"memory_{tag}_layer")}
    for layer, array in enumerate(remembered.values()):
        expected = torch.from_numpy(array)
        if model.config.norm == "before":  # the authors normalise what they remember, we remember what is normalised
            expected = model.blocks[layer].attention_norm(expected).detach()
        np.testing.assert_allclose(memory.layers[layer].numpy(), expected.numpy(), atol=1e-9, rtol=0)


TAGS = ["mem40_tgt4_same_clamp15", "mem20_same_clamp15", "mem12"]


@pytest.mark.parametrize(
    ("kind", "tag"),
    [
        pytest.param(kind, tag, marks=() if XL.index(kind) == TAGS.index(tag) else pytest.mark.sweep)
        for kind in XL
        for tag in TAGS
    ],
)
def test_transformer_xl_scores_the_same_token_by_token(tmp_path: Path, kind: str, tag: str) -> None:
    model = transformer_xl(tmp_path, kind)
    length, capacity, reach = settings_of(tag)
    expected, _ = walked(model, tag)
    ids = torch.from_numpy(recorded("transformer_xl_tokens")["ids"])
    rows = len(ids)
    decoder = Decoder(model, rows=rows, segment_length=length, cache_length=capacity, reach=reach)
    with torch.no_grad():
        for place in range(ids.shape[1] - 1):
            nll = model.vocabulary.nll(decoder.step(ids[:, place]).x, ids[:, place + 1], None)
            torch.testing.assert_close(nll, expected[:, place], atol=1e-12, rtol=0)


def their_gradients(model: Shortformer) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients by the names of the authors' code, which shares u and v among the layers."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    for ours, theirs in (("content_bias", "r_w_bias"), ("distance_bias", "r_r_bias")):
        shared = [grad for name, grad in grads.items() if name.endswith(ours)]
        yield theirs, torch.stack(shared).sum(0)
    for layer in range(model.config.layers):
        block = f"blocks.{layer}"
        thirds = [grads[f"{block}.attention.{name}.weight"] for name in ("query", "key", "value")]
        yield f"layers.{layer}.dec_attn.qkv_net.weight", torch.cat(thirds)
        for ours, theirs in (("attention.out", "dec_attn.o_net"), ("attention.distance", "dec_attn.r_net")):
            yield f"layers.{layer}.{theirs}.weight", grads[f"{block}.{ours}.weight"]
        for ours, theirs in (
            ("attention_norm", "dec_attn.layer_norm"),
            ("up", "pos_ff.CoreNet.0"),
            ("down", "pos_ff.CoreNet.3"),
            ("ffn_norm", "pos_ff.layer_norm"),
        ):
            for kind in ("weight", "bias"):
                yield f"layers.{layer}.{theirs}.{kind}", grads[f"{block}.{ours}.{kind}"]
    if model.config.vocabulary.kind == "tied":
        yield "word_emb.emb_layers.0.weight", grads["vocabulary.table.weight"]
        yield "crit.out_layers.0.bias", grads["vocabulary.table.bias"]
        return
    yield "crit.cluster_weight", grads["vocabulary.clusters"].flip(0)
    yield "crit.cluster_bias", grads["vocabulary.cluster_biases"].flip(0)
    yield "crit.out_projs.0", grads["vocabulary.bands.0.output_projection"]
    for band in range(3):
        yield f"word_emb.emb_layers.{band}.weight", grads[f"vocabulary.bands.{band}.table.weight"]
        yield f"word_emb.emb_projs.{band}", grads[f"vocabulary.bands.{band}.projection"]
        yield f"crit.out_layers.{band}.bias", grads[f"vocabulary.bands.{band}.table.bias"]


@pytest.mark.parametrize(
    ("kind", "memory"), [("plain", 12), ("plain", 20), ("div4", 12), ("div4", 20), ("plain_prenorm", 12)]
)
def test_transformer_xl_has_the_gradients_of_the_authors_code(tmp_path: Path, kind: str, memory: int) -> None:
    arrays = recorded(f"transformer_xl_{kind}_grad_mem{memory}")
    model = transformer_xl(tmp_path, kind)
    ids = torch.from_numpy(recorded("transformer_xl_tokens")["ids"])
    start = int(arrays["segment"]) * LENGTH
    with torch.no_grad():
        before = model.empty_memory(len(ids), memory)
        for inputs in ids[:, :start].split(LENGTH, 1):
            before = model.features(inputs, before).memory
    segment = slice(start, start + LENGTH)
    loss = model(ids[:, segment], ids[:, start + 1 : start + LENGTH + 1], before).nll.mean()
    loss.backward()
    assert loss.item() == pytest.approx(float(arrays["loss"]), abs=1e-9)
    compared = 0
    for name, array in their_gradients(model):
        if kind == "plain_prenorm" and "dec_attn.layer_norm" in name:
            continue  # theirs normalise the memory again, so their norm has a share of the gradient that ours has not
        np.testing.assert_allclose(array.numpy(), arrays[name], atol=1e-6, rtol=0, err_msg=name)
        compared += 1
    assert compared == len(arrays) - 2 - (6 if kind == "plain_prenorm" else 0)
