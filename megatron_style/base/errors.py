"""What goes wrong, in one line each: a user's mistake, or a run that cannot go on."""

import re

# All but newline and tab, those that turn the direction of text, and bytes that are no text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST = 2000


def one_line(text: str) -> str:
    """Return the text with control characters and line ends escaped: what a file holds must not act on a terminal, nor
    fill it. Of a text that is too long the middle is left out, since what to do comes last."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def harmless(text: str) -> str:
    """Return the text, of any number of lines, with control characters escaped: it must not act on a terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class UserError(ValueError):
    """The user's input is wrong. The message names the key or file, what it holds, and what would be right."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class Stopped(Exception):
    """The run was asked to leave, and has saved its state. Start it again to go on."""


class RunFailed(RuntimeError):
    """The run cannot go on, for a reason that is nobody's input. The message says why and what is saved."""


class Diverged(RunFailed):
    """The loss or the gradients are not finite any more. Starting again from the last checkpoint would end here too."""
