"""The proof of a conversion: both sides hold the same tensors, and give a fixed text the same probabilities."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_style import __version__
from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelConfig, ModelFolderConfig
from megatron_style.formats.source import ModelSource, tensors_of
from megatron_style.model.attention import Places, attention_of
from megatron_style.model.block import Block
from megatron_style.model.memory import memory_of
from megatron_style.model.shape import units
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import layout_of, tag
from megatron_style.parallel.stream import Stream
from megatron_style.parallel.topology import Axis

FILE = "certificate.json"
TOLERANCE = 1e-9  # nats; everything is computed in float64, so only a real difference is larger
_SEGMENT = 128  # the longest segment of the fixed text, in tokens
_AT_ONCE = 2**20  # numbers computed at once where complete tensors are not needed: 8 MB in float64
Nll = NDArray[np.float64]


@dataclass(frozen=True)
class Certificate:
    source: str
    source_digest: str
    output_digest: str
    tensors: int
    largest_weight_difference: float
    largest_nll_difference: float  # nats, over the tokens of the fixed text
    tokens: int  # of the fixed text
    tolerance: float
    computed_by: str  # whose code scored the output
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """True if both differences are within the tolerance; a NaN is not."""
        differences = (self.largest_weight_difference, self.largest_nll_difference)
        return all(difference <= self.tolerance for difference in differences)

    def as_data(self) -> dict[str, object]:
        return {"passed": self.passed, **asdict(self)}


def certify(
    source: ModelSource,
    output: ModelSource,
    *,
    tolerance: float = TOLERANCE,
    scorer: Callable[[Tensor], Nll] | None = None,
    computed_by: str = "megatron_style",
) -> Certificate:
    """Compare the output of a conversion with its source. `scorer` is the output's own code, if it has any."""
    check_same_shapes(source, output)
    text = fixed_text(source.config)
    output_nll = scorer(text) if scorer else streamed_nll(output, text)
    return Certificate(
        source=str(source.path),
        source_digest=source.digest(),
        output_digest=output.digest(),
        tensors=len(tensors_of(source.config)),
        largest_weight_difference=_largest_weight_difference(source, output),
        largest_nll_difference=float(np.abs(streamed_nll(source, text) - output_nll).max()),
        tokens=len(text) - 1,
        tolerance=tolerance,
        computed_by=computed_by,
        versions={
            "python": platform.python_version(),
            "megatron_style": __version__,
            "torch": torch.__version__,
            "safetensors": version("safetensors"),
        },
    )


def check_same_shapes(first: ModelSource, second: ModelSource) -> None:
    shapes = {name: layout.shape for name, layout in tensors_of(first.config).items()}
    others = {name: layout.shape for name, layout in tensors_of(second.config).items()}
    for name in sorted(shapes.keys() | others.keys()):
        if shapes.get(name) != others.get(name):
            raise UserError(
                f"{first.path} and {second.path} are different models: {name} is {shapes.get(name)} in one and "
                f"{others.get(name)} in the other"
            )


def _largest_weight_difference(first: ModelSource, second: ModelSource) -> float:
    found = [_largest_difference(first.weight(name), second.weight(name)) for name in tensors_of(first.config)]
    return float(np.max(found))  # NaN if any is NaN


def _largest_difference(first: Tensor, second: Tensor) -> float:
    """Compare piece by piece, so that there is no third tensor of their size."""
    pieces = zip(first.reshape(-1).split(_AT_ONCE), second.reshape(-1).split(_AT_ONCE), strict=True)
    return float(torch.stack([(a.float() - b.float()).abs().max() for a, b in pieces]).max())


def segment_of(config: ModelFolderConfig) -> int:
    """Return the segment length of the fixed text."""
    return min(config.segment_length, _SEGMENT)


def fixed_text(config: ModelFolderConfig) -> Tensor:
    """Return three segments and one token, random but the same for every model with this vocabulary size."""
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 3 * segment_of(config) + 1)
    return torch.from_numpy(ids)


@torch.no_grad()
def streamed_nll(source: ModelSource, text: Tensor) -> Nll:
    """Return the loss of each token but the first, in float64. It is computed layer by layer over the full text, so
    that no more of the model is in memory at a time than one block, or the vocabulary."""
    config = source.config
    length = segment_of(config)
    with torch.device("meta"):
        model = Shortformer(config.model, config.vocab_size)
    model.positions = attention_of(config.model).positions(config.model.hidden_size).double()
    capacity = min(config.cache_length, length)
    with _materialised(model.vocabulary, "vocabulary", source):
        entered = [
            model.enter(ids, remembered=memory_of(config.model).length_after(index * length, config.model, capacity))
            for index, ids in enumerate(text[None, :-1].split(length, 1))
        ]
    segments = [x for x, _ in entered]
    positions = [pos for _, pos in entered]
    for attention, feed_forward in units(config.model):
        if attention is not None:
            block = model.blocks[attention]
            with _materialised(block, f"blocks.{attention}", source, only=Block.ATTENTION):
                segments = list(_attended(block, segments, positions, capacity, config.model))
        if feed_forward is not None:
            block = model.blocks[feed_forward]
            with _materialised(block, f"blocks.{feed_forward}", source, only=Block.FEED_FORWARD):
                segments = [block.feed(x, None, Stream(Axis()))[0] for x in segments]
    few = max(1, _AT_ONCE // config.vocab_size)
    parts = zip(torch.cat(segments, 1)[0].split(few), text[1:].split(few), strict=True)
    with _materialised(model.vocabulary, "vocabulary", source):
        return torch.cat([model.vocabulary.nll(x_ND, wanted, None) for x_ND, wanted in parts]).numpy()


def _attended(
    block: Block, segments: Sequence[Tensor], positions: Sequence[Places], capacity: int, config: ModelConfig
) -> Iterator[Tensor]:
    """Yield a block's attention output for each segment. Its memory of the segment before is its own input there."""
    one_layer = config.model_copy(update={"layers": 1})
    memory = memory_of(config).empty(one_layer, rows=1, capacity=capacity, like=segments[0])
    for x, pos in zip(segments, positions, strict=True):
        attended = block.attend(x, partial(memory.recall, 0), pos, None, Stream(Axis()))
        memory = memory.advance([attended.seen])
        yield attended.x


@contextmanager
def _materialised(
    module: nn.Module, prefix: str, source: ModelSource, only: Sequence[str] | None = None
) -> Iterator[None]:
    """Give a module of a model without weights its own for a while, or those of some of its parts."""
    hollow: list[tuple[nn.Module, str, Tensor, str]] = []
    for path, owner in module.named_modules():
        if only is not None and path.partition(".")[0] not in only:
            continue
        prefixes = filter(None, (prefix, path))
        place = ".".join(prefixes)
        hollow += [(owner, leaf, param, f"{place}.{leaf}") for leaf, param in owner.named_parameters(recurse=False)]
        learning = getattr(owner, "learning_buffers", ())
        hollow += [(owner, leaf, owner.get_buffer(leaf), f"{place}.{leaf}") for leaf in learning]
    for owner, leaf, held, name in hollow:
        weight = source.weight(name).double()
        if isinstance(held, nn.Parameter):
            weight = tag(nn.Parameter(weight, requires_grad=False), layout_of(held), Axis())
        setattr(owner, leaf, weight)
    try:
        yield
    finally:
        for owner, leaf, held, _ in hollow:
            setattr(owner, leaf, held)
