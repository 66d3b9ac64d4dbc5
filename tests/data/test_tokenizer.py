from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_style.base.errors import UserError
from megatron_style.data.tokenizer import SPECIALS, BpeTokenizer, Tokenizer, load_tokenizer
from megatron_style.data.word_dictionary import WordDictionary
from tests.support.oracle import ORACLE, needs_oracle

words_of_text = st.text(st.characters(exclude_categories=("Z", "C")), min_size=1, max_size=6).filter(
    lambda word: word not in SPECIALS
)
one_line = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=60)


def words_in_order(dictionary: Tokenizer) -> list[str]:
    return [dictionary.decode([i]) for i in range(4, dictionary.vocab_size)]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    lines = ["the cat sat on the mat", "the dog sat on the log", "straße 猫 \t\x85"] * 20
    tokenizer = BpeTokenizer.train(iter(lines), vocab_size=300)
    counts = np.bincount([i for line in lines for i in tokenizer.encode_line(line)], minlength=tokenizer.vocab_size)
    return tokenizer.sorted_by(counts)


def test_words_are_sorted_by_count_then_code_point() -> None:
    dictionary = WordDictionary.build(Counter({"b": 2, "a": 2, "Z": 2, "é": 2, "often": 9}))
    assert words_in_order(dictionary)[:5] == ["often", "Z", "a", "b", "é"]


def test_threshold_cuts_rarer_words_only() -> None:
    dictionary = WordDictionary.build(Counter({"three": 3, "two": 2, "one": 1}), threshold=2)
    assert dictionary.encode_line("one two three") == [3, 5, 4, 2]


def test_a_threshold_above_every_count_is_refused() -> None:
    with pytest.raises(UserError, match="--threshold 5 leaves no words: the most frequent one occurs 3 times"):
        WordDictionary.build(Counter({"three": 3}), threshold=5)


@given(st.dictionaries(words_of_text, st.integers(1, 9), min_size=1, max_size=40), st.integers(5, 30))
def test_vocabulary_is_capped_then_padded_to_a_multiple_of_eight(counts: dict[str, int], cap: int) -> None:
    dictionary = WordDictionary.build(counts, vocab_size=cap)
    assert dictionary.vocab_size % 8 == 0
    assert dictionary.vocab_size < min(cap, len(counts) + 4) + 8


def test_padding_words_are_numbered_and_never_occur(tmp_path: Path) -> None:
    WordDictionary.build(Counter({"a": 1, "madeupword0001": 1})).save(tmp_path)
    assert (tmp_path / "dict.txt").read_text() == "a 1\nmadeupword0001 1\nmadeupword0000 0\nmadeupword0002 0\n"


def test_specials_in_the_text_are_specials_and_not_words() -> None:
    dictionary = WordDictionary.build(Counter(["<unk>", "<unk>", "<pad>", "a"]))
    assert dictionary.encode_line("<unk> a <pad> new") == [3, 4, 1, 3, 2]
    assert "<unk>" not in words_in_order(dictionary)


def test_white_space_is_one_separator_and_a_blank_line_is_one_token() -> None:
    dictionary = WordDictionary.build(Counter("ab"))
    assert dictionary.encode_line("\ta \u2003 b\x85") == [4, 5, 2]
    assert dictionary.encode_line(" ") == [2]


@given(st.lists(st.lists(words_of_text, max_size=5), min_size=1, max_size=5))
def test_decoding_known_words_gives_the_lines_back(lines: list[list[str]]) -> None:
    dictionary = WordDictionary.build(Counter(word for line in lines for word in line) + Counter(["always"]))
    text = "".join(" ".join(line) + "\n" for line in lines)
    ids = [i for line in text.splitlines() for i in dictionary.encode_line(line)]
    assert dictionary.decode(ids) == text


def test_a_prompt_has_no_closing_line_end() -> None:
    dictionary = WordDictionary.build(Counter("ab"))
    assert dictionary.encode("a\nb") == [4, 2, 5]
    assert dictionary.encode("a\n") == [4, 2]
    assert dictionary.encode("") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 3\nb\n", r"dict.txt:2: holds 'b'; expected `word count`"),
        (b"a 3\n\nb 1\n", r"dict.txt:2: holds ''"),
        (b"a x\n", r"dict.txt:1"),
        (b"a -1\n", r"dict.txt:1"),
        (b"a 3\nb 2\na 1\n", r"dict.txt:3: `a` occurs twice"),
        (b"<unk> 3\n", r"dict.txt:1: `<unk>` is one of the four specials"),
        (b"a 3\n\xff 2\n", r"dict.txt: byte 4 is not UTF-8"),
        (b"", r"dict.txt:1"),
    ],
)
def test_a_damaged_dictionary_is_refused_by_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_dictionary_lines_are_split_from_the_right(tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text("new york 3\n12 2\n")
    assert words_in_order(load_tokenizer(tmp_path)) == ["new york", "12"]


def test_a_folder_must_hold_exactly_one_tokenizer(tmp_path: Path, bpe: BpeTokenizer) -> None:
    with pytest.raises(UserError, match="no tokenizer here"):
        load_tokenizer(tmp_path)
    bpe.save(tmp_path)
    WordDictionary.build(Counter("a")).save(tmp_path)
    with pytest.raises(UserError, match="holds both"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path / "dict.txt").kind == "words"


@needs_oracle
def test_the_reference_dictionary_loads_and_is_written_back_unchanged(tmp_path: Path) -> None:
    dictionary = load_tokenizer(ORACLE / "data")
    assert dictionary.vocab_size == 9848
    dictionary.save(tmp_path)
    assert (tmp_path / "dict.txt").read_bytes() == (ORACLE / "data" / "dict.txt").read_bytes()


@settings(max_examples=50)
@given(st.lists(one_line, min_size=1, max_size=4))
def test_byte_pairs_give_any_text_back(bpe: BpeTokenizer, lines: list[str]) -> None:
    ids = [i for line in lines for i in bpe.encode_line(line)]
    assert bpe.decode(ids) == "".join(line + "\n" for line in lines)


def test_byte_pairs_are_numbered_by_falling_frequency(bpe: BpeTokenizer) -> None:
    text = ["the cat sat on the mat", "the dog sat on the log", "straße 猫 \t\x85"]
    counts = np.bincount([i for line in text for i in bpe.encode_line(line)], minlength=bpe.vocab_size)
    assert (np.diff(counts[4:]) <= 0).all()
    assert bpe.vocab_size % 8 == 0


def test_text_cannot_forge_a_special_byte_pair(bpe: BpeTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    for tokenizer in (bpe, load_tokenizer(tmp_path)):
        ids = tokenizer.encode("a </s> <unk>")
        assert min(ids) >= 4
        assert tokenizer.decode(ids) == "a </s> <unk>"


def test_saved_byte_pairs_load_to_the_same_ids(bpe: BpeTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, loaded.eos, loaded.vocab_size) == ("bpe", 2, bpe.vocab_size)
    assert loaded.encode_line("the cat 猫") == bpe.encode_line("the cat 猫")


@pytest.mark.parametrize("content", ["{}", "not json", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_damaged_byte_pair_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer file"):
        load_tokenizer(tmp_path)


def test_byte_pairs_without_our_specials_are_refused(tmp_path: Path, bpe: BpeTokenizer) -> None:
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<pad>", "<other>"))
    with pytest.raises(UserError, match="id 1 is '<other>'; it must be '<pad>'"):
        load_tokenizer(path)


def test_a_digest_distinguishes_tokenizers_by_their_ids() -> None:
    words = WordDictionary({"a": 3, "b": 2})
    assert words.digest == WordDictionary({"a": 30, "b": 20}).digest  # counts do not matter
    assert words.digest != WordDictionary({"b": 3, "a": 2}).digest
    merges = BpeTokenizer.train(["low lower lowest"] * 5, vocab_size=270)
    assert merges.digest not in (words.digest, BpeTokenizer.train(["high higher"] * 5, vocab_size=270).digest)
