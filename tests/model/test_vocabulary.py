"""The number of tokens in a vocabulary band differs from step to step; the shapes of its 16-bit products do not."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.device import products
from megatron_style.parallel.layers import VocabParallelTable
from megatron_style.parallel.stream import Stream
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_model

N = 90


def vocabulary_step(model: Shortformer, ids_N: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the vectors and the losses of some tokens, and all gradients of both."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    out_ND = model.vocabulary.embed(ids_N[None], Stream(model.axis))[0]
    x_ND = torch.randn(N, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    nll_N = model.vocabulary.nll(x_ND, ids_N, None)
    (nll_N.sum() + out_ND.float().square().sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out_ND.detach(), nll_N.detach(), grads


def tokens(share: float) -> Tensor:
    """Return tokens of which a share is from tail bands."""
    tail = torch.arange(N) < share * N
    return torch.where(tail, torch.arange(N) % (VOCAB_SIZE - 10) + 10, torch.arange(N) % 10)


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_that_fill_a_block_change_no_vector_no_loss_and_no_gradient(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model(tiny_config(kind), dtype)
    for share in (0.0, 0.3, 1.0):
        ids_N = tokens(share)
        padded = vocabulary_step(model, ids_N)
        with patch.object(products, "_BLOCK", 1):
            exact = vocabulary_step(model, ids_N)
        assert torch.equal(padded[0], exact[0])
        torch.testing.assert_close(padded[1], exact[1], rtol=1e-2, atol=1e-2)
        assert padded[2].keys() == exact[2].keys()
        for name, grad in padded[2].items():
            torch.testing.assert_close(grad, exact[2][name], rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize(("dtype", "few"), [(torch.bfloat16, True), (torch.float32, True), (torch.float64, False)])
def test_a_table_meets_few_shapes_in_precisions_that_onednn_multiplies(dtype: torch.dtype, few: bool) -> None:
    model = tiny_model(tiny_config("adaptive"), dtype)
    shapes = set()
    logits = VocabParallelTable.logits

    def seen(table: VocabParallelTable, x: Tensor) -> Tensor:
        shapes.add(tuple(x.shape))
        return logits(table, x)

    with patch.object(VocabParallelTable, "logits", seen):
        for share in torch.linspace(0, 1, 30).tolist():
            vocabulary_step(model, tokens(share))
    assert (len(shapes) <= 10) == few, shapes
