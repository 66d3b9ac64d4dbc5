"""A form of model: Transformer-XL in the layout of transformers' TransfoXL, as `transfo-xl-wt103` is distributed.

It is read only, without code from that library. The library orders the clusters of the vocabulary as we do; the
authors' own PyTorch code reverses them. Its `vocab.pkl` is a pickle, which could run anything, so it is not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.model_files import WEIGHTS, has_weights
from megatron_style.checkpoint.logical import is_plain
from megatron_style.config.model import ModelFolderConfig
from megatron_style.formats.model_folder import CONFIG_FILE, model_type, read_settings
from megatron_style.formats.source import Holds, ModelSource, parameters_of
from megatron_style.formats.tensor_files import open_sharded, weights_file
from megatron_style.model.shape import bands

NAME = "a folder of transformers' TransfoXL"
FILES = frozenset[str]()
HOLDS: Holds = None
MODEL_TYPE = "transfo-xl"
_PICKLED = "pytorch_model.bin"
# Settings that change what a model computes without changing its tensors, with the values that can be read.
_FIXED_SETTINGS = {"attn_type": 0, "ext_len": 0, "sample_softmax": -1, "layer_norm_epsilon": 1e-5, "adaptive": True}
_QUERY, _KEY, _VALUE = range(3)  # the thirds of qkv_net
_FEED_FORWARD = {
    "ffn_norm": "pos_ff.layer_norm",
    "up": "pos_ff.CoreNet.0",
    "down": "pos_ff.CoreNet.3",
    "attention_norm": "dec_attn.layer_norm",
}

Get = Callable[[str], Tensor]


def recognises(path: Path) -> bool:
    return model_type(path) == MODEL_TYPE


def read(folder: Path) -> ModelSource:
    settings = read_settings(folder)
    if model_type(folder) != MODEL_TYPE:
        raise UserError(f"{folder / CONFIG_FILE}: model_type is not {MODEL_TYPE}; a folder of TransfoXL is expected")
    config = _folder_config(folder / CONFIG_FILE, settings)
    tensors = _Tensors(folder)
    tensors.check_tied(config)
    recipes = _recipes(config, untied=settings["untie_r"])
    assert recipes.keys() == parameters_of(config).keys()
    for name, shape in parameters_of(config).items():
        found = list(recipes[name](tensors.get).shape)
        if found != list(shape.shape):
            raise UserError(f"{folder}: {name} is made of tensors of shape {found}, not {list(shape.shape)}")
    return ModelSource(folder, config, lambda name: recipes[name](tensors.get), lambda: None)


def evaluation_flags(folder: Path) -> str:
    """Return the flags of `evaluate` that a folder's settings mean."""
    settings = read_settings(folder)
    clamp = settings.get("clamp_len", -1)
    flags = ["--same-length"] if settings.get("same_length") else []
    flags += [f"--clamp-distance {clamp}"] if clamp > 0 else []
    return " ".join(flags)


def _folder_config(path: Path, settings: dict[str, Any]) -> ModelFolderConfig:
    try:
        for setting, value in _FIXED_SETTINGS.items():
            if settings.get(setting, value) != value:
                raise UserError(f"{path}: {setting} is {settings[setting]}; only {value} can be read")
        D = settings["d_model"]
        if settings["n_head"] * settings["d_head"] != D or settings.get("d_embed", D) != D:
            raise UserError(f"{path}: n_head x d_head and d_embed must be d_model ({D}), as in the published models")
        data = {
            "model": {
                "layers": settings["n_layer"],
                "hidden_size": D,
                "heads": settings["n_head"],
                "ffn_size": settings["d_inner"],
                "positions": "relative",
                "norm": "before" if settings["pre_lnorm"] else "after",
                "cache": settings["mem_len"] > 0,
                "vocabulary": _vocabulary(settings),
                "dropout": _dropout(settings),
            },
            "vocab_size": settings["vocab_size"],
            "eos": settings.get("eos_token_id", 0),
            "segment_length": settings["tgt_len"],
            "cache_length": settings["mem_len"],
        }
        settings["untie_r"]  # read later
    except KeyError as error:
        raise UserError(f"{path}: lacks {error}, so it is not a complete folder of TransfoXL") from None
    except TypeError as error:
        raise UserError(f"{path}: has a setting of the wrong type ({error})") from None
    return ModelFolderConfig.parse(data, source=str(path))


def _vocabulary(settings: dict[str, Any]) -> dict[str, Any]:
    if not settings["cutoffs"]:
        return {"kind": "tied", "biases": True}
    factor = settings["div_val"]
    return {
        "kind": "adaptive",
        "cutoffs": settings["cutoffs"],
        "factor": factor,
        "biases": True,
        "projections": "none" if factor == 1 else "both",
    }


def _dropout(settings: dict[str, Any]) -> dict[str, Any]:
    rate = settings.get("dropout", 0.0)
    return {"hidden": rate, "attention": settings.get("dropatt", 0.0), "activation": rate, "softmax": rate}


class _Tensors:
    """The tensors of a folder by the names of the authors' code, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._path = weights_file(folder) if has_weights(folder) else folder / _PICKLED
        if has_weights(folder):
            held = {name: tensor.get for name, tensor in open_sharded(folder).items()}
        else:
            pickled = _unpickled(self._path)
            held = {name: partial(pickled.__getitem__, name) for name in pickled}
        self._get = {name.removeprefix("transformer."): get for name, get in held.items()}

    def get(self, name: str) -> Tensor:
        if name not in self._get:
            raise UserError(f"{self._path}: lacks '{name}', which its {CONFIG_FILE} wants")
        tensor = self._get[name]()
        if not is_plain(tensor):
            raise UserError(f"{self._path}: '{name}' is not a dense tensor of floating point numbers")
        return tensor

    def check_tied(self, config: ModelFolderConfig) -> None:
        """Refuse a model whose output side is not the input side, except for the first band's projection."""
        for band in range(len(config.model.vocabulary.cutoffs) + 1):
            self._check_same(f"crit.out_layers.{band}.weight", f"word_emb.emb_layers.{band}.weight")
            if band:
                self._check_same(f"crit.out_projs.{band}", f"word_emb.emb_projs.{band}")

    def _check_same(self, copy: str, original: str) -> None:
        if copy in self._get and not torch.equal(self.get(copy), self.get(original)):
            raise UserError(f"{self._path}: '{copy}' differs from '{original}'; only tied vocabularies can be read")


def _unpickled(path: Path) -> Mapping[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"{path.parent}: has neither {WEIGHTS} nor {_PICKLED}") from None
    except PermissionError:
        raise
    except Exception as error:  # on foreign bytes the unpickler may raise anything
        raise UserError(f"{path}: is not a complete file of tensors only, so it was not loaded ({error!r})") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError(f"{path}: holds something else than tensors by name")
    return state


def _recipes(config: ModelFolderConfig, *, untied: bool) -> dict[str, Callable[[Get], Tensor]]:
    """Return how each of our parameters is made of theirs."""
    model = config.model
    recipes = _vocabulary_recipes(config)
    for layer in range(model.layers):
        theirs = f"layers.{layer}"
        ours = f"blocks.{layer}"
        attention = f"{theirs}.dec_attn"
        biases = attention if untied else ""
        for part, source in _FEED_FORWARD.items():
            for kind in ("weight", "bias"):
                recipes[f"{ours}.{part}.{kind}"] = _named(f"{theirs}.{source}.{kind}")
        for name, third in (("query", _QUERY), ("key", _KEY), ("value", _VALUE)):
            recipes[f"{ours}.attention.{name}.weight"] = _third(f"{attention}.qkv_net.weight", third)
        recipes[f"{ours}.attention.out.weight"] = _named(f"{attention}.o_net.weight")
        recipes[f"{ours}.attention.distance.weight"] = _named(f"{attention}.r_net.weight")
        recipes[f"{ours}.attention.content_bias"] = _named(f"{biases}.r_w_bias".lstrip("."))
        recipes[f"{ours}.attention.distance_bias"] = _named(f"{biases}.r_r_bias".lstrip("."))
    return {name: recipes[name] for name in parameters_of(config)}


def _vocabulary_recipes(config: ModelFolderConfig) -> dict[str, Callable[[Get], Tensor]]:
    vocabulary = config.model.vocabulary
    if vocabulary.kind == "tied":
        return {
            "vocabulary.table.weight": _named("word_emb.emb_layers.0.weight"),
            "vocabulary.table.bias": _named("crit.out_layers.0.bias"),
        }
    recipes = {
        "vocabulary.clusters": _named("crit.cluster_weight"),
        "vocabulary.cluster_biases": _named("crit.cluster_bias"),
    }
    if vocabulary.projections == "both":
        recipes["vocabulary.bands.0.output_projection"] = _named("crit.out_projs.0")
    for i, band in enumerate(bands(config.model, config.vocab_size)):
        ours = f"vocabulary.bands.{i}"
        if vocabulary.projections == "none":  # one table, of which the bands are stretches
            tokens = slice(band.first, band.last)
            recipes[f"{ours}.table.weight"] = _rows("word_emb.emb_layers.0.weight", tokens)
            recipes[f"{ours}.table.bias"] = _rows("crit.out_layers.0.bias", tokens)
        else:
            recipes[f"{ours}.table.weight"] = _named(f"word_emb.emb_layers.{i}.weight")
            recipes[f"{ours}.table.bias"] = _named(f"crit.out_layers.{i}.bias")
            recipes[f"{ours}.projection"] = _named(f"word_emb.emb_projs.{i}")
    return recipes


def _named(name: str) -> Callable[[Get], Tensor]:
    return lambda get: get(name)


def _third(name: str, index: int) -> Callable[[Get], Tensor]:
    return lambda get: get(name).chunk(3)[index]


def _rows(name: str, rows: slice) -> Callable[[Get], Tensor]:
    return lambda get: get(name)[rows]
