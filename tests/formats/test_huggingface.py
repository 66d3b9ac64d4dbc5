"""A folder for transformers computes what the model does, needs nothing of this project, and comes back unchanged."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.convert import main
from megatron_style.data.tokenizer import BpeTokenizer, Tokenizer, WordDictionary
from megatron_style.formats import fairseq, huggingface, modeling_shortformer
from megatron_style.formats.formats import open_model
from megatron_style.formats.huggingface_tokenizer import _SPACES
from megatron_style.formats.modeling_shortformer import ShortformerForCausalLM
from megatron_style.formats.source import ModelSource
from megatron_style.inference.sampling import Sampler, generate
from megatron_style.model.shortformer import Shortformer
from tests.support.oracle import ORACLE, needs_oracle, recorded_tokens
from tests.support.tiny import (
    VOCAB_SIZE,
    Done,
    L,
    content,
    expect_refusal,
    read_model,
    run_here,
    tiny_config,
    tiny_dictionary,
    tiny_model,
    weights_of,
    write_tiny_model,
)

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["adaptive", "tied", "untied"]
VARIANTS = [
    tiny_config(kind, positions=positions, cache=cache)
    for kind in KINDS
    for positions in ("infused", "added")
    for cache in (True, False)
]
EOS, PROMPT = 2, [5, 9, 30]
LINES = ["the cat sat on the mat", "the dog sat  on the log", "straße 猫 \t\x85 <unk> </s>"]
TEXTS = [
    "the cat\nsat",
    "",
    "\n",
    "\n\n the  dog \n",
    "straße 猫 nowhere\r\n\x85\x1c x<unk>y <unk>",
    "a </s>b\n\n\nthe",
]


def name_of(config: ModelFolderConfig) -> str:
    model = config.model
    return f"{model.vocabulary.kind}-{model.positions}-{'cached' if model.cache else 'alone'}"


def words() -> WordDictionary:
    return WordDictionary.build(Counter(word for line in LINES for word in line.split()))


def byte_pairs() -> BpeTokenizer:
    return BpeTokenizer.train(LINES * 20, vocab_size=300)


def source_of(config: ModelFolderConfig, tokenizer: Tokenizer | None = None) -> ModelSource:
    weights = weights_of(tiny_model(config, torch.float32))
    return ModelSource(Path("source"), config, weights.__getitem__, lambda: tokenizer)


def export(folder: Path, config: ModelFolderConfig, tokenizer: Tokenizer | None = None) -> Path:
    huggingface.write(folder, source_of(config, tokenizer))
    return folder


def load(folder: Path) -> ShortformerForCausalLM:
    return ShortformerForCausalLM.from_pretrained(folder, dtype=torch.float64)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def our_model(config: ModelFolderConfig) -> Shortformer:
    """As the export holds it: weights of float32, computed with in float64."""
    return tiny_model(config, torch.float32).double()


@torch.no_grad()
def our_log_probs(config: ModelFolderConfig, ids: list[int]) -> Tensor:
    model = our_model(config)
    cache, parts = model.empty_memory(1, config.cache_length), []
    for segment in torch.tensor([ids]).split(config.segment_length, 1):
        features, cache = model.features(segment, cache)
        parts.append(model.vocabulary.log_probs(features[0]))
    return torch.cat(parts)


def our_greedy(config: ModelFolderConfig, prompt: list[int], tokens: int) -> list[int]:
    lengths = {"segment_length": config.segment_length, "cache_length": config.cache_length}
    stream = generate(our_model(config), [prompt], Sampler(temperature=0), **lengths, eos=EOS, seed=1)
    return [token for (token,) in islice(stream, tokens)]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    ids, mask = torch.ones(2, len(rows), max(map(len, rows)), dtype=torch.long)
    for row, text in enumerate(rows):
        gap = ids.shape[1] - len(text)
        place = slice(gap, None) if side == "left" else slice(0, len(text))
        mask[row] = 0
        ids[row, place], mask[row, place] = torch.tensor(text), 1
    return ids, mask


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


@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
def test_the_folder_alone_computes_the_same_distribution(outside: dict[str, Any], config: ModelFolderConfig) -> None:
    assert_close(outside[name_of(config)]["log_probs"], our_log_probs(config, random_ids(5 * L - 2)))


@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
def test_the_folder_alone_writes_the_same_greedy_text(outside: dict[str, Any], config: ModelFolderConfig) -> None:
    """Through four turn-overs, and through line ends, which are no end of a text."""
    assert outside[name_of(config)]["written"] == our_greedy(config, PROMPT, 4 * L + 1)


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


# Tokenizers


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokenizer, Any]]:
    """Ours, and the library's of the same folder."""
    pairs = []
    for ours in (words(), byte_pairs()):
        config = tiny_config("tied").model_copy(update={"vocab_size": ours.vocab_size})
        folder = export(tmp_path_factory.mktemp("tokenizer") / "hf", config, ours)
        pairs.append((ours, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)))
    return pairs


any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
pieces = ["the", "cat", " ", "  ", "\n", "\r", "\x1c", "\x85", "\u3000", "<unk>", "<s>", "x", "猫"]


@settings(max_examples=200, deadline=None)
@given(any_text | st.lists(st.sampled_from(pieces), max_size=12).map("".join))
def test_any_text_has_our_ids_and_our_text_back(tokenizers: list[tuple[Tokenizer, Any]], text: str) -> None:
    """But for two literals, which have tests of their own."""
    assume("</s>" not in text and "<pad>" not in text)
    for ours, theirs in tokenizers:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == ours.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**20), max_size=20))
def test_any_ids_have_our_text(tokenizers: list[tuple[Tokenizer, Any]], numbers: list[int]) -> None:
    for ours, theirs in tokenizers:
        ids = [number % ours.vocab_size for number in numbers]
        assert theirs.decode(ids) == ours.decode(ids)


def test_named_tokens_are_the_models(tokenizers: list[tuple[Tokenizer, Any]]) -> None:
    for ours, theirs in tokenizers:
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (2, 2, 1)
        assert len(theirs) == ours.vocab_size
        assert theirs("the" + theirs.eos_token).input_ids == ours.encode("the\n")
        assert theirs(["the", "the cat\n"], padding=True).input_ids[0][:2] == [1, 1]


def test_a_literal_line_end_token_is_text(tokenizers: list[tuple[Tokenizer, Any]]) -> None:
    (our_words, their_words), (our_pairs, their_pairs) = tokenizers
    assert their_words("the </s> cat").input_ids == [our_words.encode("the")[0], 3, our_words.encode("cat")[0]]
    assert their_pairs("the </s> cat").input_ids == our_pairs.encode("the </s> cat")


def test_a_literal_padding_token_is_padding(tokenizers: list[tuple[Tokenizer, Any]]) -> None:
    """Among words if it stands alone, as to our own words; in byte pairs anywhere."""
    (our_words, their_words), (our_pairs, their_pairs) = tokenizers
    assert their_words("the <pad> x<pad>").input_ids == our_words.encode("the <pad> x<pad>") == [4, 1, 3]
    assert their_pairs("the<pad>").input_ids == [*our_pairs.encode("the"), 1]


def test_words_are_cut_where_python_cuts_them() -> None:
    spaces = {chr(code) for code in range(0x110000) if chr(code).isspace()} - {"\n"}
    assert {chr(code) for code in range(0x110000) if re.fullmatch(_SPACES, chr(code))} == spaces


# There and back


def command(*words: object) -> Done:
    return run_here(main, *words)


@pytest.mark.parametrize("tokenizer", [words(), byte_pairs(), None], ids=["words", "bpe", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, kind: str, tokenizer: Tokenizer | None) -> None:
    """Settings that are not the defaults, too."""
    size = max(VOCAB_SIZE, tokenizer.vocab_size if tokenizer else 0)
    dropout = {"hidden": 0.1, "attention": 0.2, "activation": 0.3, "softmax": 0.05}
    config = tiny_config(kind, positions="added", dropout=dropout)
    config = config.model_copy(update={"vocab_size": size, "eos": 3, "cache_length": 4, "step": 77})
    huggingface.write(tmp_path / "hf", source_of(config, tokenizer))
    assert command("export", tmp_path / "hf", "--output", tmp_path / "back").code == 0
    assert command("export-hf", tmp_path / "back", "--output", tmp_path / "again").code == 0
    model, found = read_model(tmp_path / "back")
    assert found == config
    for name, tensor in weights_of(tiny_model(config, torch.float32)).items():
        assert torch.equal(weights_of(model)[name], tensor), name
    (tmp_path / "again" / "certificate.json").unlink()
    assert content(tmp_path / "again") == content(tmp_path / "hf")
    assert not tokenizer or content_of(tokenizer, tmp_path / "ours") <= content(tmp_path / "back").items()


def content_of(tokenizer: Tokenizer, folder: Path) -> Any:
    folder.mkdir()
    tokenizer.save(folder)
    return content(folder).items()


@pytest.mark.parametrize("tokenizer", [words(), byte_pairs()], ids=["words", "bpe"])
def test_what_the_library_has_saved_again_is_read_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = tiny_config("untied").model_copy(update={"vocab_size": tokenizer.vocab_size})
    export(tmp_path / "hf", config, tokenizer)
    ShortformerForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=False).save_pretrained(tmp_path / "saved")
    source = open_model(tmp_path / "saved")
    found = source.tokenizer()
    assert source.config == config
    assert source.digest() == source_of(config).digest()
    assert found is not None
    assert (found.kind, found.vocab_size) == (tokenizer.kind, tokenizer.vocab_size)
    assert [found.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_the_optimizer_stays_behind(tmp_path: Path) -> None:
    training = {"training": {"optimizer": "nag", "learning_rate": 0.5}}
    config = ModelFolderConfig.parse(tiny_config().as_data() | training, source="test")
    huggingface.write(tmp_path / "hf", source_of(config))
    source = huggingface.read(tmp_path / "hf")
    assert (source.config, source.state) == (tiny_config(), None)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """While one is asked for, the one before may still be there, but no other."""
    weights, alive = weights_of(tiny_model(tiny_config(), torch.float32)), weakref.WeakSet[Tensor]()

    def weight(name: str) -> Tensor:
        assert len(alive) <= 1
        tensor = weights[name].clone()
        alive.add(tensor)
        return tensor

    huggingface.write(tmp_path / "hf", ModelSource(tmp_path, tiny_config(), weight, lambda: None))


# The certificate


def certificate(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return facts


@pytest.mark.parametrize("config", VARIANTS, ids=name_of)
def test_the_library_itself_certifies(tmp_path: Path, config: ModelFolderConfig) -> None:
    write_tiny_model(tmp_path / "model", config)
    for _ in range(2):  # the second one takes the place of the first
        assert command("export-hf", tmp_path / "model", "--output", tmp_path / "hf").code == 0
    found = certificate(tmp_path / "hf")
    assert (found["passed"], found["largest_weight_difference"]) == (True, 0)
    assert re.fullmatch(r"transformers \d+\.\d+\.\d+", found["computed_by"])


def test_long_segments_are_cut_alike_on_both_sides(tmp_path: Path) -> None:
    config = tiny_config().model_copy(update={"segment_length": 150, "cache_length": 140})
    write_tiny_model(tmp_path / "model", config)
    assert command("export-hf", tmp_path / "model", "--output", tmp_path / "hf").code == 0
    assert certificate(tmp_path / "hf")["tokens"] == 3 * 128
    assert huggingface.read(tmp_path / "hf").config == config


def test_code_that_computes_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = modeling_shortformer.sinusoids
    monkeypatch.setattr(modeling_shortformer, "sinusoids", lambda positions, size: shifted(positions + 1, size)[1:])
    write_tiny_model(tmp_path / "model")
    done = command("export-hf", tmp_path / "model", "--output", tmp_path / "hf")
    assert (done.code, "above the tolerance of 1e-09" in done.err) == (1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf.failed", "model"]


def test_without_the_library_the_certificate_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, modeling_shortformer.__name__)
    write_tiny_model(tmp_path / "model")
    assert command("export-hf", tmp_path / "model", "--output", tmp_path / "hf").code == 0
    assert "transformers cannot be imported" in certificate(tmp_path / "hf")["computed_by"]


# What it refuses


def settings_with(**changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))

    return damage


def holding(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 3000)


BAD_FOLDERS = {
    "a missing setting": (settings_with(positions=...), "config.json: lacks 'positions'"),
    "no line end": (settings_with(eos_token_id=...), "config.json: lacks 'eos_token_id'"),
    "another size": (settings_with(ffn_size=31), "up.weight is [32, 16], config.json wants [31, 16]"),
    "another vocabulary": (settings_with(vocabulary={"kind": "tied"}), "its tensors are not those of its config.json"),
    "too few tokens": (settings_with(vocab_size=15), "config.json: vocab_size is 15; it must be above"),
    "a word for a number": (settings_with(layers="two"), 'config.json: model.layers is "two"'),
    "half a file of settings": (holding("config.json", '{"model_type": "shortf'), "config.json: not valid JSON"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "half the weights": (truncated, "model.safetensors: not a complete safetensors file"),
}


@pytest.mark.parametrize(("damage", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS.keys())
def test_a_damaged_folder_is_named_in_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(export(tmp_path / "hf", tiny_config(), tiny_dictionary()))
    expect_refusal(command("export", tmp_path / "hf", "--output", tmp_path / "out"), tmp_path / "hf", message)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE"}}', '{"model": {}}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    export(tmp_path / "hf", tiny_config(), byte_pairs())
    holding("tokenizer.json", text)(tmp_path / "hf")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer file as `"):
        open_model(tmp_path / "hf").tokenizer()


def test_a_folder_of_another_model_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    settings_with(model_type="gpt2")(export(tmp_path / "hf", tiny_config()))
    assert not huggingface.recognises(tmp_path / "hf")
    assert not huggingface.recognises(tmp_path / "nowhere")


# The language model evaluation harness


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
