"""The model of the Routing Transformer's authors, as their recorded outputs need it: written out plainly, around the
routing kernels of this project. It has what our own model leaves out: relative tables by rank in the cluster, a shared
matrix after the heads, GEGLU, and places that all tokens of the text compete for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_style.model.kernels.attend import attend_in_blocks, causal_mask
from megatron_style.model.routing import cluster_loss, gathered, nearest, normed, scattered, tally_of, top_places
from tests.support.transformer_xl import Arrays

ROUTING_HEADS, HEADS, WINDOW, LOCAL = 2, 4, 8, 8
LAYERS = 2
_CLUSTERS = "attention_nd.cluster_attention.cluster_attention"
_LOSS_WEIGHT = 1e-4
_RATE = float(np.float32(0.001))  # as TensorFlow rounds 1 - decay
_COUNT_EPS = 1e-5


@dataclass
class Release:
    """One of the recorded models. A forward pass records what its routing layers chose."""

    weights: dict[str, Tensor]
    first_layer: int
    relative: bool
    shared: bool
    norm_after: bool
    places: list[Tensor] = field(default_factory=list)
    vectors: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # queries and keys of each routing layer

    @classmethod
    def recorded(cls, arrays: Arrays) -> Release:
        weights = {
            name.removeprefix("w."): torch.from_numpy(array).requires_grad_()
            for name, array in arrays.items()
            if name.startswith("w.")
        }
        skip, relative, shared, norm_after = map(int, arrays["config"])
        return cls(weights, skip, bool(relative), bool(shared), bool(norm_after))

    def features(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features, and the sum of the layers' cluster losses."""
        x = self.weights["embedding"][ids]
        loss = x.new_zeros(())
        for layer in range(LAYERS):
            place = f"decoder_layer_{layer}.self_attention"
            before = "layer_postprocess" if self.norm_after else "layer_prepostprocess"
            mixed, of_layer = self._attend(x if self.norm_after else self._norm(x, f"{place}.{before}"), layer)
            x = self._norm(x + mixed, f"{place}.{before}") if self.norm_after else x + mixed
            fed = self._feed(x if self.norm_after else self._norm(x, f"{place}.{before}_1"), f"{place}.ffn")
            x = self._norm(x + fed, f"{place}.{before}_1") if self.norm_after else x + fed
            loss = loss + of_layer
        return x if self.norm_after else self._norm(x, "layer_prepostprocess"), loss

    def nll(self, ids: Tensor) -> Tensor:
        x, _ = self.features(ids[:, :-1])
        return F.cross_entropy((x @ self.weights["out"].T).transpose(1, 2), ids[:, 1:], reduction="none")

    @torch.no_grad()
    def train(self, ids: Tensor) -> None:
        """Move the centroids as a training step of the authors' code does: once where queries are keys; else first by
        the keys, and then by the queries, whose clusters are those of the centroids that the keys have moved."""
        self.vectors.clear()
        self.features(ids[:, :-1])
        for layer, (queries, keys) in enumerate(self.vectors, start=self.first_layer):
            for x in (queries,) if self.shared else (keys, queries):
                self._move(x, layer)

    def _move(self, x: Tensor, layer: int) -> None:
        """Do one step of the moving averages. Their counts mix heads and places, by a reshape without a transpose."""
        name = f"decoder_layer_{layer}.self_attention.self_attention.{_CLUSTERS}"
        means = self.means(layer)
        clusters = means.shape[1]
        member = nearest(x, means)
        mixed_up = F.one_hot(member, clusters).double().reshape(-1, ROUTING_HEADS, clusters).sum(0)
        sums = self.weights[f"{name}.ema_means"].lerp(tally_of(x, member, clusters)[..., :-1], _RATE)
        counts = self.weights[f"{name}.ema_count"].lerp(mixed_up, _RATE)
        total = counts.sum(-1, keepdim=True)
        smoothed = (counts + _COUNT_EPS) / (total + clusters * _COUNT_EPS) * total
        self.weights[f"{name}.ema_means"] = sums
        self.weights[f"{name}.ema_count"] = counts
        self.weights[f"{name}.means"] = sums / smoothed[..., None]

    def means(self, layer: int) -> Tensor:
        return self.weights[f"decoder_layer_{layer}.self_attention.self_attention.{_CLUSTERS}.means"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = self.weights[f"{name}.layer_norm.layer_norm_scale"]
        return F.layer_norm(x, x.shape[-1:], scale, self.weights[f"{name}.layer_norm.layer_norm_bias"], eps=1e-6)

    def _feed(self, x: Tensor, name: str) -> Tensor:
        gate, value, down = (self.weights[f"{name}.weight{i}.kernel"] for i in (1, 2, 3))
        return (F.gelu(x @ gate, approximate="tanh") * (x @ value)) @ down

    def _attend(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        name = f"decoder_layer_{layer}.self_attention.self_attention"
        q, k, v = (_heads(x @ self.weights[f"{name}.{part}.kernel"]) for part in "qkv")
        q = q * q.shape[-1] ** -0.5  # all that is left of it after the norm of routing heads is its part in the eps
        routed = ROUTING_HEADS if layer >= self.first_layer else 0
        parts = [self._locally(q[:, routed:], k[:, routed:], v[:, routed:], f"{name}.attention_nd.local_nd")]
        loss = x.new_zeros(())
        if routed:
            mixed, loss = self._in_clusters(q[:, :routed], k[:, :routed], v[:, :routed], layer, f"{name}.{_CLUSTERS}")
            parts.insert(0, mixed)
        heads = torch.cat(parts, 1) @ self.weights[f"{name}.attention_nd.dense.kernel"]
        return heads.transpose(1, 2).flatten(2) @ self.weights[f"{name}.output_transform.kernel"], loss

    def _locally(self, q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
        if not self.relative:
            return attend_in_blocks(q * q.shape[-1] ** 0.5, k, v, block=LOCAL, dropout=0.0)
        block = torch.arange(q.shape[2]) // LOCAL
        visible = causal_mask(q.shape[2], q.shape[2], q.device) & (block[:, None] - block <= 1)
        return self._attend_by_rank(q, k, v, visible, name)

    def _in_clusters(self, q: Tensor, k: Tensor, v: Tensor, layer: int, name: str) -> tuple[Tensor, Tensor]:
        means = self.means(layer).detach()
        queries = normed(q)
        keys = queries if self.shared else normed(k)
        self.vectors.append((queries, keys))
        losses = [cluster_loss(x, means, nearest(x, means)) for x in (queries, keys)]
        loss = _LOSS_WEIGHT * (losses[0] + losses[1])
        of_queries, of_keys = (top_places(x @ means.transpose(1, 2), WINDOW) for x in (queries, keys))
        self.places.append(of_queries)
        chosen = gathered(queries, of_queries), gathered(keys, of_keys), gathered(v, of_keys)
        visible = causal_mask(WINDOW, WINDOW, q.device)
        return scattered(self._attend_by_rank(*chosen, visible, name), of_queries, q.shape[2]), loss

    def _attend_by_rank(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, name: str) -> Tensor:
        """Attend, without a division of the scores. Tables by distance are added to keys and to values."""
        scores = q @ k.transpose(-1, -2)
        if not self.relative:
            return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
        tables = [self.weights[f"{name}.relative_positions_{part}.embeddings"] for part in ("keys", "values")]
        farthest = len(tables[0]) // 2
        place = torch.arange(q.shape[-2])
        distance = (place - place[:, None]).clamp(-farthest, farthest) + farthest
        of_keys, of_values = (table[distance] for table in tables)
        scores = scores + torch.einsum("...qe,qke->...qk", q, of_keys)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return weights @ v + torch.einsum("...qk,qke->...qe", weights, of_values)


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)
