"""The settings of a run's text: its sources, its held-out texts and the size of a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Discriminator, Field, PositiveInt, Tag, model_validator

from megatron_style.config.section import NAME, Section

Tokens = Annotated[int, Field(gt=0, le=2**32)]  # forwarded at once
Weight = Annotated[float, Field(gt=0, le=1e15)]
Name = Annotated[str, Field(pattern=f"^{NAME}$", max_length=64)]


class SourceConfig(Section):
    """One source of a blend, with either `weight` or `epochs`, which are a weight in proportion to the size of the
    store."""

    path: Path  # of a store
    name: Name | None = None  # default: that of the file, or of its folder if the file is called train
    weight: Weight | None = None  # share of the rows of a batch, relative to the other sources
    epochs: Weight | None = None  # instead of weight: epochs of this source, relative to those of the others

    @property
    def label(self) -> str:
        if self.name is not None:
            return self.name
        prefix = self.prefix
        return prefix.parent.name or prefix.name if prefix.name == "train" else prefix.name

    @property
    def prefix(self) -> Path:
        """Return the path without the suffix of one of the two files of the store."""
        return self.path.with_suffix("") if self.path.suffix in (".bin", ".idx") else self.path

    @model_validator(mode="after")
    def _one_extent(self) -> Self:
        if (self.weight is None) == (self.epochs is None):
            found = "neither" if self.weight is None else "both"
            raise ValueError(f"needs either weight or epochs; it has {found}")
        if re.fullmatch(NAME, self.label) is None:
            raise ValueError(f"{self.label!r} of its path cannot be the name of a source; set name, such as books")
        return self


Sources = Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
TrainText = Annotated[
    Annotated[Path, Tag("(path)")] | Annotated[Sources, Tag("(list)")],
    Discriminator(lambda value: "(list)" if isinstance(value, list | tuple) else "(path)"),
]
HeldOutText = Annotated[
    Annotated[Path, Tag("(path)")] | Annotated[dict[Name, Path], Field(min_length=1), Tag("(mapping)")],
    Discriminator(lambda value: "(mapping)" if isinstance(value, dict) else "(path)"),
]


class DataConfig(Section):
    """Token stores by prefix (`data/sotu/train` names train.bin and train.idx)."""

    train: TrainText  # what the run learns from: a store, or a blend of several
    valid: HeldOutText  # held-out text, which the run is evaluated on: a store, or several by name, the main one first
    vocab_size: PositiveInt | None = None  # only for stores without a dictionary
    tokens_per_batch: Tokens = 9216  # per data-parallel rank and step
    tokens_per_update: Tokens | None = None  # of all ranks together; it decides tokens_per_batch on any number of them
    shuffle: bool | None = None  # segments in random order; default: only without a cache, which needs text order
    reset_at_documents: bool = False  # true: tokens do not see other documents, in the segment or in the cache

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Return the sources of the training text; a path is the only one."""
        return (
            (SourceConfig(path=self.train, name="train", weight=1.0),) if isinstance(self.train, Path) else self.train
        )

    @property
    def held_out(self) -> Mapping[str, Path]:
        """Return the held-out stores by name, the main one first; a single path has the name ""."""
        return {"": self.valid} if isinstance(self.valid, Path) else self.valid

    @property
    def prefixes(self) -> tuple[Path, ...]:
        """Return all stores of the run."""
        return (*(source.path for source in self.sources), *self.held_out.values())

    @property
    def is_blend(self) -> bool:
        return len(self.sources) > 1

    @property
    def batch_key(self) -> tuple[str, int]:
        """Return the key that sets the size of a batch, and its value."""
        if self.tokens_per_update is not None:
            return "data.tokens_per_update", self.tokens_per_update
        return "data.tokens_per_batch", self.tokens_per_batch

    @model_validator(mode="after")
    def _one_batch(self) -> Self:
        update = self.tokens_per_update
        if update is not None and "tokens_per_batch" not in self.model_fields_set:
            object.__setattr__(self, "tokens_per_batch", update)  # of one rank, until their number is known
        if update is not None and update % self.tokens_per_batch:
            raise ValueError(
                f"tokens_per_update ({update}) is not a multiple of tokens_per_batch ({self.tokens_per_batch}), which "
                f"it replaces; leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        sources = self.sources
        if len({source.weight is None for source in sources}) > 1:
            raise ValueError("train: some sources have a weight, others epochs; give all of them the same")
        for kind, values in (("name", [s.label for s in sources]), ("path", [str(s.prefix) for s in sources])):
            if repeated := [value for value in values if values.count(value) > 1]:
                remedy = "give each source a name of its own" if kind == "name" else "give it once, with the sum"
                raise ValueError(f"train: duplicate {kind} '{repeated[0]}'; {remedy}")
        return self
