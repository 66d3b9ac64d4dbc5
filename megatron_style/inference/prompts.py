"""The texts that a model continues: from flags, files or typed lines, and whether its tokenizer knows them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from megatron_style.base.command import log, say
from megatron_style.base.errors import UserError
from megatron_style.data.text import check_text_file, read_lines
from megatron_style.data.tokenizer import SPECIALS, TOKENIZER_FILES, UNK, Tokenizer

_HELP = "An empty line continues further; /reset forgets the text so far, /help shows this, /quit or Ctrl-D leaves."


def read_prompts(texts: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts of the command line, and those of a file with one on each line."""
    prompts = [("standard input", _all_of_stdin()) if text == "-" else ("--prompt", text) for text in texts]
    if file:
        check_text_file(file)
        lines = read_lines(file)
        prompts += [(f"{file}:{number}", line) for number, line in enumerate(lines, 1)]
    if not prompts:
        raise UserError("there is nothing to continue; give --prompt TEXT, --prompts FILE or --interactive")
    for where, text in prompts:
        if not text.strip():
            raise UserError(f"{where} is empty; give it at least one word")
        check_text(text, where)
    return [text for _, text in prompts]


def _all_of_stdin() -> str:
    try:
        return _stdin().read().removesuffix("\n")
    except UnicodeDecodeError:
        raise UserError("standard input: is not UTF-8 text") from None


def _stdin() -> TextIO:
    if sys.stdin is None:
        raise UserError("standard input: is closed; give --prompt TEXT or --prompts FILE")
    return sys.stdin


def check_tokenizer(tokenizer: Tokenizer | None, vocab_size: int, where: Path) -> Tokenizer:
    """Return the tokenizer of the model at `where`, or refuse one that is missing or another model's."""
    if tokenizer is None:
        raise UserError(f"{where}: has no tokenizer ({' or '.join(TOKENIZER_FILES)}), so there is no text to generate")
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"{where}: its tokenizer makes {tokenizer.vocab_size} ids, but the model knows "
            f"{vocab_size}; the tokenizer it was trained with is needed"
        )
    return tokenizer


def check_text(text: str, where: str) -> None:
    """Refuse undecodable bytes, which Python passes on as surrogates from a shell or a pipe."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: is not UTF-8 text") from None


def note_unknown_words(prompts: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse a prompt of which the model knows no word; other unknown words are only logged."""
    unknown: dict[str, None] = {}  # a set that keeps the order
    for prompt in prompts if tokenizer.kind == "words" else ():
        words = dict.fromkeys(prompt.split())
        strange = [word for word in words if tokenizer.encode(word) == [UNK] and word != SPECIALS[UNK]]
        if strange and len(strange) == len(words):
            raise UserError(
                f"prompt {prompt[:60]!r}: the model's dictionary has none of its words; use words it was trained on"
            )
        unknown |= dict.fromkeys(strange)
    if unknown:
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        log(f"note: not in the model's dictionary, so read as {SPECIALS[UNK]}: {', '.join(list(unknown)[:10])}{more}")


def typed_lines() -> Iterator[str]:
    """Yield typed lines until Ctrl-D or /quit, and answer /help. On a terminal there is a greeting, and Ctrl-C starts
    the line again."""
    terminal = _stdin().isatty()
    if terminal:
        log(f"The model continues each line that you type. {_HELP}")
        with suppress(ImportError):
            import readline  # noqa: F401  gives input() line editing and a history
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            say("\n" if terminal else "")
            return
        except UnicodeDecodeError:
            raise UserError("standard input: is not UTF-8 text") from None
        except KeyboardInterrupt:
            if not terminal:
                raise
            say("\n")
            continue
        check_text(line, "standard input")
        if line.strip() == "/quit":
            return
        if line.strip() == "/help":
            log(_HELP)
        else:
            yield line
