"""The Routing Transformer: its kernels against recorded outputs of the authors' code, and what moves its centroids."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_style.model.routing import attend_to_members, moved, nearest, normed
from tests.support.oracle import oracle_is_here
from tests.support.routing import LAYERS, ROUTING_HEADS, Release
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
def test_the_authors_moving_averages_are_made_of_our_tallies() -> None:
    """Their counts mix heads and places, by a reshape without a transpose; theirs are made here, and not by us."""
    arrays = recorded("routing_shared")
    release = Release.recorded(arrays)
    release.features(torch.from_numpy(arrays["ids"])[:, :-1])
    rate = float(np.float32(0.001))  # as TensorFlow rounds 1 - decay
    for layer in range(LAYERS):
        name = next(key for key in release.weights if key.startswith(f"decoder_layer_{layer}") and "ema_means" in key)
        tally = release.tallies[2 * layer]  # of queries, which are the keys too
        before = release.weights[name].detach()
        means = before - (before - tally[..., :-1]) * rate
        np.testing.assert_allclose(means.numpy(), arrays[f"after1.{name}"], atol=1e-9, rtol=0)
        one_hot = F.one_hot(release.members[2 * layer], tally.shape[1]).double()
        mixed_up = rate * one_hot.reshape(-1, ROUTING_HEADS, tally.shape[1]).sum(0)
        theirs = arrays[f"after1.{name.replace('ema_means', 'ema_count')}"]
        np.testing.assert_allclose(mixed_up.numpy(), theirs, atol=1e-9, rtol=0)
        assert tally[..., -1].sum() == one_hot.sum()
        np.testing.assert_array_equal(tally[..., -1].numpy(), one_hot.sum((0, 2)).numpy())


@oracle_is_here
def test_members_attend_as_recorded() -> None:
    arrays = {name: torch.from_numpy(array) for name, array in recorded("routing_causal_proposal").items()}
    x = normed(arrays["q"])
    member = nearest(x, arrays["means"])
    assert torch.equal(member, arrays["member"])
    found = attend_to_members(x, arrays["v"], member, int(arrays["window"]), dropout=0.0)
    torch.testing.assert_close(found, arrays["out"], atol=1e-12, rtol=0)
