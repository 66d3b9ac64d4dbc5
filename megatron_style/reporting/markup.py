"""HTML and SVG as text. Only what went through here is `Markup`, so the type checker sees a missing escape."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import NewType

Markup = NewType("Markup", str)

_EMPTY = frozenset({"input", "meta", "br", "wbr"})


def text(words: object) -> Markup:
    return Markup(html.escape(str(words)))


def breakable(words: str) -> Markup:
    """Return text that may also break after the signs that join the words of a name."""
    return Markup(re.sub(r"([_/.-])(?=\w)", r"\1<wbr>", html.escape(words)))


def tag(name: str, /, *inside: Markup, **attributes: str | float | bool) -> Markup:
    """Return an element. Write `class_` for class and `aria_label` for aria-label; False leaves an attribute out."""
    given = "".join(
        _attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not False
    )
    if name in _EMPTY:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{''.join(inside)}</{name}>")


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


def _attribute(name: str, value: str | float | bool) -> str:
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(f"{value:.5g}" if isinstance(value, float) else str(value))}"'
