"""Text from a model: of one prompt or many, drawn or searched for, or line by line. docs/generation.md is the guide.

python -m megatron_style.generate runs/quickstart/model --prompt "The state of the Union" --tokens 100
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event
from types import FrameType

from megatron_style.base.command import add_json_flag, command_parser, log, run_command, say, show
from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.text import Chunk, check_text_file, read_lines
from megatron_style.data.tokenizer import SPECIALS, UNK, Tokenizer
from megatron_style.formats.formats import open_model
from megatron_style.formats.source import ModelSource
from megatron_style.hosts.launcher import accelerator
from megatron_style.inference.beams import beam_search
from megatron_style.inference.sampling import (
    CHARACTER,
    Continuation,
    Sampler,
    Walk,
    generate,
    generator_of,
    open_walk,
    write_on,
)
from megatron_style.model.shortformer import Shortformer


def main() -> None:
    args = parse_args()
    check_choice(args)
    prompts = read_prompts(args)
    source = open_model(args.model)
    tokenizer = find_tokenizer(source)
    note_unknown_words(prompts, tokenizer)
    writer = Writer(args, source.config, tokenizer, source.load().to(accelerator()))
    if args.interactive:
        writer.converse()
        return
    with ctrl_c() as asked:
        texts = writer.search(prompts, asked) if args.beams else writer.sample(prompts, asked)
    deliver(args, prompts, texts)
    if asked.is_set():
        raise KeyboardInterrupt


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "generate",
        "Text from a model.",
        'python -m megatron_style.generate runs/quickstart/model --prompt "The state of the Union" --tokens 100',
    )
    add = parser.add_argument
    add("model", type=Path, help="a model folder, a run, or one of its checkpoints")
    add("--prompt", action="append", default=[], metavar="TEXT", help="the text to continue; may be repeated")
    add("--prompts", type=Path, metavar="FILE", help="a prompt on each line")
    add("--interactive", action="store_true", help="continue what is typed, line by line; /reset forgets")
    add("--tokens", type=int, default=100, metavar="N", help="how many to write at most (100)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--stop-at-line-end", action="store_true", help="end with the line")
    add("--temperature", type=float, metavar="T", help="0 is greedy, 1 the model's own distribution (1)")
    add("--top-k", type=int, metavar="K", help="choose among the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="choose among the most likely tokens of total mass P")
    add("--beams", type=int, metavar="N", help="search for the likeliest text along N texts instead of drawing one")
    add("--seed", type=int, default=1, metavar="N")
    add("--batch-rows", type=int, default=16, metavar="N", help="how many prompts are continued at once (16)")
    add_json_flag(parser)
    return parser.parse_args()


def check_choice(args: argparse.Namespace) -> None:
    for flag in ("tokens", "top_k", "beams", "batch_rows"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1")
    if args.temperature is not None and not 0 <= args.temperature < math.inf:
        raise UserError(f"--temperature is {args.temperature}; it must be 0 (greedy) or more")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top-p is {args.top_p}; it must be above 0 and at most 1")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed is {args.seed}; it must be at least 0 and below 2^63")
    if "" in args.stop:
        raise UserError("--stop is empty; give it the text to end before")
    for flag in ("temperature", "top_k", "top_p"):
        if args.beams and getattr(args, flag) is not None:
            raise UserError(f"--beams {args.beams} searches and draws nothing; leave out --{flag.replace('_', '-')}")


def read_prompts(args: argparse.Namespace) -> list[str]:
    if args.interactive:
        for flag in ("prompt", "prompts", "json", "beams"):
            if getattr(args, flag):
                raise UserError(f"--interactive reads lines and writes as it goes; leave out --{flag}")
        return []
    prompts = [("--prompt", text) for text in args.prompt]
    if args.prompts:
        check_text_file(args.prompts)
        lines = read_lines(Chunk(args.prompts, 0, args.prompts.stat().st_size))
        prompts += [(f"{args.prompts}:{number}", line) for number, line in enumerate(lines, 1)]
    if not prompts:
        raise UserError("there is nothing to continue; give --prompt TEXT, --prompts FILE or --interactive")
    for where, text in prompts:
        if not text.strip():
            raise UserError(f"{where} is empty; give it at least one word")
        check_text(text, where)
    return [text for _, text in prompts]


def check_text(text: str, where: str) -> None:
    """Python lets bytes that are no text through, in disguise, when they come from a shell or a pipe."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: is not UTF-8 text") from None


def find_tokenizer(source: ModelSource) -> Tokenizer:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{source.path}: has no tokenizer (dict.txt or tokenizer.json), so there is no text to generate"
        )
    if tokenizer.vocab_size != source.config.vocab_size:
        raise UserError(
            f"{source.path}: its tokenizer makes {tokenizer.vocab_size} ids, but the model knows "
            f"{source.config.vocab_size}; the tokenizer it was trained with is needed"
        )
    return tokenizer


def note_unknown_words(prompts: Iterable[str], tokenizer: Tokenizer) -> None:
    """A prompt that the model can read nothing of is refused; some strange words are only told."""
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


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Ctrl-C is noted, to be looked at between two tokens: in the middle of one, a walk would be left half done.
    Pressed again, it interrupts at once."""
    asked = Event()

    def note(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            signal.default_int_handler(number, frame)
        asked.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Writer:
    args: argparse.Namespace
    config: ModelFolderConfig
    tokenizer: Tokenizer
    model: Shortformer

    @property
    def sampler(self) -> Sampler:
        temperature = 1.0 if self.args.temperature is None else self.args.temperature
        return Sampler(temperature, self.args.top_k, self.args.top_p)

    def sample(self, prompts: Sequence[str], asked: Event) -> list[Continuation]:
        """Batch after batch; each prompt's text is its own, whatever batch it is in."""
        texts: list[Continuation] = []
        for first in range(0, len(prompts), self.args.batch_rows):
            batch = prompts[first : first + self.args.batch_rows]
            stream = generate(
                self.model,
                [self.tokenizer.encode(prompt) for prompt in batch],
                self.sampler,
                segment_length=self.config.segment_length,
                cache_length=self.config.cache_length,
                eos=self.config.eos,
                seed=self.args.seed,
                first=first,
            )
            texts += self._follow(stream, len(batch), asked, alone=len(prompts) == 1)
            if asked.is_set():
                break
        return texts

    def search(self, prompts: Sequence[str], asked: Event) -> list[Continuation]:
        """Prompt after prompt: its beams are the batch."""
        texts: list[Continuation] = []
        for prompt in prompts:
            progress = beam_search(
                self.model,
                self.tokenizer.encode(prompt),
                beams=self.args.beams,
                tokens=self.args.tokens,
                segment_length=self.config.segment_length,
                cache_length=self.config.cache_length,
                eos=self.config.eos,
                ended=self._has_ended,
            )
            for best in progress:
                found = best.tokens
                if asked.is_set():
                    break
            texts += self._follow(([token] for token in found), 1, Event(), alone=len(prompts) == 1)
            if asked.is_set():
                break
        return texts

    def converse(self) -> None:
        """Each line typed is a new line of one text, and what is written follows it; an empty line only goes on."""
        eos, generator = self.config.eos, generator_of(self.args.seed, 0)
        walk, unread = self._open_walk(), [eos]
        for line in typed_lines():
            if line.strip() == "/reset":
                walk, unread = self._open_walk(), [eos]
                continue
            try:
                note_unknown_words([line], self.tokenizer)
            except UserError as error:
                log(f"error: {error}")
                continue
            if line.strip():
                unread += [*([eos] if unread[-1] != eos else []), *self.tokenizer.encode(line)]
            with ctrl_c() as asked:
                stream = write_on(self.model, walk, walk.read(unread)[None], self.sampler, [generator])
                (text,) = self._follow(stream, 1, asked, alone=True)
            say("\n")
            unread = text.tokens[-1:]

    def _open_walk(self) -> Walk:
        return open_walk(
            self.model,
            rows=1,
            segment_length=self.config.segment_length,
            cache_length=self.config.cache_length,
        )

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        if self.args.stop_at_line_end and tokens[-1] == self.config.eos:
            return True
        longest = max((len(stop.encode()) for stop in self.args.stop), default=0)  # a token has at least one byte
        text = self.tokenizer.decode(tokens[-longest - CHARACTER :])
        return any(stop in text for stop in self.args.stop)

    def _follow(self, stream: Iterable[list[int]], rows: int, asked: Event, *, alone: bool) -> list[Continuation]:
        """Take tokens until there are enough, all have ended, or Ctrl-C asks. A text alone is shown as it grows."""
        tell = say if alone and not self.args.json else lambda _: None
        texts = [Continuation(self.tokenizer, self.args.stop, line_end=self.args.stop_at_line_end) for _ in range(rows)]
        for tokens in islice(stream, self.args.tokens):
            for text, token in zip(texts, tokens, strict=True):
                if not text.ended:
                    tell(text.add(token))
            if asked.is_set() or all(text.ended for text in texts):
                break
        for text in texts:
            tell(text.finish())
        return texts


def typed_lines() -> Iterator[str]:
    """Until Ctrl-D. At a terminal, Ctrl-C begins the line anew."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  lets input() edit the line and remember those before
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
        yield line


def deliver(args: argparse.Namespace, prompts: Sequence[str], texts: Sequence[Continuation]) -> None:
    """The results; one text alone has been shown already. After Ctrl-C there may be fewer texts than prompts."""
    samples = [
        {"prompt": prompt, "text": text.text, "tokens": len(text.tokens)}
        for prompt, text in zip(prompts, texts, strict=False)
    ]
    if args.json:
        show(samples[0] if len(prompts) == 1 else {"samples": samples}, as_json=True)
    elif len(prompts) == 1:
        say("\n")
    else:
        headings = (prompt.replace("\n", " ") for prompt in prompts)
        say("\n".join(f"== {heading}\n{text.text}\n" for heading, text in zip(headings, texts, strict=False)))


if __name__ == "__main__":
    run_command(main)
