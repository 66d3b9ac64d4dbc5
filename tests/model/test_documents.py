"""A model with a `document_end` reads each document as if it were alone, in every mode and on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_style.config.model import ModelConfig
from megatron_style.inference.decoder import Decoder
from megatron_style.inference.greedy import continue_greedily
from megatron_style.inference.sampling import Reencoder
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.inference.scoring.walk import cut_windows
from megatron_style.model.attention import attention_of
from megatron_style.model.documents import ages_of
from megatron_style.model.memory import UNLIMITED, Recalled
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise, layout_of, shard
from megatron_style.parallel.stream import Read, Stream
from megatron_style.parallel.topology import Axis, Topology
from tests.support import textbook
from tests.support.tiny import tiny_config

END = 5
VOCAB_SIZE = 37
L = 6
KINDS = {
    "added": {"positions": "added", "cache": False},
    "added with a cache": {"positions": "added"},
    "infused": {},
    "infused without a cache": {"cache": False},
    "relative": {"positions": "relative", "norm": "after"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05}  # with what rounding may change
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def config_of(kind: str, document_end: int | None = END) -> ModelConfig:
    return tiny_config("tied", **KINDS[kind], document_end=document_end).model


def build(kind: str, axis: Axis | None = None, **options: bool) -> Shortformer:
    axis = axis or Axis()
    model = Shortformer(config_of(kind), VOCAB_SIZE, axis, **options)
    initialise(model, 1, axis)
    return model.double()


def cache_of(kind: str) -> int:
    return L if config_of(kind).cache else 0


def documents() -> list[int]:
    """Return inputs of documents of every length, some longer than a segment with its cache."""
    rng = np.random.default_rng(3)
    stream: list[int] = []
    for length in (4, 0, 1, 15, 2, 7, 5, 3):
        stream += [END, *rng.integers(6, VOCAB_SIZE, length).tolist()]
    return stream


def masked_losses(model: Shortformer, stream: list[int], cache_length: int) -> Tensor:
    """Return the loss of each token but the first, read in segments as training reads them."""
    memory = model.empty_memory(1, cache_length)
    age = torch.tensor([-1])
    losses = []
    for start in range(0, len(stream) - 1, L):
        text = torch.tensor([stream[start : start + L + 1]])
        inputs, targets = text[:, : len(text[0]) - 1], text[:, 1:]
        ages = ages_of(inputs, END, age)
        output = model(inputs, targets, memory, None, ages)
        age, memory = ages[:, -1], output.memory
        losses.append(output.nll[0])
    return torch.cat(losses)


def pieces(inputs: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the stretches of a segment that belong to one document."""
    edges = [0, *(place for place, token in enumerate(inputs) if token == END and place), len(inputs)]
    yield from pairwise(edges)


def losses_alone(model: Shortformer, stream: list[int], cache_length: int) -> Tensor:
    """Return the same losses by a loop over documents: the blocks see nothing but the tokens of one, at the places that
    these have in the segment. Nothing is masked but later tokens."""
    D = model.config.hidden_size
    kept = [next(model.parameters()).new_zeros(1, 0, D) for _ in model.blocks]
    known: list[int] = []  # the inputs in the cache
    losses = []
    for start in range(0, len(stream) - 1, L):
        inputs = stream[start : start + L][: len(stream) - 1 - start]
        seen: list[list[Tensor]] = [[] for _ in model.blocks]
        for a, b in pieces(inputs):
            continues = a == 0 and inputs[0] != END
            same = len(known) - (len(known) - 1 - known[::-1].index(END)) if END in known else len(known)
            recalled = same if continues else 0
            x, pos = placed(model, torch.tensor([inputs[a:b]]), recalled, len(known), a)
            for layer, block in enumerate(model.blocks):
                cached = kept[layer][:, kept[layer].shape[1] - recalled :]
                found = block.attend(x, lambda *_, c=cached: Recalled(Read(c), None), pos, None, Stream(Axis()))
                seen[layer].append(found.seen.tokens.detach())
                x, _ = block.feed(found.x, None, Stream(Axis()))
            targets = torch.tensor(stream[start + a + 1 : start + b + 1])
            losses.append(model.vocabulary.nll(x[0], targets, None))
        kept = [torch.cat([old, *new], 1) for old, new in zip(kept, seen, strict=True)]
        kept = [layer[:, max(0, layer.shape[1] - cache_length) :] for layer in kept]
        known = [*known, *inputs][max(0, len(known) + len(inputs) - cache_length) :]
    return torch.cat(losses)


def placed(model: Shortformer, ids: Tensor, recalled: int, remembered: int, first: int) -> tuple[Tensor, object]:
    """Return the input of the first block and the positions of a document that begins at `first` of a segment."""
    x = model.embed(ids)
    T = ids.shape[1]
    if model.config.positions == "relative":
        return attention_of(model.config).enter(x, model.positions, recalled, UNLIMITED, Stream(Axis()))
    table = model.positions(remembered + first + T).to(x.dtype)
    if model.config.positions == "added":
        return x + table[first : first + T], None
    return x, torch.cat([table[remembered - recalled : remembered], table[remembered + first :]])


@every_dtype
@every_kind
def test_losses_and_gradients_are_those_of_each_document_alone(kind: str, dtype: torch.dtype) -> None:
    model = build(kind).to(dtype)
    found = masked_losses(model, documents(), cache_of(kind))
    expected = losses_alone(model, documents(), cache_of(kind))
    torch.testing.assert_close(found, expected, atol=DTYPES[dtype], rtol=0)
    weights = list(model.parameters())
    grads = torch.autograd.grad(found.mean(), weights, retain_graph=True)
    grads_alone = torch.autograd.grad(expected.mean(), weights)
    for mine, alone in zip(grads, grads_alone, strict=True):
        torch.testing.assert_close(mine, alone, atol=DTYPES[dtype], rtol=0)


@pytest.mark.parametrize("kind", ["added", "infused", "infused without a cache"])
def test_losses_are_those_of_the_textbook(kind: str) -> None:
    model = build(kind)
    stream = documents()
    weights = {name: param.detach().numpy() for name, param in model.named_parameters()}
    C = cache_of(kind)
    expected = textbook.score_row(model.config, VOCAB_SIZE, weights, stream[1:], L=L, C=C, eos=END)
    np.testing.assert_allclose(masked_losses(model, stream, C).detach().numpy(), expected, atol=1e-6)


@every_kind
@pytest.mark.parametrize("rows", [1, 3])
def test_every_mode_of_evaluation_agrees(kind: str, rows: int) -> None:
    model = build(kind)
    stream = documents()
    tokens = np.array(stream[1:])
    C = cache_of(kind)
    if C:
        expected = masked_losses(model, stream, C).detach().numpy()
        modes = ["cached", "token-by-token"] if attention_of(model.config).can_decode else ["cached"]
        for mode in modes:
            found = score(model, tokens, Protocol(mode, L, C, batch_rows=rows), eos=END)  # type: ignore[arg-type]
            np.testing.assert_allclose(found.nll, expected, atol=1e-9)
    for stride in (L, 2):
        mode = "nonoverlapping" if stride == L else "sliding"
        found = score(model, tokens, Protocol(mode, L, batch_rows=rows, stride=stride), eos=END)  # type: ignore[arg-type]
        for begin, counted, end in cut_windows(len(tokens), L, stride):
            alone = losses_alone(model, stream[begin : end + 1], 0).detach().numpy()
            np.testing.assert_allclose(found.nll[counted:end], alone[counted - begin :], atol=1e-9)


@every_dtype
@every_kind
def test_an_earlier_document_moves_no_bit_of_a_loss_or_of_its_gradient(kind: str, dtype: torch.dtype) -> None:
    model = build(kind).to(dtype)
    stream = documents()
    place = next(i for i in range(10, len(stream)) if stream[i] == END)
    changed = [token if token == END else 6 + (token - 5) % 31 for token in stream[:place]] + stream[place:]
    before, after = (masked_losses(model, text, cache_of(kind)) for text in (stream, changed))
    assert torch.equal(after[place:], before[place:])
    assert (after[: place - 1] - before[: place - 1]).abs().max() > 0.1
    weights = list(model.parameters())
    grads = (torch.autograd.grad(losses[place:].sum(), weights) for losses in (before, after))
    for mine, other in zip(*grads, strict=True):
        assert torch.equal(mine, other)


def expect_same(kind: str, losses: Tensor, gradients: dict[str, Tensor]) -> None:
    axis = Topology.of_world(tensor=dist.get_world_size()).tensor
    for recompute, sequence in ((False, False), (True, False), (False, True)):
        model = build(kind, axis, recompute=recompute, sequence=sequence)
        found = masked_losses(model, documents(), cache_of(kind))
        torch.testing.assert_close(found, losses, atol=1e-9, rtol=0)
        found.mean().backward()
        for name, param in model.named_parameters():
            dim = layout_of(param).shard_dim
            full = gradients[name]
            own = full if dim is None else shard(full, dim, axis.size)[axis.rank]
            torch.testing.assert_close(param.grad, own, atol=1e-9, rtol=0)


@pytest.mark.slow
@every_kind
def test_two_tensor_parallel_ranks_agree(kind: str) -> None:
    model = build(kind)
    losses = masked_losses(model, documents(), cache_of(kind))
    losses.mean().backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    run_ranks(2, expect_same, kind, losses.detach(), gradients)


@pytest.mark.parametrize("kind", ["infused", "relative", "infused without a cache"])
def test_generated_text_starts_over_after_a_document(kind: str) -> None:
    """The decoder, the walk that encodes each segment again, and plain forward passes write the same."""
    model = build(kind)
    C = cache_of(kind)
    prompt = documents()[:23]
    greedy = continue_greedily(model, prompt, 12, segment_length=L, cache_length=C)
    for walk_of in (Decoder, Reencoder):
        walk = walk_of(model, rows=2, segment_length=L, cache_length=C)
        reading = walk.read(prompt, row=0)
        walk.read([END, 9], row=1)
        walk.select([0, 0])
        written = [int(model.vocabulary.likeliest(reading.x[None]))]
        while len(written) < 12:
            both = walk.step(torch.tensor(written[-1:] * 2))
            torch.testing.assert_close(both.x[0], both.x[1], atol=1e-12, rtol=0)
            written.append(int(model.vocabulary.likeliest(both.x[:1])))
        assert written == greedy
    full = [*prompt, *greedy]
    alone = losses_alone(model, full, C)
    torch.testing.assert_close(masked_losses(model, full, C), alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": {"compressed": 4, "rate": 2}}, "model.memory compresses tokens of several documents"),
        (
            {
                "positions": "added",
                "cache": False,
                "heads": 8,
                "hidden_size": 32,
                "routing": {"heads": 4, "clusters": 3, "window": 3, "local": 2},
            },
            "model.routing assigns tokens to clusters across documents",
        ),
    ],
)
def test_kinds_that_mix_documents_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config("tied", **settings, document_end=END)
