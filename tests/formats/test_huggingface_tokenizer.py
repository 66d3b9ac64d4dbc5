"""The tokenizer of a folder for transformers encodes and decodes as ours does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron_style.data.tokenizer import Tokenizer
from megatron_style.formats.huggingface.tokenizer import _SPACES
from tests.support.exported import (
    byte_pairs,
    export,
    words,
)
from tests.support.tiny import (
    tiny_config,
)


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


@settings(max_examples=200)
@given(any_text | st.lists(st.sampled_from(pieces), max_size=12).map("".join))
def test_any_text_has_our_ids_and_our_text_back(tokenizers: list[tuple[Tokenizer, Any]], text: str) -> None:
    """But for two literals, which have tests of their own."""
    assume("</s>" not in text and "<pad>" not in text)
    for ours, theirs in tokenizers:
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == ours.decode(ids)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2**20), max_size=20))
def test_any_ids_have_our_text(tokenizers: list[tuple[Tokenizer, Any]], numbers: list[int]) -> None:
    for ours, theirs in tokenizers:
        ids = [number % ours.vocab_size for number in numbers]
        assert theirs.decode(ids) == ours.decode(ids)


def test_named_tokens_are_the_models(tokenizers: list[tuple[Tokenizer, Any]]) -> None:
    for ours, theirs in tokenizers:
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (None, None, 1)
        assert len(theirs) == ours.vocab_size
        assert theirs(["the", "the cat\n"], padding=True).input_ids[0][:2] == [1, 1]


def test_pipelines_keep_the_line_ends(tokenizers: list[tuple[Tokenizer, Any]]) -> None:
    """They decode without special tokens, and the line end must not be one."""
    for ours, theirs in tokenizers:
        text = "the cat\nthe\n\ncat"
        assert theirs.decode(ours.encode(text), skip_special_tokens=True) == text


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
