"""The Routing Transformer: its kernels against recorded outputs of the authors' code, and what moves its centroids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.inference.sampling import open_walk
from megatron_style.inference.scoring.modes import make_protocol
from megatron_style.inference.scoring.protocol import Request
from megatron_style.model.kernels.attend import attend_in_blocks
from megatron_style.model.routing import attend_to_members, cluster_loss, moved, nearest, normed, tally_of
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise, layout_of, shard, shard_of
from megatron_style.parallel.topology import Topology
from tests.support.models import MODELS
from tests.support.oracle import oracle_is_here
from tests.support.routing import LAYERS, Release
from tests.support.tiny import tiny_config, tiny_model, weights_of
from tests.support.transformer_xl import recorded

every_release = pytest.mark.parametrize("name", ["routing_shared", "routing_skip1_plain"])


@oracle_is_here
@every_release
def test_the_authors_model_made_of_our_kernels_gives_what_theirs_gave(name: str) -> None:
    arrays = recorded(name)
    release = Release.recorded(arrays)
    ids = torch.from_numpy(arrays["ids"])
    features, loss = release.features(ids[:, :-1])
    np.testing.assert_allclose(features.detach().numpy(), arrays["features"], atol=1e-12, rtol=0)
    np.testing.assert_allclose(loss.detach().numpy(), arrays["cluster_loss"], atol=1e-15, rtol=0)
    for index, places in enumerate(release.places):
        np.testing.assert_array_equal(places.numpy(), arrays[f"queries_of_cluster.{index}"])
    for tag, text in (("nll", ids), ("nll_ids2", torch.from_numpy(arrays["ids2"]))):
        np.testing.assert_allclose(release.nll(text).detach().numpy(), arrays[tag], atol=1e-12, rtol=0)


@oracle_is_here
@pytest.mark.parametrize("loss", ["nll", "cluster"])
def test_its_gradients_are_theirs(loss: str) -> None:
    arrays = recorded("routing_shared")
    release = Release.recorded(arrays)
    ids = torch.from_numpy(arrays["ids"])
    (release.nll(ids).mean() if loss == "nll" else release.features(ids[:, :-1])[1]).backward()
    compared = 0
    for name, weight in release.weights.items():
        expected = arrays.get(f"grad_{loss}.{name}")
        if expected is None:
            assert weight.grad is None or not weight.grad.any(), name
            continue
        assert weight.grad is not None, name
        np.testing.assert_allclose(weight.grad.numpy(), expected, atol=1e-12, rtol=0, err_msg=name)
        compared += 1
    assert compared == sum(name.startswith(f"grad_{loss}.") for name in arrays)


@oracle_is_here
@every_release
def test_the_authors_moving_averages_are_made_of_our_tallies(name: str) -> None:
    """After one and two training steps, the second of which is routed by the centroids of the first."""
    arrays = recorded(name)
    release = Release.recorded(arrays)
    for step, text in ((1, "ids"), (2, "ids2")):
        release.train(torch.from_numpy(arrays[text]))
        after = {name: array for name, array in arrays.items() if name.startswith(f"after{step}.")}
        assert len(after) == 3 * (LAYERS - release.first_layer)
        for key, array in after.items():
            weight = key.removeprefix(f"after{step}.")
            np.testing.assert_allclose(release.weights[weight].numpy(), array, atol=1e-12, rtol=1e-12, err_msg=key)
            release.weights[weight] = torch.from_numpy(array)  # equal tokens tie, and the last bit would decide
    nll = release.nll(torch.from_numpy(arrays["ids"]))
    np.testing.assert_allclose(nll.detach().numpy(), arrays["nll_after_two_ema_updates"], atol=1e-12, rtol=0)


@oracle_is_here
def test_our_tally_counts_the_members_of_each_head() -> None:
    """The authors' counts mix heads and places."""
    arrays = recorded("routing_shared")
    release = Release.recorded(arrays)
    release.features(torch.from_numpy(arrays["ids"])[:, :-1])
    for layer, (queries, _) in enumerate(release.vectors):
        means = release.means(layer).detach()
        member = nearest(queries, means)
        tally = tally_of(queries, member, means.shape[1])
        one_hot = F.one_hot(member, means.shape[1]).double()
        np.testing.assert_array_equal(tally[..., -1].numpy(), one_hot.sum((0, 2)).numpy())


@oracle_is_here
def test_members_attend_as_recorded() -> None:
    arrays = {name: torch.from_numpy(array) for name, array in recorded("routing_causal_proposal").items()}
    x = normed(arrays["q"])
    member = nearest(x, arrays["means"])
    assert torch.equal(member, arrays["member"])
    found = attend_to_members(x, arrays["v"], member, int(arrays["window"]), dropout=0.0)
    torch.testing.assert_close(found, arrays["out"], atol=1e-12, rtol=0)


def test_without_sorting_it_is_a_masked_softmax() -> None:
    """Windows and clusters of any size, also with a last block that is not full."""
    generator = torch.Generator().manual_seed(3)
    for tokens, window, clusters in ((1, 1, 1), (7, 3, 2), (12, 4, 5), (23, 30, 3), (23, 5, 1)):
        x = normed(torch.randn(2, 3, tokens, 4, generator=generator, dtype=torch.float64))
        v = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        member = torch.randint(clusters, x.shape[:3], generator=generator)
        fellows = (member[..., None] == member[..., None, :]).tril()
        later = fellows.flip(-1).cumsum(-1).flip(-1)  # members from each one up to the token
        expected = F.scaled_dot_product_attention(x, x, v, attn_mask=fellows & (later <= window))
        found = attend_to_members(x, v, member, window, dropout=0.0)
        torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


def test_local_heads_see_their_block_and_the_one_before() -> None:
    generator = torch.Generator().manual_seed(3)
    for tokens, block in ((1, 4), (4, 4), (5, 4), (11, 3), (12, 3)):
        q, k, v = torch.randn(3, 2, 3, tokens, 4, generator=generator, dtype=torch.float64)
        number = torch.arange(tokens) // block
        visible = (number[:, None] - number <= 1).tril()
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        torch.testing.assert_close(attend_in_blocks(q, k, v, block=block, dropout=0.0), expected, atol=1e-13, rtol=0)


def routing_config(assignment: str = "nearest") -> ModelFolderConfig:
    settings = MODELS["routing"]
    return tiny_config(**{**settings, "routing": {**settings["routing"], "assignment": assignment}})


@pytest.mark.parametrize(("assignment", "sees_ahead"), [("nearest", False), ("balanced", True)])
def test_only_balanced_clusters_see_the_future(assignment: str, sees_ahead: bool) -> None:
    config = routing_config(assignment)
    model = tiny_model(config)
    ids = torch.randint(config.vocab_size, (8, 25), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, 22] = (changed[:, 22] + 11) % config.vocab_size
    with torch.no_grad():
        before, after = (model(text[:, :-1], text[:, 1:], model.empty_memory(8, 0)).nll for text in (ids, changed))
    moved_by = (after - before)[:, :21].abs().max()
    assert moved_by > 1e-3 if sees_ahead else moved_by < 1e-13


def test_what_has_seen_the_future_is_not_scored_and_does_not_write() -> None:
    config = routing_config("balanced")
    with pytest.raises(UserError, match=r"some/model: model.routing.assignment is balanced.*has seen the future"):
        make_protocol(Request("nonoverlapping"), config, tokens=100, where="some/model")
    with pytest.raises(UserError, match="has seen the future"):
        open_walk(tiny_model(config), rows=1, segment_length=6, cache_length=0)


def test_written_text_is_what_the_model_scores() -> None:
    """A walk encodes its segment again for each token."""
    config = routing_config()
    model = tiny_model(config)
    text = torch.randint(config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(1))
    walk = open_walk(model, rows=1, segment_length=6, cache_length=0)
    with torch.no_grad():
        expected = torch.cat([model.features(part, model.empty_memory(1, 0)).x for part in text.split(6, 1)], 1)
        for place in range(12):
            torch.testing.assert_close(walk.step(text[:, place]).x, expected[:, place], atol=1e-12, rtol=0)


# The side data


def pass_of(model: Shortformer, config: ModelFolderConfig) -> tuple[Tensor, Tensor]:
    """Return the cluster loss and the tally of one forward pass."""
    ids = torch.randint(config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    output = model(ids, ids, model.empty_memory(3, 0))
    assert output.tally is not None
    return output.auxiliary["clusters"], output.tally


def expect_same_side(recompute: bool, loss: Tensor, tally: Tensor, gradients: dict[str, Tensor]) -> None:
    axis = Topology.of_world(tensor=dist.get_world_size()).tensor
    config = routing_config()
    model = Shortformer(config.model, config.vocab_size, axis, recompute=recompute)
    initialise(model, 3, axis)
    found, mine = pass_of(model.double(), config)
    found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(mine, shard(tally, 1, axis.size)[axis.rank], rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        if name in gradients:
            expected = shard_of(gradients[name], layout_of(param), axis)
            torch.testing.assert_close(param.grad, expected, rtol=1e-9, atol=1e-15)
        else:
            assert param.grad is None or not param.grad.any(), name


@pytest.mark.parametrize(("world", "recompute"), [(1, True), (2, False), (4, True)])
def test_cluster_loss_and_tally_are_the_same_on_every_grid(world: int, recompute: bool) -> None:
    config = routing_config()
    model = tiny_model(config)
    loss, tally = pass_of(model, config)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert "blocks.1.attention.routed.query.weight" in gradients
    assert "blocks.0.attention.routed.value.weight" in gradients  # by way of the next layer
    assert "blocks.1.attention.routed.value.weight" not in gradients
    run_ranks(world, expect_same_side, recompute, loss.detach(), tally, gradients)


def test_a_forward_and_backward_pass_changes_no_centroid() -> None:
    config = routing_config()
    model = tiny_model(config)
    before = weights_of(model)
    pass_of(model, config)[0].backward()
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, before[name]), name


def test_a_tally_is_the_sum_and_number_of_members_and_the_loss_their_distance() -> None:
    x = normed(torch.randn(2, 1, 5, 4, dtype=torch.float64))
    means = normed(torch.randn(1, 3, 4, dtype=torch.float64))
    member = nearest(x, means)
    tally = tally_of(x, member, 3)
    squares = 0.0
    for cluster in range(3):
        members = x[member == cluster]
        torch.testing.assert_close(tally[0, cluster], torch.tensor([*members.sum(0), len(members)]).double())
        squares += float((members - means[0, cluster]).square().sum())
    assert cluster_loss(x, means, member).item() == pytest.approx(squares / x.numel())


# The moving average


def test_a_centroid_moves_to_its_members_by_their_share() -> None:
    means = normed(torch.randn(1, 2, 4, dtype=torch.float64))
    members = normed(torch.randn(30, 4, dtype=torch.float64))
    tally = torch.zeros(1, 2, 5, dtype=torch.float64)
    tally[0, 0] = torch.cat([members.sum(0), torch.tensor([30.0])])
    found, counts = moved(means, torch.tensor([[2.0, 2.0]]).double(), tally, 0.9)
    direction = 0.9 * 2 * means[0, 0] + 0.1 * members.sum(0)
    torch.testing.assert_close(found[0, 0], normed(direction / (0.9 * 2 + 0.1 * 30)))
    torch.testing.assert_close(counts, torch.tensor([[0.9 * 2 + 0.1 * 30, 0.9 * 2]]).double())


def test_a_centroid_without_members_stays_for_ever() -> None:
    means = normed(torch.randn(1, 1, 64))
    counts = torch.full((1, 1), 1e-44)  # of which a tenth is 0 in float32
    for _ in range(5):
        found, counts = moved(means, counts, torch.zeros(1, 1, 65), 0.1)
        torch.testing.assert_close(found, means, atol=1e-5, rtol=0)
    assert counts.item() == 0
    tally = torch.cat([means[0, 0] * -3, torch.tensor([3.0])])[None, None]
    torch.testing.assert_close(moved(means, counts, tally, 0.1)[0], -means, atol=1e-5, rtol=0)
