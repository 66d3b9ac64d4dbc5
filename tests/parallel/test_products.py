"""Products by oneDNN equal those of torch, forward and backward, whatever the shapes and the memory order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_style.config.model import ModelConfig
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.device import products
from megatron_style.parallel.device.products import gradient_of_input, gradient_of_weight, linear
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


@pytest.mark.usefixtures("always_by_onednn")
@pytest.mark.parametrize("rows", [(1,), (7,), (3, 33), (2, 5, 4)])
@pytest.mark.parametrize(("inner", "outer"), [(1, 5), (48, 16), (16, 48), (33, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_and_its_gradients_are_those_of_torch(
    rows: tuple[int, ...], inner: int, outer: int, transposed: bool
) -> None:
    weight = random(inner, outer).T if transposed else random(outer, inner)
    x, bias = random(*rows, inner), random(outer)
    grad = random(*rows, outer)
    found = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight, bias)]
    expected = [t.double().requires_grad_() for t in (x, weight, bias)]
    result = linear(*found)
    assert type(result.grad_fn).__name__ == "_LinearBackward"
    result.backward(grad)
    wide = F.linear(*expected)
    wide.backward(grad.double())
    torch.testing.assert_close(result, wide.float(), rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("always_by_onednn")
def test_transposed_gradients_need_no_copy_of_the_caller() -> None:
    grad, x, weight = random(6, 9, 20).transpose(0, 1), random(9, 6, 12), random(20, 12)
    wide = grad.double().flatten(0, 1)
    torch.testing.assert_close(gradient_of_weight(grad, x), (wide.T @ x.double().flatten(0, 1)).float())
    torch.testing.assert_close(gradient_of_input(grad, weight), (grad.double() @ weight.double()).float())


@pytest.mark.usefixtures("always_by_onednn")
@pytest.mark.parametrize(
    ("dtype", "by_onednn"), [(torch.float32, True), (torch.float64, False), (torch.bfloat16, False)]
)
def test_only_float32_is_taken_from_torch(dtype: torch.dtype, by_onednn: bool) -> None:
    x = random(3, 8, dtype=dtype).requires_grad_()
    weight = random(4, 8, dtype=dtype)
    result = linear(x, weight)
    assert (type(result.grad_fn).__name__ == "_LinearBackward") == by_onednn
    assert by_onednn or torch.equal(result, F.linear(x, weight))


def test_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(4, 8).requires_grad_(), random(2, 8)
    monkeypatch.setattr(products, "LEAST", 4 * 8 * 2 + 1)
    assert type(linear(x, weight).grad_fn).__name__ != "_LinearBackward"
    monkeypatch.setattr(products, "LEAST", 4 * 8 * 2)
    assert type(linear(x, weight).grad_fn).__name__ == "_LinearBackward"


@pytest.mark.parametrize("positions", ["infused", "added", "relative"])
def test_a_model_and_its_gradients_are_the_same_by_either_kernel(
    monkeypatch: pytest.MonkeyPatch, positions: str
) -> None:
    sizes = {
        "layers": 2,
        "hidden_size": 32,
        "heads": 4,
        "ffn_size": 64,
        "positions": positions,
        "cache": positions != "added",
    }
    vocabulary = {"kind": "adaptive", "cutoffs": [40, 100], "factor": 2}
    config = ModelConfig.parse(sizes | {"vocabulary": vocabulary}, source="model")
    ids = torch.arange(96).view(3, 32) * 7 % 211
    steps = []
    for least in (1, 2**62):
        monkeypatch.setattr(products, "LEAST", least)
        model = Shortformer(config, 211)
        initialise(model, 1, Axis())
        nll = model(ids, ids.flip(0), model.empty_memory(3, 32)).nll
        nll.sum().backward()
        steps.append((nll.detach(), {name: param.grad for name, param in model.named_parameters()}))
    (nll, grads), (expected, expected_grads) = steps
    torch.testing.assert_close(nll, expected, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-4, msg=name)
