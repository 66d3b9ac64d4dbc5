"""A form of model: checkpoints of the reference implementation (a fairseq fork) and of fairseq's own language models.

The reference's momentum is a velocity v in units of the last update's learning rate lr_old; ours is u = -v / lr_old
(`engine/optimizer.py`). Both conversions are computed and stored in float64, so that a round trip loses nothing."""

from __future__ import annotations

import argparse
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.checkpoint.logical import is_plain
from megatron_style.config.model import ModelConfig, ModelFolderConfig, Positions
from megatron_style.data.corpus import tokenizer_beside
from megatron_style.formats.source import ANY, Holds, ModelSource, parameters_of

NAME = "a checkpoint of fairseq (.pt)"
FILES = frozenset[str]()
HOLDS: Holds = {
    "positions": {"added", "infused"},
    "cache": ANY,
    "vocabulary.kind": ANY,
    "vocabulary.cutoffs": ANY,
    "vocabulary.factor": ANY,
    "dropout": ANY,
}
_BLOCK_NAMES = {
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query": "self_attn.q_proj",
    "attention.out": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "ffn_norm": "final_layer_norm",  # the reference's name for the norm before the feed-forward part
}
# Settings that change what a model computes without changing its tensors, with their defaults.
_FIXED_SETTINGS = {
    "activation_fn": "relu",
    "decoder_normalize_before": True,
    "no_token_positional_embeddings": False,
    "no_scale_embedding": False,
}


def recognises(path: Path) -> bool:
    return path.suffix == ".pt"


def read(path: Path) -> ModelSource:
    state = _load_safely(path)
    try:
        return _source(path, state)
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path}: its settings or its optimizer's state are not those of a fairseq language model ({error!r})"
        ) from None


def _source(path: Path, state: dict[str, Any]) -> ModelSource:
    weights = dict(state["model"])
    history = state.get("optimizer_history") or [{}]
    config = _folder_config(path, vars(state["args"]), weights, step=history[-1].get("num_updates", 0))
    names = fairseq_names(config.model)
    _drop_what_is_not_a_weight(weights)
    if odd := next((name for name, tensor in weights.items() if not is_plain(tensor)), None):
        raise UserError(f"{path}: '{odd}' is not a dense tensor of floating point numbers")
    _drop_tied_copies(path, weights, config.model)
    if set(weights) != set(names.values()):
        odd = sorted(set(weights) ^ set(names.values()))[0]
        has_or_lacks = "has" if odd in weights else "lacks"
        raise UserError(
            f"{path}: {has_or_lacks} '{odd}', so it is not a pre-norm decoder without a final norm, as expected"
        )
    _check_shapes(path, weights, names, config)
    source = ModelSource(
        path, config, lambda name: weights[names[name]].float(), partial(tokenizer_beside, path.absolute())
    )
    return _with_optimizer(source, state)


def _with_optimizer(source: ModelSource, state: dict[str, Any]) -> ModelSource:
    """Return the source with the state of NAG, if the checkpoint has it."""
    optimizer = state.get("last_optimizer_state") or {}
    if not optimizer.get("state") or state["args"].optimizer != "nag":
        return source
    group = optimizer["param_groups"][0]
    if not group["lr_old"] > 0:
        raise ValueError(f"lr_old is {group['lr_old']}")
    velocity = _velocities(source, optimizer["state"])
    epoch = state.get("extra_state", {}).get("train_iterator", {}).get("epoch", 1)
    training = {"optimizer": "nag", "learning_rate": group["lr_old"], "epoch": epoch}
    training |= {key: group[key] for key in ("momentum", "weight_decay")}
    config = source.config.as_data() | {"training": training}
    return replace(
        source,
        config=ModelFolderConfig.parse(config, source=str(source.path)),
        state=lambda name: {"momentum_buffer": velocity(name).to(torch.float64, copy=True).div_(-group["lr_old"])},
    )


def _velocities(source: ModelSource, state: dict[int, dict[str, Tensor]]) -> Callable[[str], Tensor]:
    """Return the momentum by parameter name. A checkpoint has one buffer per parameter or, after training in half
    precision, a single flat one, in the order of the parameters."""
    parameters = parameters_of(source.config)
    order = list(fairseq_names(source.config.model))
    buffers = [state[index]["momentum_buffer"] for index in range(len(state))]
    if not all(map(is_plain, buffers)):
        raise TypeError("a momentum_buffer is not a tensor of numbers")
    if len(buffers) == 1 and buffers[0].dim() == 1:
        sizes = [math.prod(parameters[name].shape) for name in order]
        buffers = list(buffers[0].split(sizes)) if len(buffers[0]) == sum(sizes) else []
    parts = dict(zip(order, buffers, strict=True))
    if odd := next((name for name in order if parts[name].numel() != math.prod(parameters[name].shape)), None):
        raise ValueError(f"the momentum_buffer of {odd} has {parts[odd].numel()} elements")
    return {name: part.reshape(parameters[name].shape) for name, part in parts.items()}.__getitem__


def write(path: Path, source: ModelSource) -> None:
    """Write the tensors to disk and map them from there before they are saved: one tensor is in memory at a time."""
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as directory:
        aside = Path(directory)
        names = fairseq_names(source.config.model)
        model = {theirs: _on_disk(aside / ours, source.weight(ours).float()) for ours, theirs in names.items()}
        model |= {copy: model[original] for copy, original in _tied_copies(source.config.model).items()}
        state = {
            "args": argparse.Namespace(**_settings(source.config)),
            "model": model | _markers(source.config.model),
            "optimizer_history": [_history(source.config)],
            "extra_state": _extra_state(source.config),
            "last_optimizer_state": _optimizer_state(source, aside),
        }
        torch.save(state, path)


def _on_disk(path: Path, tensor: Tensor) -> Tensor:
    """Return the same tensor, mapped from a file."""
    tensor.contiguous().numpy().tofile(path)
    mapped = np.memmap(path, tensor.numpy().dtype, mode="c", shape=tuple(tensor.shape))  # a scalar too
    return torch.from_numpy(mapped)


def _optimizer_state(source: ModelSource, aside: Path) -> dict[str, Any] | None:
    training = source.config.training
    if training is None or training.optimizer != "nag" or source.state is None:
        return None
    order = list(fairseq_names(source.config.model))
    momentum = source.state

    def velocity(name: str) -> Tensor:
        return momentum(name)["momentum_buffer"].to(torch.float64, copy=True).mul_(-training.learning_rate)

    state = {
        index: {"momentum_buffer": _on_disk(aside / f"{name}.velocity", velocity(name))}
        for index, name in enumerate(order)
    }
    group = {
        "lr": training.learning_rate,  # fairseq's scheduler overwrites it
        "lr_old": training.learning_rate,
        "momentum": training.momentum,
        "weight_decay": training.weight_decay,
        "params": list(range(len(order))),
    }
    return {"state": state, "param_groups": [group]}


def _history(config: ModelFolderConfig) -> dict[str, Any]:
    criterion = "AdaptiveLoss" if config.model.vocabulary.kind == "adaptive" else "CrossEntropyCriterion"
    return {
        "criterion_name": criterion,
        "optimizer_name": "FairseqNAG",
        "lr_scheduler_state": {"best": None},
        "num_updates": config.step,
    }


def _extra_state(config: ModelFolderConfig) -> dict[str, Any]:
    """Return the state of fairseq's data iterator: at the start of an epoch, since we split an epoch differently."""
    epoch = config.training.epoch if config.training else 1
    iterator = {"version": 2, "epoch": epoch, "iterations_in_epoch": 0, "shuffle": not config.model.cache}
    return {"train_iterator": iterator, "val_loss": None, "previous_training_time": 0}


def _settings(config: ModelFolderConfig) -> dict[str, Any]:
    """Return the command-line settings from which the reference builds this model."""
    model = config.model
    adaptive = model.vocabulary.kind == "adaptive"
    settings: dict[str, Any] = {
        "task": "language_modeling",
        "arch": "transformer_lm_wiki103" if adaptive else "transformer_lm",
        "criterion": "adaptive_loss" if adaptive else "cross_entropy",
        "optimizer": "nag",
        "lr_scheduler": "cosine",
        "decoder_layers": model.layers,
        "decoder_embed_dim": model.hidden_size,
        "decoder_input_dim": model.hidden_size,
        "decoder_output_dim": model.hidden_size,
        "decoder_attention_heads": model.heads,
        "decoder_ffn_embed_dim": model.ffn_size,
        "dropout": model.dropout.hidden,
        "attention_dropout": model.dropout.attention,
        "activation_dropout": model.dropout.activation,
        "adaptive_softmax_dropout": model.dropout.softmax,
        "tokens_per_sample": config.segment_length,
        "max_target_positions": config.segment_length,
        "max_tokens": 9216,
        "sample_break_mode": "none",
        "adaptive_input": adaptive,
        "share_decoder_input_output_embed": model.vocabulary.kind == "tied",
        "no_decoder_final_norm": True,
        "decoder_learned_pos": False,
        "character_embeddings": False,
        "layernorm_embedding": False,
        **_FIXED_SETTINGS,
    }
    if adaptive:
        cutoffs = ",".join(map(str, model.vocabulary.cutoffs))
        settings |= {"adaptive_input_cutoff": cutoffs, "adaptive_softmax_cutoff": cutoffs}
        settings |= dict.fromkeys(("adaptive_input_factor", "adaptive_softmax_factor"), model.vocabulary.factor)
        settings |= {"tie_adaptive_weights": True, "tie_adaptive_proj": True}
    of_the_fork = {"tokens_from_prev": config.cache_length, "sliding_inf": -1}  # absent for the baseline, plain fairseq
    flags: Mapping[Positions, dict[str, Any]] = {"added": {}, "infused": of_the_fork}
    return settings | flags[model.positions]


def _markers(config: ModelConfig) -> dict[str, Tensor]:
    """Return the entries that fairseq keeps next to the weights, and without which it refuses to load."""
    markers = {"decoder.version": torch.tensor([3.0]), "decoder.embed_positions._float_tensor": torch.zeros(1)}
    if config.vocabulary.kind == "adaptive":
        markers["decoder.embed_tokens._float_tensor"] = torch.zeros(1)
        markers["decoder.adaptive_softmax.version"] = torch.tensor([1])
        markers["decoder.adaptive_softmax.head._float_tensor"] = torch.zeros(1)
    return markers


def fairseq_names(config: ModelConfig) -> dict[str, str]:
    """Return the reference's parameter names by this project's, in the order of the reference's parameters."""
    names = {}
    if config.vocabulary.kind == "adaptive":
        for band in range(len(config.vocabulary.cutoffs) + 1):
            names[f"vocabulary.bands.{band}.table.weight"] = f"decoder.embed_tokens.embeddings.{band}.0.weight"
            names[f"vocabulary.bands.{band}.projection"] = f"decoder.embed_tokens.embeddings.{band}.1.weight"
    else:
        names["vocabulary.table.weight"] = "decoder.embed_tokens.weight"
    for layer in range(config.layers):
        for ours, theirs in _BLOCK_NAMES.items():
            for part in ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{part}"] = f"decoder.layers.{layer}.{theirs}.{part}"
    if config.vocabulary.kind == "adaptive":
        names["vocabulary.clusters"] = "decoder.adaptive_softmax.head.class_proj.weight"
    if config.vocabulary.kind == "untied":
        names["vocabulary.output_table.weight"] = "decoder.output_projection.weight"
    return names


def _load_safely(path: Path) -> dict[str, Any]:
    """Load tensors, plain values and argparse's Namespace; anything else is refused, and nothing is executed."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            zipped = zipfile.is_zipfile(path)  # since torch 1.6; such a file can be memory-mapped
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        if zipped:  # torch.load does not verify the checksums of the tensors
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(damaged)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a fairseq checkpoint (.pt) is expected") from None
    except PermissionError:
        raise
    except Exception as error:  # on foreign bytes the unpickler may raise anything
        if foreign := re.search(r"GLOBAL ([\w.]+) ", str(error)):
            raise UserError(
                f"{path}: wants to run {foreign[1]}, so it was not loaded; a checkpoint holds tensors and settings only"
            ) from None
        raise UserError(f"{path}: truncated, damaged or not a PyTorch file; a fairseq checkpoint is expected") from None
    if not (
        isinstance(state, dict)
        and isinstance(state.get("args"), argparse.Namespace)
        and isinstance(state.get("model"), dict)
        and all(isinstance(name, str) for name in state["model"])
        and all(isinstance(tensor, Tensor) for tensor in state["model"].values())
    ):
        raise UserError(f"{path}: a PyTorch file, but not a fairseq checkpoint with settings ('args') and a 'model'")
    return state


def _folder_config(path: Path, args: dict[str, Any], weights: dict[str, Tensor], step: int) -> ModelFolderConfig:
    is_fork = "tokens_from_prev" in args  # the fork has only position-infused attention, plain fairseq has none
    cache_length = args.get("tokens_from_prev", 0)
    for setting, value in _FIXED_SETTINGS.items():
        if args.get(setting, value) != value:
            raise UserError(f"{path}: was trained with {setting} {args[setting]}; only {value} can be imported")
    try:
        vocabulary, vocab_size = _vocabulary(path, args, weights)
        model = {
            "layers": args["decoder_layers"],
            "hidden_size": args["decoder_embed_dim"],
            "heads": args["decoder_attention_heads"],
            "ffn_size": args["decoder_ffn_embed_dim"],
            "positions": "infused" if is_fork else "added",
            "cache": cache_length > 0,
            "vocabulary": vocabulary,
            "dropout": {
                "hidden": args["dropout"],
                "attention": args["attention_dropout"],
                "activation": args["activation_dropout"],
                "softmax": args["adaptive_softmax_dropout"] if vocabulary["kind"] == "adaptive" else 0,
            },
        }
        data = {"model": model, "vocab_size": vocab_size, "segment_length": args["tokens_per_sample"]}
    except KeyError as error:
        raise UserError(f"{path}: lacks {error}, so it is not one of fairseq's transformer language models") from None
    return ModelFolderConfig.parse(data | {"cache_length": cache_length, "step": step}, source=str(path))


def _vocabulary(path: Path, args: dict[str, Any], weights: dict[str, Tensor]) -> tuple[dict[str, Any], int]:
    if not args.get("adaptive_input"):
        kind = "tied" if args.get("share_decoder_input_output_embed") else "untied"
        return {"kind": kind}, len(weights["decoder.embed_tokens.weight"])
    for setting in ("tie_adaptive_weights", "tie_adaptive_proj"):
        if not args.get(setting):
            raise UserError(f"{path}: was trained with {setting} off; only tied adaptive vocabularies can be imported")
    cutoffs = [int(part) for part in str(args["adaptive_input_cutoff"]).split(",")]
    bands = [len(weights[f"decoder.embed_tokens.embeddings.{band}.0.weight"]) for band in range(len(cutoffs) + 1)]
    return {"kind": "adaptive", "cutoffs": cutoffs, "factor": int(args["adaptive_input_factor"])}, sum(bands)


def _drop_what_is_not_a_weight(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.endswith(("version", "_float_tensor"))]:
        del weights[name]


def _tied_copies(config: ModelConfig) -> dict[str, str]:
    """Return the tensors that a tied model repeats on its softmax side, with their originals on the input side."""
    copies = {}
    if config.vocabulary.kind == "tied":
        copies["decoder.output_projection.weight"] = "decoder.embed_tokens.weight"
    if config.vocabulary.kind == "adaptive":
        copies["decoder.adaptive_softmax.head.word_proj.weight"] = "decoder.embed_tokens.embeddings.0.0.weight"
        for tail in range(len(config.vocabulary.cutoffs)):
            source = f"decoder.embed_tokens.embeddings.{tail + 1}"
            copies[f"decoder.adaptive_softmax.tail.{tail}.0.weight"] = f"{source}.1.weight"
            copies[f"decoder.adaptive_softmax.tail.{tail}.2.weight"] = f"{source}.0.weight"
    return copies


def _drop_tied_copies(path: Path, weights: dict[str, Tensor], config: ModelConfig) -> None:
    for copy, original in _tied_copies(config).items():
        if {copy, original} <= set(weights) and not torch.equal(weights.pop(copy), weights[original]):
            raise UserError(f"{path}: '{copy}' differs from '{original}', though its settings say they are tied")


def _check_shapes(path: Path, weights: dict[str, Tensor], names: dict[str, str], config: ModelFolderConfig) -> None:
    for ours, layout in parameters_of(config).items():
        found = weights[names[ours]].shape
        if found != layout.shape:
            raise UserError(
                f"{path}: '{names[ours]}' is {list(found)}, but its settings make it {list(layout.shape)}; "
                "the file is damaged or of another format"
            )
