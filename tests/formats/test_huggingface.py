"""A folder for transformers computes what the model does, and needs nothing of this project."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.formats import fairseq
from megatron_style.formats.huggingface import folder as huggingface
from megatron_style.formats.huggingface.modeling_shortformer import ShortformerForCausalLM
from tests.support.exported import (
    EOS,
    KINDS,
    PROMPT,
    TEXTS,
    VARIANTS,
    assert_close,
    byte_pairs,
    export,
    load,
    name_of,
    our_greedy,
    our_log_probs,
    padded,
    random_ids,
    words,
)
from tests.support.oracle import ORACLE, needs_oracle, recorded_tokens
from tests.support.tiny import (
    VOCAB_SIZE,
    L,
    tiny_config,
    tiny_dictionary,
)

ROOT = Path(__file__).resolve().parents[2]


# In a process that cannot import this project


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests/support/outsider.py` found in each folder, by its name."""
    place = tmp_path_factory.mktemp("outside")
    folders = [str(export(place / name_of(config), config, tiny_dictionary())) for config in VARIANTS]
    for tokenizer in (words(), byte_pairs()):
        config = tiny_config("tied").model_copy(update={"vocab_size": max(tokenizer.vocab_size, VOCAB_SIZE)})
        folders.append(str(export(place / tokenizer.kind, config, tokenizer)))
    task = {"folders": folders, "texts": TEXTS, "ids": random_ids(5 * L - 2), "prompt": [EOS, *PROMPT]}
    (place / "task.json").write_text(json.dumps(task | {"new_tokens": 4 * L + 1}))
    run_outside(place, ROOT / "tests" / "support" / "outsider.py", place / "task.json", place / "results.pt")
    found = torch.load(place / "results.pt", weights_only=True)
    return {Path(folder).name: results for folder, results in found.items()}


def run_outside(place: Path, *command: object) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "home")}
    done = subprocess.run(
        [sys.executable, "-I", *map(str, command)],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
def test_the_folder_alone_computes_the_same_distribution(outside: dict[str, Any], config: ModelFolderConfig) -> None:
    assert_close(outside[name_of(config)]["log_probs"], our_log_probs(config, random_ids(5 * L - 2)))


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
def test_the_folder_alone_writes_the_same_greedy_text(outside: dict[str, Any], config: ModelFolderConfig) -> None:
    """Through four turn-overs, and through line ends, which are no end of a text."""
    assert outside[name_of(config)]["written"] == our_greedy(config, PROMPT, 4 * L + 1)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [words(), byte_pairs()], ids=["words", "bpe"])
def test_the_folder_alone_has_the_same_tokenizer(outside: dict[str, Any], tokenizer: Tokenizer) -> None:
    found = outside[tokenizer.kind]
    assert found["is_fast"]
    assert found["encoded"] == [tokenizer.encode(text) for text in TEXTS]
    assert found["decoded"] == [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS]


def test_the_code_in_the_folder_imports_torch_and_transformers_only(tmp_path: Path) -> None:
    export(tmp_path / "hf", tiny_config())
    code = (tmp_path / "hf" / "modeling_shortformer.py").read_text()
    found = {line.split()[1].split(".")[0] for line in code.splitlines() if re.match(r"\s*(import|from) [\w.]+", line)}
    assert found - sys.stdlib_module_names == {"torch", "transformers"}


@needs_oracle
@pytest.mark.parametrize(("checkpoint", "record"), [("a_final", "a_nonoverlap"), ("c_final", "c_cached")])
def test_the_code_in_the_folder_scores_as_the_papers_own(tmp_path: Path, checkpoint: str, record: str) -> None:
    huggingface.write(tmp_path / "hf", fairseq.read(ORACLE / "ckpt" / f"{checkpoint}.pt"))
    model, past, nll = load(tmp_path / "hf"), None, []
    stream = torch.tensor([EOS, *recorded_tokens("valid")[:2000]])
    with torch.no_grad():
        for ids, wanted in zip(stream[:-1].split(500), stream[1:].split(500), strict=True):
            output = model(ids[None], past_key_values=past)
            past = output.past_key_values
            nll.append(-output.logits[0].gather(1, wanted[:, None])[:, 0])
    assert_close(torch.cat(nll), torch.from_numpy(np.load(ORACLE / "nll" / f"{record}.npz")["nll_f64"][:2000]))


# Generation


@pytest.mark.parametrize("cache_length", [0, 2, 6, 9])
@pytest.mark.parametrize("positions", ["infused", "added"])
def test_a_text_may_come_in_pieces_of_any_length(tmp_path: Path, positions: str, cache_length: int) -> None:
    config = tiny_config(positions=positions).model_copy(update={"cache_length": cache_length})
    model = load(export(tmp_path / "hf", config))
    ids, past, parts, pieces = torch.tensor([random_ids(34)]), None, [], [1, 1, 7, 3, 1, 13, 1, 1, 6]
    with torch.no_grad():
        for piece in ids.split(pieces, 1):
            output = model(piece, past_key_values=past)
            past = output.past_key_values
            parts.append(output.logits[0])
    assert_close(torch.cat(parts), our_log_probs(config, ids[0].tolist()))
    assert past.get_seq_length() == 34


def test_each_new_token_is_one_row_through_the_model(tmp_path: Path) -> None:
    model, shapes = load(export(tmp_path / "hf", tiny_config())), []
    for module in (model, model.blocks[0].up, model.blocks[1].attention.value):
        module.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append((args[0] if args else kwargs["input_ids"]).shape[:2]),
            with_kwargs=True,
        )
    model.generate(torch.tensor([[EOS, *PROMPT]]), max_new_tokens=4 * L, do_sample=False)
    assert shapes == [(1, 4)] * 3 + [(1, 1)] * 3 * (4 * L - 1)


def test_what_is_kept_does_not_grow_with_the_text(tmp_path: Path) -> None:
    model, past = load(export(tmp_path / "hf", tiny_config())), None
    for token in random_ids(5 * L):
        past = model(torch.tensor([[token]]), past_key_values=past).past_key_values
        assert {layer.own_keys_BSD.shape[1] for layer in past.kept} == {past.columns}
        assert past.columns <= 2 * L


@pytest.mark.parametrize("positions", ["infused", "added"])
def test_rows_of_a_batch_walk_on_their_own(tmp_path: Path, positions: str) -> None:
    """Padding before or behind a text changes nothing, whatever the other rows are."""
    config = tiny_config(positions=positions)
    model = load(export(tmp_path / "hf", config))
    rows = [random_ids(length, seed=length) for length in (4, 17, 31, 6, 12, 1)]
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits
        for found, is_text, row in zip(logits, mask.bool(), rows, strict=True):
            assert_close(found[is_text], our_log_probs(config, row))


@pytest.mark.parametrize("flags", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}], ids=str)
def test_a_padded_batch_writes_what_each_text_would_alone(tmp_path: Path, flags: dict[str, int]) -> None:
    model = load(export(tmp_path / "hf", tiny_config(), tiny_dictionary()))
    rows = [[EOS, *random_ids(length, seed=length)] for length in (3, 16, 0, 8)]
    ids, mask = padded(rows, "left")
    flags = {"max_new_tokens": 3 * L, "do_sample": False, **flags}
    together = model.generate(ids, attention_mask=mask, **flags)[:, ids.shape[1] :]
    for row, written in zip(rows, together, strict=True):
        alone, mask = padded([row], "left")
        assert torch.equal(model.generate(alone, attention_mask=mask, **flags)[0, len(row) :], written)


def test_beams_are_what_they_are_without_a_cache(tmp_path: Path) -> None:
    model = load(export(tmp_path / "hf", tiny_config()))
    prompts, flags = torch.tensor([[EOS, *PROMPT], random_ids(4)]), {"max_new_tokens": 3 * L, "num_beams": 4}
    best = model.generate(prompts, num_return_sequences=2, **flags)
    assert torch.equal(best, model.generate(prompts, num_return_sequences=2, use_cache=False, **flags))
    assert not torch.equal(best[::2], model.generate(prompts, max_new_tokens=3 * L, do_sample=False))


def test_sampling_follows_its_seed(tmp_path: Path) -> None:
    model, written = load(export(tmp_path / "hf", tiny_config())), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        written.append(model.generate(torch.tensor([[EOS]]), max_new_tokens=3 * L, do_sample=True).tolist())
    assert written[0] == written[1] != written[2]


def test_a_cache_that_generate_returns_can_be_continued(tmp_path: Path) -> None:
    model = load(export(tmp_path / "hf", tiny_config()))
    flags = {"do_sample": False, "max_new_tokens": 2 * L}
    first = model.generate(torch.tensor([[EOS, *PROMPT]]), return_dict_in_generate=True, **flags)
    whole = model.generate(first.sequences, past_key_values=first.past_key_values, **flags)
    assert whole[0, 4:].tolist() == our_greedy(tiny_config(), PROMPT, 4 * L)


def test_the_loss_is_the_mean_over_the_labels(tmp_path: Path) -> None:
    model, ids = load(export(tmp_path / "hf", tiny_config())), random_ids(3 * L)
    labels = [*ids[:-4], *[-100] * 4]
    log_probs = our_log_probs(tiny_config(), ids)[:-5].gather(1, torch.tensor(ids)[1:-4, None])
    loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
    assert_close(loss.detach(), -log_probs.mean())
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def right_padded(model: ShortformerForCausalLM) -> None:
    ids, mask = padded([random_ids(3), random_ids(5)], "right")
    model.generate(ids, attention_mask=mask, max_new_tokens=2)


def with_a_hole(model: ShortformerForCausalLM) -> None:
    model(torch.tensor([[2, 5, 9]]), attention_mask=torch.tensor([[1, 0, 1]]))


def with_a_foreign_cache(model: ShortformerForCausalLM) -> None:
    foreign = DynamicCache()
    foreign.update(torch.zeros(1, 4, 3, 4), torch.zeros(1, 4, 3, 4), 0)
    model(torch.tensor([[2]]), past_key_values=foreign)


REFUSALS: dict[str, tuple[Callable[[ShortformerForCausalLM], object], str]] = {
    "padding behind a text that goes on": (right_padded, "padding inside a text; pad on the left"),
    "padding inside a text": (with_a_hole, "padding inside a text; pad on the left"),
    "a cache of another model": (with_a_foreign_cache, "is a DynamicCache; it must be one that this model returned"),
    "hidden states": (lambda model: model(torch.tensor([[2]]), output_hidden_states=True), "returns logits only"),
    "drafts": (
        lambda model: model.generate(torch.tensor([[2, 5, 2, 5]]), prompt_lookup_num_tokens=2, max_new_tokens=9),
        "tokens cannot be removed from the cache",
    ),
    "a static cache": (
        lambda model: model.generate(torch.tensor([[2, 5]]), cache_implementation="static", max_new_tokens=2),
        "static caches",
    ),
}


@pytest.mark.parametrize(("attempt", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, attempt: Callable[[ShortformerForCausalLM], object], message: str
) -> None:
    model = load(export(tmp_path / "hf", tiny_config(), tiny_dictionary()))
    with pytest.raises(ValueError, match=message):
        attempt(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[VOCAB_SIZE], [-1]])
def test_an_id_outside_of_the_vocabulary_is_refused(tmp_path: Path, kind: str, ids: list[int]) -> None:
    with pytest.raises(IndexError):
        load(export(tmp_path / "hf", tiny_config(kind)))(torch.tensor([ids]))


# The language model evaluation harness


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="the harness (pip install lm-eval) is absent")
def test_the_evaluation_harness_finds_our_likelihoods(tmp_path: Path) -> None:
    """Whole texts as `evaluate` scores them, behind a line end, and continuations of a context."""
    config, dictionary = tiny_config(), tiny_dictionary()
    folder = export(tmp_path / "hf", config, dictionary)
    texts = ["w1 w2 w3\nw4 nonsense", "w5", " ".join(f"w{i}" for i in range(30)) + "\nw0"]
    pairs = [["w1 w2\nw3", " w4 w5"], ["w9", " w8"], ["w1 w2 w3 w4 w5 w6 w7\nw0", " w8 w9"]]
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"folder": str(folder), "texts": texts, "pairs": pairs}))
    run_outside(tmp_path, ROOT / "tests" / "support" / "harness.py", task, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    for text, likelihood in zip(texts, found["texts"], strict=True):
        assert math.isclose(likelihood, our_likelihood(config, [EOS], dictionary.encode(text)), rel_tol=1e-5)
    for (context, text), likelihood in zip(pairs, found["pairs"], strict=True):
        wanted = our_likelihood(config, dictionary.encode(context), dictionary.encode(text))
        assert math.isclose(likelihood, wanted, rel_tol=1e-5)


def our_likelihood(config: ModelFolderConfig, context: list[int], text: list[int]) -> float:
    log_probs = our_log_probs(config, [*context, *text])[len(context) - 1 : -1]
    return float(log_probs.gather(1, torch.tensor(text)[:, None]).sum())
