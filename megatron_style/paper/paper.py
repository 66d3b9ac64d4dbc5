"""The paper's figures, as data: Press, Smith & Lewis, "Shortformer", ACL 2021."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("paper_tables.json")
EPOCHS = 205  # of WikiText-103, in all of its runs


@cache
def paper_table(number: int) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    (found,) = (table for key, table in tables.items() if key.startswith(f"table{number}_"))
    return dict(found)


def by_first_stage(number: int) -> dict[tuple[int, int], float | None]:
    """Tables 2, 6, 7 and 8: (epochs, length) of the first stage to figure."""
    table = paper_table(number)
    return {
        (int(epochs), length): figure
        for epochs, figures in table["by_first_stage_epochs"].items()
        for length, figure in zip(table["first_stage_lengths"], figures, strict=True)
    }
