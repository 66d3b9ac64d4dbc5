"""Checkpoints of the reference implementation (a fairseq fork) and of fairseq's own language models."""

from __future__ import annotations

import argparse
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_style.config.errors import UserError
from megatron_style.config.model import ModelConfig, ModelFolderConfig
from megatron_style.model.shortformer import Shortformer

_BLOCK_NAMES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "ffn_norm": "final_layer_norm",  # the reference's name for the norm before the feed-forward part
    "up": "fc1",
    "down": "fc2",
}
# Settings that change what a model computes without changing its tensors; absent means as here.
_FIXED_SETTINGS = {
    "activation_fn": "relu",
    "decoder_normalize_before": True,
    "no_token_positional_embeddings": False,
    "no_scale_embedding": False,
}


@dataclass(frozen=True)
class FairseqModel:
    config: ModelFolderConfig
    weights: dict[str, Tensor]  # by this project's names, float32


def read_fairseq(path: Path) -> FairseqModel:
    state = _load_safely(path)
    args, theirs = vars(state["args"]), dict(state["model"])
    history = state.get("optimizer_history") or [{}]
    config = _folder_config(path, args, theirs, step=history[-1].get("num_updates", 0))
    names = fairseq_names(config.model)
    _drop_what_is_not_a_weight(theirs)
    _drop_tied_copies(path, theirs, config.model)
    if set(theirs) != set(names.values()):
        odd = sorted(set(theirs) ^ set(names.values()))[0]
        where = "has" if odd in theirs else "lacks"
        raise UserError(f"{path}: {where} '{odd}', so it is not a pre-norm decoder without a final norm, as expected")
    _check_shapes(path, theirs, names, config)
    return FairseqModel(config, {ours: theirs[name].float() for ours, name in names.items()})


def fairseq_names(config: ModelConfig) -> dict[str, str]:
    """This project's parameter names -> the reference's."""
    names = {}
    if config.vocabulary.kind == "adaptive":
        for band in range(len(config.vocabulary.cutoffs) + 1):
            names[f"vocabulary.bands.{band}.table.weight"] = f"decoder.embed_tokens.embeddings.{band}.0.weight"
            names[f"vocabulary.bands.{band}.projection"] = f"decoder.embed_tokens.embeddings.{band}.1.weight"
        names["vocabulary.clusters"] = "decoder.adaptive_softmax.head.class_proj.weight"
    else:
        names["vocabulary.table.weight"] = "decoder.embed_tokens.weight"
    if config.vocabulary.kind == "untied":
        names["vocabulary.output_table.weight"] = "decoder.output_projection.weight"
    for layer in range(config.layers):
        for ours, theirs in _BLOCK_NAMES.items():
            for part in ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{part}"] = f"decoder.layers.{layer}.{theirs}.{part}"
    return names


def _load_safely(path: Path) -> dict[str, Any]:
    """Only tensors, plain values and argparse's Namespace are unpickled; anything else is refused, unexecuted."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            state = torch.load(path, map_location="cpu", weights_only=True)
        if zipfile.is_zipfile(path):  # the checksums of the tensors, which torch.load does not look at
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():
                    raise zipfile.BadZipFile(damaged)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a fairseq checkpoint (.pt) is expected") from None
    except PermissionError:
        raise
    except Exception as error:  # bytes of another kind make the unpickler raise whatever it stumbles over
        if foreign := re.search(r"GLOBAL ([\w.]+) ", str(error)):
            raise UserError(
                f"{path}: wants to run {foreign[1]}, so it was not loaded; a checkpoint holds tensors and settings only"
            ) from None
        raise UserError(f"{path}: truncated, damaged or not a PyTorch file; a fairseq checkpoint is expected") from None
    if not (
        isinstance(state, dict)
        and isinstance(state.get("args"), argparse.Namespace)
        and isinstance(state.get("model"), dict)
        and all(isinstance(tensor, Tensor) for tensor in state["model"].values())
    ):
        raise UserError(f"{path}: a PyTorch file, but not a fairseq checkpoint with settings ('args') and a 'model'")
    return state


def _folder_config(path: Path, args: dict[str, Any], weights: dict[str, Tensor], step: int) -> ModelFolderConfig:
    is_fork = "tokens_from_prev" in args  # the fork has position-infused attention only, plain fairseq has none
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
        raise UserError(f"{path}: lacks {error}, so it is not a transformer language model of fairseq's") from None
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


def _drop_tied_copies(path: Path, weights: dict[str, Tensor], config: ModelConfig) -> None:
    """The softmax side of a tied model repeats tensors of the input side."""
    copies = {}
    if config.vocabulary.kind == "tied":
        copies["decoder.output_projection.weight"] = "decoder.embed_tokens.weight"
    if config.vocabulary.kind == "adaptive":
        copies["decoder.adaptive_softmax.head.word_proj.weight"] = "decoder.embed_tokens.embeddings.0.0.weight"
        for tail in range(len(config.vocabulary.cutoffs)):
            source = f"decoder.embed_tokens.embeddings.{tail + 1}"
            copies[f"decoder.adaptive_softmax.tail.{tail}.0.weight"] = f"{source}.1.weight"
            copies[f"decoder.adaptive_softmax.tail.{tail}.2.weight"] = f"{source}.0.weight"
    for copy, original in copies.items():
        if {copy, original} <= set(weights) and not torch.equal(weights.pop(copy), weights[original]):
            raise UserError(f"{path}: '{copy}' differs from '{original}', though its settings say they are tied")


def _check_shapes(path: Path, weights: dict[str, Tensor], names: dict[str, str], config: ModelFolderConfig) -> None:
    with torch.device("meta"):  # shapes only, no memory
        model = Shortformer(config.model, config.vocab_size)
    for ours, param in model.named_parameters():
        found = weights[names[ours]].shape
        if found != param.shape:
            raise UserError(
                f"{path}: '{names[ours]}' is {list(found)}, but its settings make it {list(param.shape)}; "
                "the file is damaged or of another kind"
            )
