"""Folders in the layout of transformers' TransfoXL: imported, evaluated, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_style.convert import main as convert
from megatron_style.data.store import TokenStoreWriter
from megatron_style.evaluate import main as evaluate
from megatron_style.formats import transformer_xl
from tests.support.mutations import Payload
from tests.support.oracle import oracle_is_here
from tests.support.tiny import expect_refusal, run_here
from tests.support.transformer_xl import recorded, write_folder

pytestmark = oracle_is_here
IDS = "transformer_xl_tokens"


def store_of_row(folder: Path, row: int = 0) -> tuple[Path, int]:
    """Write a recorded row as a token store. Return it and the token that comes before it."""
    first, *tokens = recorded(IDS)["ids"][row].tolist()
    with TokenStoreWriter(folder / "row", vocab_size=200) as writer:
        writer.append(np.array(tokens), np.array([len(tokens)]))
    return folder / "row", first


@pytest.mark.parametrize("kind", ["plain", "div4", "plain_prenorm"])
@pytest.mark.parametrize("mode", ["cached", "token-by-token"])
def test_evaluate_gives_the_authors_losses(tmp_path: Path, kind: str, mode: str) -> None:
    data, first = store_of_row(tmp_path)
    folder = write_folder(tmp_path / "theirs", kind, eos_token_id=first)
    flags = ["--cache-length", 20, "--same-length", "--clamp-distance", 15, "--dtype", "float64"]
    done = run_here(evaluate, folder, "--data", data, "--mode", mode, *flags, "--nll", tmp_path / "nll.npz", "--json")
    assert done.code == 0, done
    facts = json.loads(done.out)
    assert (facts["context_min"], facts["context_max"], facts["clamp_distance"]) == (20, 20, 15)
    expected = recorded(f"transformer_xl_{kind}_nll")["nll_mem20_same_clamp15"][0]
    np.testing.assert_allclose(np.load(tmp_path / "nll.npz")["nll"], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("kind", ["plain", "div4"])
def test_an_imported_folder_is_the_same_model(tmp_path: Path, kind: str, pickled: bool) -> None:
    folder = write_folder(tmp_path / "theirs", kind, pickled=pickled, same_length=True, clamp_len=15)
    done = run_here(convert, "import-transformer-xl", folder, "--output", tmp_path / "ours", "--json")
    assert done.code == 0, done
    assert json.loads(done.out)["evaluate_with"] == "--same-length --clamp-distance 15"
    settings = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert settings["model"]["positions"] == "relative"
    assert (settings["segment_length"], settings["cache_length"], settings["eos"]) == (12, 12, 0)
    assert run_here(convert, "verify", folder, tmp_path / "ours", "--tolerance", 1e-12).code == 0
    for name, tensor in load_file(tmp_path / "ours" / "model.safetensors").items():
        torch.testing.assert_close(tensor, transformer_xl.read(folder).weight(name), atol=0, rtol=0)


def test_a_table_that_is_cut_and_biases_of_each_layer(tmp_path: Path) -> None:
    """As in the authors' base model: one table of full width, cut by cutoffs; and as in their large one: untie_r."""
    folder = write_folder(tmp_path / "theirs", "plain", cutoffs=[40, 120], untie_r=True)
    tensors = load_file(folder / "model.safetensors")
    u = tensors.pop("transformer.r_w_bias")
    v = tensors.pop("transformer.r_r_bias")
    for layer in range(3):
        tensors[f"transformer.layers.{layer}.dec_attn.r_w_bias"] = u + layer
        tensors[f"transformer.layers.{layer}.dec_attn.r_r_bias"] = v - layer
    tensors["crit.cluster_weight"] = torch.randn(2, 32).double()
    tensors["crit.cluster_bias"] = torch.randn(2).double()
    save_file(tensors, folder / "model.safetensors")
    source = transformer_xl.read(folder)
    assert source.config.model.vocabulary.projections == "none"
    table = tensors["transformer.word_emb.emb_layers.0.weight"]
    torch.testing.assert_close(source.weight("vocabulary.bands.1.table.weight"), table[40:120], atol=0, rtol=0)
    torch.testing.assert_close(source.weight("blocks.2.attention.content_bias"), u + 2, atol=0, rtol=0)
    torch.testing.assert_close(source.weight("blocks.1.attention.distance_bias"), v - 1, atol=0, rtol=0)
    ids = torch.from_numpy(recorded(IDS)["ids"])
    model = source.load(torch.float64)
    x = model.features(ids[:, :12], model.empty_memory(3, 12)).x
    log_probs = model.vocabulary.log_probs(x.flatten(0, 1))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(36).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(log_probs, cut_log_probs(x.flatten(0, 1), tensors), atol=1e-9, rtol=0)


def cut_log_probs(x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Compute the adaptive softmax of a table that is cut at 40 and 120."""
    table = tensors["transformer.word_emb.emb_layers.0.weight"]
    logits = x @ table.T + tensors["crit.out_layers.0.bias"]
    clusters = x @ tensors["crit.cluster_weight"].T + tensors["crit.cluster_bias"]
    head = torch.cat([logits[:, :40], clusters], 1).log_softmax(1)
    middle = head[:, 40:41] + logits[:, 40:120].log_softmax(1)
    return torch.cat([head[:, :40], middle, head[:, 41:42] + logits[:, 120:].log_softmax(1)], 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type is not transfo-xl"),
        ({"attn_type": 2}, "attn_type is 2; only 0 can be read"),
        ({"ext_len": 4}, "ext_len is 4; only 0 can be read"),
        ({"d_head": 7}, "n_head x d_head and d_embed must be d_model (32)"),
        ({"d_embed": 16}, "n_head x d_head and d_embed must be d_model (32)"),
        ({"n_layer": 4}, "lacks 'layers.3.dec_attn"),
        ({"d_inner": 65}, "not [65, 32]"),
        ({"vocab_size": 199}, "not [199, 32]"),
        ({"untie_r": True}, "lacks 'layers.0.dec_attn.r_w_bias'"),
        ({"mem_len": "12"}, "has a setting of the wrong type"),
        ({"cutoffs": [300]}, "cutoffs"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder = write_folder(tmp_path / "theirs", "plain", **change)
    done = run_here(convert, "import-transformer-xl", folder, "--output", tmp_path / "ours")
    expect_refusal(done, reason)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("key", ["n_layer", "tgt_len", "mem_len", "untie_r", "pre_lnorm", "cutoffs"])
def test_a_missing_setting_is_named(tmp_path: Path, key: str) -> None:
    folder = write_folder(tmp_path / "theirs", "plain")
    settings = json.loads((folder / "config.json").read_text())
    del settings[key]
    (folder / "config.json").write_text(json.dumps(settings))
    expect_refusal(run_here(convert, "import-transformer-xl", folder, "--output", tmp_path / "ours"), f"lacks '{key}'")


def test_an_untied_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", "div4")
    tensors = load_file(folder / "model.safetensors")
    tensors["crit.out_projs.1"] = tensors["transformer.word_emb.emb_projs.1"] + 1
    save_file(tensors, folder / "model.safetensors")
    done = run_here(convert, "import-transformer-xl", folder, "--output", tmp_path / "ours")
    expect_refusal(done, "'crit.out_projs.1' differs from 'word_emb.emb_projs.1'; only tied vocabularies can be read")


def test_a_pickle_that_would_run_something_is_not_loaded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "theirs", "plain", pickled=True)
    torch.save({"transformer.r_w_bias": Payload(tmp_path / "ran", "system")}, folder / "pytorch_model.bin")
    done = run_here(convert, "import-transformer-xl", folder, "--output", tmp_path / "ours")
    expect_refusal(done, "is not a complete file of tensors only, so it was not loaded")
    assert not (tmp_path / "ran").exists()


def test_other_models_have_no_reach(tmp_path: Path) -> None:
    data, first = store_of_row(tmp_path)
    folder = write_folder(tmp_path / "theirs", "plain", eos_token_id=first)
    walk = [folder, "--data", data, "--mode"]
    refused = run_here(evaluate, *walk, "nonoverlapping", "--same-length")
    expect_refusal(refused, "--same-length needs --mode cached or token-by-token, not nonoverlapping")
