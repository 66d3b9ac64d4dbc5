"""What goes wrong, in one line each: a user's mistake, or a run that cannot go on."""


def one_line(text: str) -> str:
    """Return the text with control characters and line ends escaped: what a file holds must not act on a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


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
