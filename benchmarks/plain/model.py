"""The language model, with the parameter names of ours, so that both can start from the same weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
from megatron_style.model.positions import sinusoids

LONGEST = 7000  # positions, which the paper's code gathers for every row, whatever the segment


class PlainAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor, cached: Tensor, positions: Tensor | None) -> Tensor:
        B, T, D = x.shape
        seen = torch.cat([cached, x], dim=1)
        S = seen.shape[1]
        infused = seen if positions is None else seen + positions
        q = self._heads(self.query(x if positions is None else x + positions[:, S - T :]) * (D // self.heads) ** -0.5)
        k = self._heads(self.key(infused))
        v = self._heads(self.value(seen))
        mask = torch.cat([x.new_zeros(T, S - T), x.new_full((T, T), float("-inf")).triu(1)], dim=1)
        weights = (torch.bmm(q, k.transpose(1, 2)) + mask).softmax(-1)
        return self.out(torch.bmm(weights, v).view(B, self.heads, T, -1).transpose(1, 2).reshape(B, T, D))

    def _heads(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        return x.view(B, T, self.heads, -1).transpose(1, 2).reshape(B * self.heads, T, D // self.heads)


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.attention_norm = nn.LayerNorm(D)
        self.ffn_norm = nn.LayerNorm(D)
        self.attention = PlainAttention(D, config.heads)
        self.up = nn.Linear(D, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, D)

    def forward(self, x: Tensor, cached: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        seen = self.attention_norm(x)
        x = x + self.attention(seen, cached, positions)
        return x + self.down(F.relu(self.up(self.ffn_norm(x)))), seen.detach().clone()


class PlainBand(nn.Module):
    def __init__(self, tokens: int, width: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.projection = nn.Parameter(torch.empty(hidden_size, width))


class PlainVocabulary(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        D = config.hidden_size
        factor = config.vocabulary.factor
        self.edges = (0, *config.vocabulary.cutoffs, vocab_size)
        sizes = [last - first for first, last in zip(self.edges, self.edges[1:], strict=False)]
        self.bands = nn.ModuleList(PlainBand(size, D // factor**i, D) for i, size in enumerate(sizes))
        self.clusters = nn.Parameter(torch.empty(len(sizes) - 1, D))

    def embed(self, ids: Tensor) -> Tensor:
        out = self.clusters.new_empty(*ids.shape, self.clusters.shape[1])
        for band, first, last in zip(self.bands, self.edges, self.edges[1:], strict=False):
            inside = (ids >= first) & (ids < last)
            if inside.any():
                out[inside] = F.linear(band.table(ids[inside] - first), band.projection)
        return out

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, summed over the targets."""
        first_tail = self.edges[1]
        head = targets.clone()
        total = x.new_zeros(())
        for i, band in enumerate(self.bands[1:]):
            inside = (targets >= self.edges[i + 1]) & (targets < self.edges[i + 2])
            head[inside] = first_tail + i
            if inside.any():
                logits = F.linear(F.linear(x[inside], band.projection.T), band.table.weight)
                total = total + F.cross_entropy(logits, targets[inside] - self.edges[i + 1], reduction="sum")
        logits = torch.cat([F.linear(x, self.bands[0].table.weight), F.linear(x, self.clusters)], dim=-1)
        return total + F.cross_entropy(logits, head, reduction="sum")


class PlainModel(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = PlainVocabulary(config, vocab_size)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.register_buffer("table", sinusoids(LONGEST, config.hidden_size), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss and the attention input of every block, which is the next segment's cache."""
        B, T = ids.shape
        x = self.vocabulary.embed(ids) * self.config.hidden_size**0.5
        infused = self.config.positions == "infused"
        S = caches[0].shape[1] + T if infused else T
        places = torch.arange(LONGEST if infused else S).expand(B, -1)  # for every row, and the most that can occur
        positions = self.table.index_select(0, places.reshape(-1)).view(*places.shape, -1)[:, :S]
        if not infused:
            x = x + positions
        seen = []
        for block, cached in zip(self.blocks, caches, strict=True):
            x, new = block(x, cached, positions if infused else None)
            seen.append(new)
        return self.vocabulary.loss(x.flatten(0, 1), targets.flatten()) / targets.numel(), seen

    def empty_caches(self, rows: int) -> list[Tensor]:
        return [torch.zeros(rows, 0, self.config.hidden_size) for _ in self.blocks]
