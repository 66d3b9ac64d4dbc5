"""The settings of a model: every variant of the paper is one of these values."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_style.base.errors import UserError
from megatron_style.config.section import Section

Positions = Literal["added", "infused", "relative"]  # kinds of attention, by how a token's position enters it
OptimizerKind = Literal["nag", "adamw"]
DEFAULT_OPTIMIZER: OptimizerKind = "nag"
Assignment = Literal["nearest", "balanced"]  # of tokens to the clusters of a routing model
EvaluationMode = Literal["nonoverlapping", "sliding", "cached", "token-by-token"]
_FIRST_BAND = 0.075  # of the vocabulary


class VocabularyConfig(Section):
    """`adaptive`: frequency bands of shrinking width, tied. `tied`: one matrix for input and output. `untied`: two.

    `biases` gives each logit one. `projections` is about the bands of an adaptive vocabulary: the first is projected on
    the `input` side only (Baevski & Auli), on `both` sides by matrices of its own (Transformer-XL), or there are `none`
    at all, which needs bands of equal width."""

    kind: Literal["adaptive", "tied", "untied"] = "adaptive"  # of token vectors and logits
    cutoffs: tuple[PositiveInt, ...] = ()  # first token id of each band after the first; default: from the vocabulary
    factor: PositiveInt = 4  # by which each band is narrower than the one before
    biases: bool = False  # one per logit
    projections: Literal["input", "both", "none"] = "input"  # sides on which the first band has a projection

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind != "adaptive" and self.cutoffs:
            raise ValueError(f"cutoffs {list(self.cutoffs)} belong to kind adaptive, not {self.kind}; remove them")
        if list(self.cutoffs) != sorted(set(self.cutoffs)):
            raise ValueError(f"cutoffs {list(self.cutoffs)} must grow, as in {sorted(set(self.cutoffs))}")
        if self.kind != "adaptive" and self.projections != "input":
            raise ValueError(f"projections {self.projections} belong to kind adaptive, not {self.kind}; remove them")
        if self.projections == "none" and self.factor != 1:
            raise ValueError(f"projections none need bands of equal width: factor 1, not {self.factor}")
        return self


class DropoutConfig(Section):
    """Dropout rates, at the four places of the reference: hidden states, attention, feed-forward, softmax input."""

    hidden: float = Field(0.0, ge=0, lt=1)  # of embeddings and sublayer outputs
    attention: float = Field(0.0, ge=0, lt=1)  # of attention weights
    activation: float = Field(0.0, ge=0, lt=1)  # of feed-forward activations
    softmax: float = Field(0.0, ge=0, lt=1)  # of projections to the bands of the adaptive softmax after the first


# A file may come from a stranger: sizes beyond those of any model are refused before memory is allocated.
Layers = Annotated[int, Field(gt=0, le=10_000)]
Width = Annotated[int, Field(gt=0, le=2**20)]
Count = Annotated[int, Field(gt=0, le=2**40)]


class CompressionConfig(Section):
    """The compressed part of a memory (Compressive Transformer): `rate` tokens that leave the cache become one of the
    `compressed` slots. A convolution is trained by a loss of its own, so that attention to the slots gives what
    attention to the tokens gave; mean and max have nothing to train."""

    compressed: Annotated[int, Field(gt=0, le=2**40)]  # slots per layer
    rate: Annotated[int, Field(gt=1, le=2**20)]  # tokens per slot; it divides every segment length
    function: Literal["convolution", "mean", "max"] = "convolution"  # of the tokens of a slot
    loss_weight: PositiveFloat = 1.0  # of the loss that trains the convolution

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.function != "convolution" and self.loss_weight != 1:
            raise ValueError(f"loss_weight ({self.loss_weight}) belongs to function convolution; remove it")
        return self


class RoutingConfig(Section):
    """The Routing Transformer. In layers from `first_layer` on, the first `heads` heads attend to tokens of their own
    cluster; all others attend to blocks of `local` tokens.

    `nearest`: a token belongs to its nearest centroid and sees the last `window` members up to itself. `balanced`: each
    cluster takes the `window` nearest tokens of the segment, as in the authors' code, so that later tokens decide what
    earlier ones see."""

    heads: Width  # that attend within clusters
    clusters: Width  # of each such head
    window: Count  # members of its cluster that a token sees, itself included
    local: Count  # tokens of a block of the other heads
    first_layer: NonNegativeInt = 0  # with routing heads; layers before it have local ones only
    assignment: Assignment = "nearest"  # of tokens to clusters; balanced is refused by train and evaluate
    decay: float = Field(0.999, ge=0, lt=1)  # of the moving average of the centroids, per update


class ModelConfig(Section):
    layers: Layers  # transformer blocks
    hidden_size: Width  # width of the residual stream
    heads: Width  # of attention; they divide hidden_size
    ffn_size: Width  # inner width of the feed-forward sublayers
    positions: Positions = "infused"  # added to token vectors, infused into queries and keys, or relative distances
    cache: bool = True  # each segment attends to the one before
    memory: CompressionConfig | None = None  # what becomes of tokens that leave the cache; default: they are forgotten
    norm: Literal["before", "after"] = "before"  # each sublayer, or each sum of a sublayer and its input
    routing: RoutingConfig | None = None  # heads that attend within clusters; default: none
    document_end: NonNegativeInt | None = None  # the id after which nothing before is seen; data.reset_at_documents
    sandwich: NonNegativeInt = 0  # attention sublayers before the first feed-forward one, besides the first
    vocabulary: VocabularyConfig  # token vectors and softmax
    dropout: DropoutConfig = DropoutConfig()  # rates

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of heads ({self.heads})")
        if self.hidden_size % 2 or self.hidden_size < 4:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be even and at least 4: sine and cosine share it")
        if self.sandwich >= self.layers:
            raise ValueError(f"sandwich ({self.sandwich}) must be less than layers ({self.layers})")
        if self.memory is not None and not self.cache:
            raise ValueError("memory compresses what leaves the cache, but cache is false; set cache to true")
        if self.memory is not None and self.positions == "added":
            raise ValueError("memory needs positions infused or relative: an added position cannot be compressed")
        if self.routing is not None:
            self._check_routing(self.routing)
        if self.document_end is not None and (problem := self.mixes_documents):
            raise ValueError(f"document_end is {self.document_end}, but {problem}")
        bands = len(self.vocabulary.cutoffs)
        if self.hidden_size < self.vocabulary.factor**bands:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) leaves no width for band {bands}, which gets "
                f"hidden_size / {self.vocabulary.factor}^{bands}; use fewer cutoffs or a smaller factor"
            )
        return self

    def check_segment(self, length: int, where: str) -> None:
        """Refuse a segment length that a compressed memory cannot take. `where` names the setting."""
        if self.memory is not None and length % self.memory.rate:
            below = length - length % self.memory.rate
            near = f"{below} or {below + self.memory.rate}" if below else str(self.memory.rate)
            raise UserError(
                f"{where} ({length}) must be a multiple of model.memory.rate ({self.memory.rate}); use {near}"
            )

    def check_split(self, ways: int, where: str) -> None:
        """Refuse a number of tensor-parallel ranks over which the model cannot be split. `where` names the setting."""
        for name, size in self.split_sizes.items():
            if size % ways:
                raise UserError(f"{where} {ways}: must divide the model's {name} ({size})")

    def _check_routing(self, routing: RoutingConfig) -> None:
        if self.cache:
            raise ValueError("routing needs cache false: the members of a cluster are those of one segment")
        if self.positions != "added":
            raise ValueError(
                f"routing needs positions added, not {self.positions}: the order of a cluster's members says little "
                f"about their distance in the text"
            )
        if routing.heads >= self.heads:
            raise ValueError(f"routing.heads ({routing.heads}) must be less than heads ({self.heads})")
        if routing.first_layer >= self.layers:
            raise ValueError(f"routing.first_layer ({routing.first_layer}) must be less than layers ({self.layers})")

    @property
    def split_sizes(self) -> dict[str, int]:
        """Return the sizes, by key, that the number of tensor-parallel ranks has to divide."""
        sizes = {"heads": self.heads, "ffn_size": self.ffn_size}
        return sizes | ({"routing.heads": self.routing.heads} if self.routing else {})

    @property
    def mixes_documents(self) -> str | None:
        """Describe the setting by which documents cannot be kept from seeing each other, if there is one."""
        if self.memory is not None:
            return "model.memory compresses tokens of several documents into one slot; remove it"
        if self.routing is not None:
            return "model.routing assigns tokens to clusters across documents; remove it"
        return None

    @property
    def foresight(self) -> str | None:
        """Describe the setting by which losses depend on later tokens, if there is one."""
        if self.routing is None or self.routing.assignment == "nearest":
            return None
        return (
            f"model.routing.assignment is {self.routing.assignment}, where later tokens decide what earlier ones see, "
            f"so that its loss has seen the future; use nearest"
        )

    def with_vocabulary(self, vocab_size: int) -> Self:
        """Return the model for a vocabulary of this size, which is the corpus's: cutoffs that are not set get their
        values, and cutoffs beyond the vocabulary are refused."""
        vocabulary = self.vocabulary
        cutoffs = vocabulary.cutoffs
        if cutoffs and cutoffs[-1] >= vocab_size:
            raise UserError(
                f"model.vocabulary.cutoffs: {list(cutoffs)} must stay below the corpus's vocabulary of {vocab_size}; "
                f"leave them out to derive them from it, or choose a last cutoff below {vocab_size}"
            )
        if cutoffs or vocabulary.kind != "adaptive":
            return self
        derived = derived_cutoffs(vocab_size, self.hidden_size, vocabulary.factor)
        if not derived:
            raise UserError(
                f"model.vocabulary.kind is adaptive, but neither a vocabulary of {vocab_size} nor a hidden_size of "
                f"{self.hidden_size} can be divided into bands; use kind tied"
            )
        return self.model_copy(update={"vocabulary": vocabulary.model_copy(update={"cutoffs": derived})})


def derived_cutoffs(vocab_size: int, hidden_size: int, factor: int) -> tuple[int, ...]:
    """Return cutoffs at the shares of the vocabulary that the paper's have (20,000 and 60,000 of 267,744), as multiples
    of 8, with at most as many bands as the width allows."""
    first = max(8, 8 * round(vocab_size * _FIRST_BAND / 8))
    wide_enough = [cutoff for band, cutoff in ((1, first), (2, 3 * first)) if hidden_size >= factor**band]
    return tuple(cutoff for cutoff in wide_enough if cutoff < vocab_size)


class TrainingState(Section):
    """The state from which training resumes, in addition to weights, optimizer state and step."""

    optimizer: OptimizerKind
    learning_rate: float = Field(ge=0)  # of the last update
    momentum: float = Field(0.99, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    epoch: PositiveInt = 1  # the pass over the text that comes next or has begun


class ModelFolderConfig(Section):
    """`config.json` of an exported model: the model, and the segment and cache length it was last trained with."""

    format_version: Literal[1] = 1
    model: ModelConfig
    vocab_size: Annotated[int, Field(gt=0, le=2**31)]
    eos: NonNegativeInt = 2
    segment_length: Count
    cache_length: Annotated[int, Field(ge=0, le=2**40)]
    step: NonNegativeInt = 0
    training: TrainingState | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.model.check_segment(self.segment_length, "segment_length")
        cutoffs = self.model.vocabulary.cutoffs
        if self.model.vocabulary.kind == "adaptive" and not cutoffs:
            raise ValueError("model.vocabulary.kind is adaptive, which needs cutoffs, such as [20000, 60000]")
        if max(self.eos, *cutoffs, 0) >= self.vocab_size:
            raise ValueError(
                f"vocab_size is {self.vocab_size}; it must be above eos ({self.eos}) and the cutoffs ({list(cutoffs)})"
            )
        return self
