"""This project's tokenizers as fast tokenizers of the transformers library, and back.

In this project a line end is </s>, id 2. In the library the same token is named "\\n", so that text keeps its lines in
both directions, and a literal `</s>` in a text cannot forge a line end. It is plain text: characters for a byte-pair
tokenizer, an unknown word for a word tokenizer. (Our own word tokenizer reads it as a line end, as fairseq does.) A
literal `<pad>` is padding for a byte-pair tokenizer, as all named tokens are in that library; `<s>` and `<unk>` are not
named there, and remain text.

The library leaves every named token out in `decode(skip_special_tokens=True)`, which its pipelines use, and would glue
lines together. So the line end is not named as bos or eos token, although the model was trained to begin a text after
one: `bos_token_id` and `eos_token_id` of the model's own config have its id. No token is added before or after a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json
from megatron_style.data.pretrained import SETTINGS_FILE, PretrainedTokenizer
from megatron_style.data.tokenizer import (
    BPE_FILE,
    DICTIONARY_FILE,
    EOS,
    PAD,
    PRETRAINED_FILE,
    SPECIALS,
    UNK,
    BpeTokenizer,
    Tokenizer,
)
from megatron_style.data.word_dictionary import WordDictionary

LINE_END = "\n"
# The characters at which str.split splits, except line ends; \s of the library's regular expressions lacks some.
_SPACES = r"[\t\u000b\u000c\r\u001c-\u001f \u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+"


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the library's tokenizer, and the file from which ours is read back; for byte pairs the two are one."""
    tokenizer.save(folder)
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer.export(folder)
        return
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[PAD],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if tokenizer.kind == "words":
        # Named tokens are words like any other, so that `x<unk>` is one unknown word.
        settings |= {"unk_token": SPECIALS[UNK], "split_special_tokens": True}
        text = _word_level(tokenizer).to_str()
    else:
        text = _their_byte_pairs((folder / BPE_FILE).read_text(encoding="utf-8"))
    (folder / BPE_FILE).write_text(text + "\n", encoding="utf-8", newline="\n")
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(folder: Path) -> Tokenizer | None:
    if (folder / PRETRAINED_FILE).is_file():
        return PretrainedTokenizer.load(folder / PRETRAINED_FILE)
    if (folder / DICTIONARY_FILE).is_file():
        return WordDictionary.load(folder / DICTIONARY_FILE)
    path = folder / BPE_FILE
    if not path.is_file():
        return None
    try:
        model = parse_json(path.read_text(encoding="utf-8"))["model"]
        if model["type"] == "WordLevel":  # the library does not save the dictionary, which has the counts
            words = sorted(model["vocab"], key=model["vocab"].__getitem__)
            return WordDictionary(dict.fromkeys(words[len(SPECIALS) :], 0))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not a tokenizer file as `convert export-hf` writes it ({error!r})") from None
    return BpeTokenizer.load(path, convert=_our_byte_pairs)


def _word_level(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    vocabulary = {tokenizer.decode([index]): index for index in range(tokenizer.vocab_size)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=SPECIALS[UNK]))
    lines = pre_tokenizers.Split(LINE_END, "isolated")
    spaces = pre_tokenizers.Split(Regex(_SPACES), "removed")
    words.pre_tokenizer = pre_tokenizers.Sequence([lines, spaces])
    spaced = decoders.WordPiece(prefix=2 * LINE_END, cleanup=False)  # no word has that prefix, so all get a space
    joined = decoders.Replace(Regex(f" ?{LINE_END} ?"), LINE_END)
    words.decoder = decoders.Sequence([spaced, decoders.Fuse(), joined])
    return words


def _their_byte_pairs(text: str) -> str:
    """Make the line end a token that is found in the text; among the others, only padding is named."""
    return _renamed(text, LINE_END, [(PAD, SPECIALS[PAD]), (EOS, LINE_END)])


def _our_byte_pairs(text: str) -> str:
    return _renamed(text, SPECIALS[EOS], list(enumerate(SPECIALS)))


def _renamed(text: str, line_end: str, specials: list[tuple[int, str]]) -> str:
    content = parse_json(text)
    vocabulary = {line_end if index == EOS else token: index for token, index in content["model"]["vocab"].items()}
    others = [token for token in content["added_tokens"] if token["content"] not in (*SPECIALS, LINE_END)]
    added = [_added(index, name) for index, name in specials]
    return json.dumps(content | {"added_tokens": added + others, "model": content["model"] | {"vocab": vocabulary}})


def _added(index: int, name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": name, **flags, "special": name != LINE_END}
