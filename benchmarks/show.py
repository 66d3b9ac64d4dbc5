"""The training benchmark's figures as tables, as a chart, and compared with older ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Found = dict[str, Any]
ONE_RANK = "1 rank x 2 threads"
MARKS = {"L=128 cached": (1.5, 0.6), "L=512 cached": (1.5, 0.5), "L=3072": (1.8, None)}  # against plain, of matmul


def show(found: Found) -> None:
    print(f"\n{found['model']}, {found['tokens']} tokens per batch")
    print(f"{'':14}{'ours':>10}{'plain':>10}{'ours/plain':>12}{'of matmul':>11}{'memory':>9}{'plain':>9}")
    for name, line in found["lengths"].items():
        ours, plain = line["tokens_per_second"]
        our_peak, plain_peak = (peak / 2**30 for peak in line["peak_bytes"])
        print(
            f"{name:14}{ours:10,.0f}{plain:10,.0f}{line['against_plain']:12.2f}{line['share_of_matmul']:11.1%}"
            f"{our_peak:8.2f}G{plain_peak:8.2f}G"
        )
    for part in ("ours", "zero", "grids"):
        for name, speed in found[part].items():
            first = next(iter(found[part].values()))
            print(f"{name:34}{speed:10,.0f} tokens/s{speed / first:8.2f}")
    print()
    for text, value, mark, met in judged(found):
        print(f"{'met   ' if met else 'SHORT '} {text}: {value:.2f}, target: {mark}")


def judged(found: Found) -> Iterator[tuple[str, float, str, bool]]:
    """Yield each figure that has a target, and whether it meets it."""
    lengths = found["lengths"]
    grids = found["grids"]
    for name, (plain, matmul) in MARKS.items():
        if name not in lengths:
            continue
        yield _least(f"{name}: against plain", lengths[name]["against_plain"], plain)
        if matmul:
            yield _least(f"{name}: share of the matmul rate", lengths[name]["share_of_matmul"], matmul)
    for name in ("L=128 cached", "L=512 cached"):
        if {name, "L=3072"} <= found["ours"].keys():
            yield _least(f"{name}: tokens/s against L=3072", found["ours"][name] / found["ours"]["L=3072"], 1.5)
    if {"L=512 cached", "L=3072"} <= lengths.keys():
        memory = lengths["L=512 cached"]["peak_bytes"][0] / lengths["L=3072"]["peak_bytes"][0]
        yield _most("memory of L=512 cached / L=3072", memory, 0.5)
    if grids:
        yield _least("2 data-parallel ranks / 1 rank", grids["2 data-parallel ranks"] / grids[ONE_RANK], 0.85)
        yield _least("ZeRO 1 / ZeRO 0", found["zero"]["ZeRO 1"] / found["zero"]["ZeRO 0"], 0.95)


def chart(found: Found, path: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    names = list(found["lengths"])
    for side, (label, offset) in enumerate((("ours", -0.2), ("plain", 0.2))):
        places = [place + offset for place in range(len(names))]
        speed.bar(places, [found["lengths"][n]["tokens_per_second"][side] for n in names], 0.4, label=label)
        memory.bar(places, [found["lengths"][n]["peak_bytes"][side] / 2**30 for n in names], 0.4, label=label)
    for axes, title in ((speed, "tokens/s"), (memory, "peak memory, GiB")):
        axes.set_xticks(range(len(names)), names)
        axes.set_title(title)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


def difference(old: Found, new: Found) -> None:
    """Print the change of each ratio. Seconds that were measured on different days are not comparable."""
    for key in ("model", "tokens"):
        if old[key] != new[key]:
            print(f"\nnot compared: the old figures have {key} {old[key]}, these {new[key]}")
            return
    print("\nold -> new")
    for name, line in new["lengths"].items():
        before = old["lengths"].get(name)
        if before is None:
            continue
        for key in ("against_plain", "share_of_matmul"):
            print(f"{name:14}{key:16}{before[key]:8.2f} -> {line[key]:.2f}  ({line[key] / before[key] - 1:+.1%})")
        was = before["peak_bytes"][0]
        memory = line["peak_bytes"][0]
        print(f"{name:14}{'peak memory':16}{was / 2**30:7.2f}G -> {memory / 2**30:.2f}G  ({memory / was - 1:+.1%})")


def _least(text: str, value: float, mark: float) -> tuple[str, float, str, bool]:
    return text, value, f"at least {mark}", value >= mark


def _most(text: str, value: float, mark: float) -> tuple[str, float, str, bool]:
    return text, value, f"at most {mark}", value <= mark
