"""What a user's mistake looks like: one line, and nothing written."""


class UserError(ValueError):
    """The user's input is wrong. The message names the key or file, what it holds, and what would be right."""
