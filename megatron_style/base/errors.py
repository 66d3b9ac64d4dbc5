"""The exceptions that end a command with one line, and text that is safe to print."""

import re

# Control characters except newline and tab, marks that change the text direction, and undecodable bytes.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST = 2000


def one_line(text: str) -> str:
    """Return the text with control characters and line ends escaped: the content of a file must neither act on a
    terminal nor fill it. A text that is too long loses its middle, since a message ends with what to do."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def harmless(text: str) -> str:
    """Return the text with control characters escaped, so that it cannot act on a terminal; line ends stay."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class UserError(ValueError):
    """The user's input is wrong. The message names the key or file, its value, and what is expected."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class Stopped(Exception):
    """The run was asked to stop, and has saved its state. The same command resumes it."""


class OnlyChecked(Exception):
    """The run was to be checked, not trained. It has written nothing."""


class RunFailed(RuntimeError):
    """The run cannot continue, and no input is to blame. The message says why and what is saved."""


class Diverged(RunFailed):
    """The loss or the gradients are no longer finite. Resuming from the last checkpoint would diverge again."""
