"""The paper's twelve tables, and the runs and evaluations that they and the claims use.

The figures are data, `paper_tables.json`: Press, Smith & Lewis, "Shortformer", ACL 2021.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_style.paper.measures import (
    Evaluated,
    Evaluation,
    LongMemory,
    Measure,
    Measured,
    Row,
    Split,
    Table,
    ToMatch,
    TotalTime,
    TrainSpeed,
)
from megatron_style.paper.memory import LargestBatch, PlannedStage
from megatron_style.paper.runs import Model, RunSpec, Text

FILE = Path(__file__).with_name("paper_tables.json")
EPOCHS = 205  # of WikiText-103, in all of its runs
NEIGHBOURS = 1024  # of kNN-LM, as its authors use


@cache
def paper_table(number: int) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    (found,) = (table for key, table in tables.items() if key.startswith(f"table{number}_"))
    return dict(found)


def by_first_stage(number: int) -> dict[tuple[int, int], float | None]:
    """Return the figures of table 2, 6, 7 or 8 by (epochs, length) of the first stage."""
    table = paper_table(number)
    found = {}
    for epochs, figures in table["by_first_stage_epochs"].items():
        for length, figure in zip(table["first_stage_lengths"], figures, strict=True):
            found[int(epochs), length] = figure
    return found


NONOVERLAPPING = Evaluation("nonoverlapping")
SLIDING = Evaluation("sliding", stride=1)
SLIDING_512 = Evaluation("sliding", stride=512)
CACHED = Evaluation("cached")
ONE_BY_ONE = Evaluation("sliding", "short", stride=1)  # a window per token: how a model without cache generates
WALKED = Evaluation("token-by-token", "short")
CACHED_SHORT = Evaluation("cached", "short")
SAME_CONTEXT = Evaluation("sliding", stride=128, length=512)  # a prediction sees 385 to 512 tokens, whatever the model
LONG_MEMORY = Evaluation("cached", memory=LongMemory(segment_length=128, cache_length=1600, clamp_distance=1000))

BASELINE = RunSpec("baseline", 3072)
STAGED = RunSpec("baseline", 3072, first_length=128, first_epochs=50)
PIA_CACHE = RunSpec("pia_cache", 512)
SHORTFORMER = RunSpec("pia_cache", 512, first_length=128, first_epochs=100)
PIA_NO_CACHE = RunSpec("ablation_pia_no_cache", 512)
PIA_NO_CACHE_UNSHUFFLED = RunSpec("ablation_pia_no_cache_unshuffled", 512)
CACHE_NO_PIA = RunSpec("ablation_cache_no_pia", 512)
SANDWICH = RunSpec("sandwich", 3072)
SANDWICH_SHORTFORMER = RunSpec("sandwich_shortformer", 512, first_length=128, first_epochs=100)
TRANSFORMER_XL = RunSpec("transformer_xl", 384)
ROUTING = RunSpec("routing", 3072)  # with 4,096 tokens at the scale of the paper
COMPRESSIVE = RunSpec("compressive", 512)
COMPRESSIVE_SHORTFORMER = RunSpec("compressive_shortformer", 512, first_length=128, first_epochs=100)
STAGED_TRANSFORMER_XL = RunSpec("transformer_xl_staged", 384, first_length=128, first_epochs=100)
# What most claims are about is trained first, so that an unfinished table tells as much as it can.
FIRST = (BASELINE, SHORTFORMER, PIA_CACHE, STAGED, TRANSFORMER_XL)
SYSTEMS: Mapping[str, RunSpec] = {  # every trained model of table 5
    "baseline": BASELINE,
    "staged": STAGED,
    "PIA + cache": PIA_CACHE,
    "Shortformer": SHORTFORMER,
    "Transformer-XL": TRANSFORMER_XL,
    "staged Transformer-XL": STAGED_TRANSFORMER_XL,
    "Sandwich": SANDWICH,
    "Sandwich + Shortformer": SANDWICH_SHORTFORMER,
    "Compressive": COMPRESSIVE,
    "Compressive + Shortformer": COMPRESSIVE_SHORTFORMER,
    "Routing": ROUTING,
}

_POSITIONS = Evaluation("nonoverlapping", by_position=True)
BY_POSITION: Mapping[str, tuple[RunSpec, Evaluation]] = {  # the curves of the chart of losses by position
    "baseline, L=3072, no cache": (BASELINE, _POSITIONS),
    "PIA, L=512, its cache left empty": (PIA_CACHE, _POSITIONS),
    "PIA, L=512, with its cache": (PIA_CACHE, replace(_POSITIONS, mode="cached")),
}


def perplexity(evaluation: Evaluation) -> Evaluated:
    return Evaluated("perplexity", evaluation)


def speed(evaluation: Evaluation) -> Evaluated:
    return Evaluated("speed", evaluation)


def loss(evaluation: Evaluation) -> Evaluated:
    return Evaluated("loss", evaluation)


def table(number: int) -> Table:
    return _TABLES[number - 1]()


def all_tables() -> tuple[Table, ...]:
    return tuple(make() for make in _TABLES)


def _table_1() -> Table:
    measures = (TrainSpeed(), perplexity(NONOVERLAPPING), speed(NONOVERLAPPING), perplexity(SLIDING), speed(ONE_BY_ONE))
    rows = tuple(
        Row(f"L={length}", RunSpec("baseline", length), tuple(figures), measures)
        for length, *figures in paper_table(1)["rows"]
    )
    columns = ("train tokens/s", "nonoverlapping ppl", "tokens/s", "sliding ppl", "one by one tokens/s")
    return Table(1, "The baseline at every segment length", columns, rows)


def _table_2() -> Table:
    held_out = perplexity(NONOVERLAPPING)
    baseline = Row("baseline, L=3072", BASELINE, (paper_table(1)["rows"][-1][2],), (held_out,))
    found = _by_first_stage(2, "Perplexity of staged training, by the first stage", "ppl", held_out)
    return replace(found, rows=(*found.rows, baseline))


def _table_3() -> Table:
    """Return table 3 with two columns added: the losses of one text, scored in segments and token by token."""
    steady = (TrainSpeed(), perplexity(CACHED), speed(CACHED), speed(WALKED), loss(CACHED_SHORT), loss(WALKED))
    rows = [
        Row(f"PIA + cache, L={length}", RunSpec("pia_cache", length), (*figures, None, None), steady)
        for length, *figures in paper_table(3)["rows"]
    ]
    ablations = paper_table(3)["ablations_dev_ppl"]
    for label, spec, key, evaluation in (
        ("PIA, no cache", PIA_NO_CACHE, "pia_without_cache_shuffled", NONOVERLAPPING),
        ("PIA, no cache, unshuffled", PIA_NO_CACHE_UNSHUFFLED, "pia_without_cache_unshuffled", NONOVERLAPPING),
        ("cache, no PIA", CACHE_NO_PIA, "cache_without_pia", CACHED),
    ):
        measures = (None, perplexity(evaluation), None, None, None, None)
        rows.append(Row(f"{label}, L=512", spec, (None, ablations[key], None, None, None, None), measures))
    columns = ("train tokens/s", "ppl", "tokens/s", "one by one tokens/s", "loss cached", "loss one by one")
    return Table(3, "Position-infused attention and cache", columns, tuple(rows))


def _table_4() -> Table:
    rows = tuple(
        Row(
            f"first L={first}" if first else "L=512 all through",
            RunSpec("pia_cache", 512, first, 100) if first else PIA_CACHE,
            tuple(figures),
            (TrainSpeed(), perplexity(CACHED)),
        )
        for first, *figures in paper_table(4)["rows"]
    )
    return Table(4, "The Shortformer, by its first stage", ("train tokens/s", "ppl"), rows)


def _table_5() -> Table:
    """Return table 5 with two additions: combinations that the paper suggests and does not measure, and the perplexity
    of every model by one protocol, which gives all predictions equally many tokens. The claims of the abstract are
    tested on its runs."""
    rows = [
        _model_row(row[0], row[3], (row[2], row[4], row[5]), 3072, "wikitext103", ("test",))
        for row in paper_table(5)["rows"]
    ]
    combined = ("staged transformer-xl", "sandwich + shortformer", "compressive + shortformer", "shortformer + knn-lm")
    for name in combined:
        rows.append(_model_row(name, "nonoverlapping", (None, None, None), 3072, "wikitext103", ("test",)))
    columns = ("train tokens/s", "tokens/s", "test ppl", "same context test ppl")
    also: list[tuple[RunSpec, Measure]] = [(spec, loss(evaluation)) for spec, evaluation in BY_POSITION.values()]
    also += [(spec, perplexity(NONOVERLAPPING)) for spec in (BASELINE, STAGED)]
    also += [(spec, perplexity(CACHED)) for spec in (PIA_CACHE, SHORTFORMER)]
    also += [(STAGED, ToMatch("seconds")), (BASELINE, speed(ONE_BY_ONE)), (PIA_CACHE, speed(WALKED))]
    table_rows = tuple(map(_with_same_context, rows))
    return Table(5, "Test perplexity", columns, table_rows, baseline=BASELINE, also=tuple(also))


def _with_same_context(row: Row) -> Row:
    (measured,) = (each for each in row.measures if isinstance(each, Evaluated) and each.figure == "perplexity")
    evaluation = replace(SAME_CONTEXT, split="test", neighbours=measured.evaluation.neighbours)
    return replace(row, paper=(*row.paper, None), measures=(*row.measures, perplexity(evaluation)))


def _table_6() -> Table:
    return _by_first_stage(6, "Time to be as good as the baseline", "share of its time", ToMatch("seconds"))


def _table_7() -> Table:
    """Return table 7 with shares of all tokens, which are comparable at any scale, in place of epochs."""
    title = "Tokens read until as good as the baseline"
    return _by_first_stage(7, title, "share of its tokens", ToMatch("tokens"), unit=EPOCHS)


def _table_8() -> Table:
    return _by_first_stage(8, "Total training time", "share of the baseline's", TotalTime())


def _table_9() -> Table:
    measures = tuple(map(perplexity, (NONOVERLAPPING, SLIDING_512, SLIDING)))
    rows = []
    for length, *figures in paper_table(9)["rows"]:
        pairs = zip(figures, measures, strict=True)
        measured = tuple(None if figure is None else measure for figure, measure in pairs)
        rows.append(Row(f"last L={length}", RunSpec("baseline", length, 128, 50), tuple(figures), measured))
    columns = ("ppl", "sliding S=512 ppl", "sliding S=1 ppl")
    return Table(9, "Staged training with shorter last stages", columns, tuple(rows))


def _table_10() -> Table:
    stages = {
        ("baseline", 1): PlannedStage("baseline", 3072),
        ("staged", 1): PlannedStage("baseline", 128),
        ("staged", 2): PlannedStage("baseline", 3072),
        ("pia+cache", 1): PlannedStage("pia_cache", 512),
        ("shortformer", 1): PlannedStage("pia_cache", 128),
        ("shortformer", 2): PlannedStage("pia_cache", 512),
    }
    rows = tuple(
        Row(f"{name}, stage {stage}", stages[name, stage], (largest,), (LargestBatch(),))
        for name, stage, largest, _ in paper_table(10)["rows"]
    )
    return Table(10, "Rows that fit a V100 of 32 GB, planned", ("rows",), rows)


def _table_11() -> Table:
    return _books(11, "Toronto Books", 1024)


def _table_12() -> Table:
    return _books(12, "Toronto Books with L=3072", 3072)


def _books(number: int, title: str, length: int) -> Table:
    rows = tuple(
        _model_row(row[0], row[2], (row[1], row[3], row[4], row[5]), length, "tbc", ("valid", "test"))
        for row in paper_table(number)["rows"]
    )
    return Table(number, title, ("train tokens/s", "tokens/s", "dev ppl", "test ppl"), rows)


def _by_first_stage(number: int, title: str, column: str, measure: Measure, unit: int = 1) -> Table:
    rows = tuple(
        Row(
            f"{epochs} epochs of L={length}",
            RunSpec("baseline", 3072, length, epochs),
            (None if figure is None else figure / unit,),
            (measure,),
        )
        for (epochs, length), figure in by_first_stage(number).items()
    )
    return Table(number, title, (column,), rows, baseline=BASELINE)


def _model_row(name: str, mode: str, paper: tuple[Any, ...], length: int, text: Text, splits: tuple[Split, ...]) -> Row:
    """Return a row of a table that compares models: speed of training and inference, perplexity on each split."""
    spec = _COMPARED.get(name)
    if spec is None:
        return Row(f"{name}, {mode}", None, paper, (None,) * len(paper))
    if spec.model in ("baseline", "sandwich"):
        spec = replace(spec, length=length)
    plain = SLIDING_512 if mode == "sliding S=512" else _WALKS.get(spec.model, NONOVERLAPPING)
    if name.endswith("knn-lm"):
        plain = replace(plain, neighbours=NEIGHBOURS)
    evaluations = [replace(plain, split=split) for split in splits]
    measures: tuple[Measured, ...] = (TrainSpeed(), speed(evaluations[0]), *map(perplexity, evaluations))
    return Row(f"{name}, {mode}", replace(spec, text=text), paper, measures)


_COMPARED: Mapping[str, RunSpec] = {  # what the tables that compare models train
    "baseline": BASELINE,
    "staged": STAGED,
    "pia+cache": PIA_CACHE,
    "shortformer": SHORTFORMER,
    "knn-lm": BASELINE,
    "shortformer + knn-lm": SHORTFORMER,
    "sandwich": SANDWICH,
    "sandwich + shortformer": SANDWICH_SHORTFORMER,
    "transformer-xl": TRANSFORMER_XL,
    "staged transformer-xl": STAGED_TRANSFORMER_XL,
    "routing": ROUTING,
    "compressive": COMPRESSIVE,
    "compressive + shortformer": COMPRESSIVE_SHORTFORMER,
}
_WALKS: Mapping[Model, Evaluation] = {  # how a model with a memory is evaluated; the paper says nonoverlapping
    "pia_cache": CACHED,
    "sandwich_shortformer": CACHED,
    "compressive": CACHED,
    "compressive_shortformer": CACHED,
    "transformer_xl": LONG_MEMORY,
    "transformer_xl_staged": LONG_MEMORY,
}
_TABLES: tuple[Callable[[], Table], ...] = (
    _table_1, _table_2, _table_3, _table_4, _table_5, _table_6, _table_7, _table_8, _table_9, _table_10, _table_11,
    _table_12,
)  # fmt: skip
