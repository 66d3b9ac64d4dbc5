"""One HTML page about one or several runs.

python -m megatron_style.report runs/quickstart --output report.html
"""

from __future__ import annotations

import argparse
import html
import io
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_style.config.command import command_parser, run_command, show
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
    runs = {folder.name: read_metrics(folder) for folder in args.runs}
    page = _PAGE.format(
        title=html.escape(", ".join(runs)),
        rows="".join(summary_row(name, events) for name, events in runs.items()),
        charts=chart(runs, "train", "loss", "training loss (nats)")
        + chart(runs, "valid", "perplexity", "held-out perplexity"),
        configs="".join(config_section(folder) for folder in args.runs),
    )
    args.output.write_text(page, encoding="utf-8")
    show({"output": str(args.output), "runs": len(runs)}, as_json=False)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "report",
        "One self-contained HTML page about one or several runs.",
        "python -m megatron_style.report runs/quickstart --output report.html",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, required=True, metavar="report.html")
    return parser.parse_args()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: no metrics.jsonl in it; the folder of a run is expected")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
    axes.legend()
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight")
    return "<h2>" + html.escape(label) + "</h2>" + text.getvalue()[text.getvalue().index("<svg") :]


def config_section(folder: Path) -> str:
    text = (folder / "run.yaml").read_text(encoding="utf-8")
    return f"<h2>{html.escape(folder.name)}: run.yaml</h2><pre>{html.escape(text)}</pre>"


if __name__ == "__main__":
    run_command(main)
