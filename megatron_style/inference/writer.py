"""Write text with a model, for prompts or for typed lines; Ctrl-C ends a text, not the program."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from threading import Event
from types import FrameType

from megatron_style.base.command import log, say
from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.inference.beams import beam_search
from megatron_style.inference.next_token import Predict
from megatron_style.inference.prompts import note_unknown_words, typed_lines
from megatron_style.inference.sampling import (
    CHARACTER,
    Continuation,
    Sampler,
    Walk,
    generate,
    generator_of,
    open_walk,
    stacked,
    write_on,
)
from megatron_style.model.shortformer import Shortformer


@dataclass(frozen=True)
class WritingOptions:
    sampler: Sampler
    beams: int  # 0: sampling
    tokens: int  # per text, at most
    stop: Sequence[str]  # a text ends before any of these
    stop_at_line_end: bool
    seed: int
    batch_rows: int  # prompts that are continued at once
    shows_growth: bool  # show a single text while it grows


@dataclass(frozen=True)
class Writer:
    """Writes texts with one model; each ends by its length, at a stop, or with Ctrl-C."""

    options: WritingOptions
    config: ModelFolderConfig
    tokenizer: Tokenizer
    model: Shortformer
    predict: Predict

    def write(self, prompts: Sequence[str], asked: Event) -> list[Continuation]:
        """Return a continuation of each prompt; after Ctrl-C there may be fewer."""
        return self._search(prompts, asked) if self.options.beams else self._sample(prompts, asked)

    def _sample(self, prompts: Sequence[str], asked: Event) -> list[Continuation]:
        """Sample in batches; the text of a prompt does not depend on its batch."""
        texts: list[Continuation] = []
        for first in range(0, len(prompts), self.options.batch_rows):
            batch = prompts[first : first + self.options.batch_rows]
            stream = generate(
                self.model,
                [self.tokenizer.encode(prompt) for prompt in batch],
                self.options.sampler,
                segment_length=self.config.segment_length,
                cache_length=self.config.cache_length,
                eos=self.config.eos,
                seed=self.options.seed,
                first=first,
                predict=self.predict,
            )
            texts += self._follow(stream, len(batch), asked, alone=len(prompts) == 1)
            if asked.is_set():
                break
        return texts

    def _search(self, prompts: Sequence[str], asked: Event) -> list[Continuation]:
        """Search for one prompt at a time: its beams are the batch."""
        texts: list[Continuation] = []
        for prompt in prompts:
            progress = beam_search(
                self.model,
                self.tokenizer.encode(prompt),
                beams=self.options.beams,
                tokens=self.options.tokens,
                segment_length=self.config.segment_length,
                cache_length=self.config.cache_length,
                eos=self.config.eos,
                ended=self._has_ended,
                predict=self.predict,
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
        """Append each typed line to one text, and continue it; an empty line only continues."""
        eos = self.config.eos
        generator = generator_of(self.options.seed, 0)
        walk = self._open_walk()
        unread = [eos]
        for line in typed_lines():
            if line.strip() == "/reset":
                walk = self._open_walk()
                unread = [eos]
                continue
            try:
                note_unknown_words([line], self.tokenizer)
            except UserError as error:
                log(f"error: {error}")
                continue
            if line.strip():
                line_end = self.tokenizer.eos
                separator = [] if unread[-1] in (eos, line_end) else [line_end]
                unread += [*separator, *self.tokenizer.encode(line)]
            with ctrl_c() as asked:
                reading = stacked([walk.read(unread)])
                stream = write_on(self.predict, walk, reading, self.options.sampler, [generator])
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
        if self.options.stop_at_line_end and tokens[-1] == self.tokenizer.eos:
            return True
        longest = max((len(stop.encode()) for stop in self.options.stop), default=0)  # a token has at least one byte
        text = self.tokenizer.decode(tokens[-longest - CHARACTER :])
        return any(stop in text for stop in self.options.stop)

    def _follow(self, stream: Iterable[list[int]], rows: int, asked: Event, *, alone: bool) -> list[Continuation]:
        """Collect tokens until there are enough, all texts have ended, or Ctrl-C was pressed. A single text is shown as
        it grows."""
        display = say if alone and self.options.shows_growth else lambda _: None
        texts = [
            Continuation(self.tokenizer, self.options.stop, line_end=self.options.stop_at_line_end) for _ in range(rows)
        ]
        for tokens in islice(stream, self.options.tokens):
            for text, token in zip(texts, tokens, strict=True):
                if not text.ended:
                    display(text.add(token))
            if asked.is_set() or all(text.ended for text in texts):
                break
        for text in texts:
            display(text.finish())
        return texts


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Yield an event that Ctrl-C sets, to be checked between two tokens: within one, an interrupt would leave a walk
    half done. A second Ctrl-C interrupts at once."""
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
