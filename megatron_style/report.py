"""One HTML page about one or several runs.

python -m megatron_style.report runs/quickstart --output report.html
"""

from __future__ import annotations

import argparse
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_style.config.command import add_json_flag, command_parser, run_command, show
from megatron_style.config.errors import UserError

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }}
td:first-child, th:first-child {{ text-align: left; }} svg {{ max-width: 100%; height: auto; background: white; }}
pre {{ overflow-x: auto; background: #8882; padding: 1rem; }}
:root {{ color-scheme: light dark; }}
</style>
<h1>{title}</h1>
<table><tr><th>run</th><th>steps</th><th>tokens</th><th>held-out perplexity</th><th>tokens/s</th></tr>{rows}</table>
{charts}
{configs}
</html>
"""


def main() -> None:
    args = parse_args()
    if not args.output.parent.is_dir() or args.output.is_dir():
        raise UserError(f"--output {args.output}: must be a file in a folder that exists")
    runs = {name: read_metrics(folder) for name, folder in named(args.runs).items()}
    page = _PAGE.format(
        title=html.escape(", ".join(runs)),
        rows="".join(summary_row(name, events) for name, events in runs.items()),
        charts=chart(runs, "train", "loss", "training loss (nats)")
        + chart(runs, "valid", "perplexity", "held-out perplexity"),
        configs="".join(config_section(name, folder) for name, folder in named(args.runs).items()),
    )
    args.output.write_text(page, encoding="utf-8")
    show({"output": str(args.output), "runs": len(runs)}, as_json=args.json)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "report",
        "One self-contained HTML page about one or several runs.",
        "python -m megatron_style.report runs/quickstart --output report.html",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="report.html")
    add_json_flag(parser)
    return parser.parse_args()


def named(folders: Sequence[Path]) -> dict[str, Path]:
    """Runs by their folder's name, or by its whole path where two share the name."""
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    for needed in (path, folder / "run.yaml"):
        if not needed.is_file():
            raise UserError(f"{folder}: no {needed.name} in it; the folder of a run is expected")
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last line of a killed run may be torn
    return [read_event(line, where=f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def read_event(line: str, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or "kind" not in event:
        raise UserError(f"{where}: holds {line[:60]!r}; expected an event as a run writes it")
    return event


def summary_row(name: str, events: list[dict[str, Any]]) -> str:
    trained = [event for event in events if event["kind"] == "train"]
    valid = [event["perplexity"] for event in events if event["kind"] == "valid"]
    if not trained:
        return f"<tr><td>{html.escape(name)}</td><td>0</td><td>0</td><td></td><td></td></tr>"
    speeds = sorted(event["tokens_per_second"] for event in trained)
    cells = [f"{trained[-1]['step']:,}", f"{trained[-1]['tokens']:,}", f"{valid[-1]:.2f}" if valid else "",
             f"{speeds[len(speeds) // 2]:,.0f}"]  # fmt: skip
    return f"<tr><td>{html.escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def chart(runs: dict[str, list[dict[str, Any]]], kind: str, value: str, label: str) -> str:
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    for name, events in runs.items():
        points = [(event["tokens"], event[value]) for event in events if event["kind"] == kind]
        tokens, values = [point[0] for point in points], [point[1] for point in points]
        axes.plot(tokens, values, marker="o" if len(points) < 30 else "", markersize=3, label=name)
        for event in events:
            if event["kind"] == "stage":
                axes.axvline(event["tokens"], color="grey", linewidth=0.5)
                axes.text(
                    event["tokens"], 1, f" L={event['segment_length']}", transform=axes.get_xaxis_transform(), va="top"
                )
    axes.set(xlabel="tokens", ylabel=label)
    for entry in axes.legend().get_texts():
        entry.set_parse_math(False)  # a run may have a $ in its name
    text = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", bbox_inches="tight", metadata=no_metadata)
    return "<h2>" + html.escape(label) + "</h2>" + text.getvalue()[text.getvalue().index("<svg") :]


def config_section(name: str, folder: Path) -> str:
    text = (folder / "run.yaml").read_text(encoding="utf-8")
    return f"<h2>{html.escape(name)}: run.yaml</h2><pre>{html.escape(text)}</pre>"


if __name__ == "__main__":
    run_command(main)
