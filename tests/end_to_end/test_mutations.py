"""Files that a stranger may have written: whatever is in them, they are read, or refused in one line.

Seeded and short; for a longer search, set MUTATIONS to the number of trials per file."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import pytest
import yaml

from megatron_style.base.errors import UserError
from megatron_style.checkpoint.manifest import Damaged, read_manifest, write_sealed
from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import load_run
from megatron_style.data.store import open_store
from megatron_style.data.tokenizer import BpeTokenizer, load_tokenizer
from megatron_style.engine.local_ranks import run_ranks
from megatron_style.formats.formats import open_model
from megatron_style.hosts.hosts import read_hostfile
from megatron_style.journal.metrics_file import MetricsFile
from megatron_style.reporting.history import read_run
from megatron_style.supervision.process import this_process
from megatron_style.supervision.record import RankRecord, now, read_records, read_status, write_record
from megatron_style.train import train
from tests.checkpoint.test_resume import make_run
from tests.support.tiny import tiny_config, write_tiny_model
from tests.support.training import write_corpus

TRIALS = int(os.environ.get("MUTATIONS", "40"))
ODD: list[Any] = [
    None, True, -1, 0, 2**63, 2**80, 1e308, float("nan"), float("inf"), "", "x" * 300, "\x1b[2J\x00", "²", "../..",
    [], [[]], {}, {"a": {"b": []}}, [None], "-1", "1e9", "*a",
]  # fmt: skip


def paths_of(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [here, *(path for key, value in children for path in paths_of(value, (*here, key)))]


def changed(data: Any, rng: random.Random) -> Any:
    """The same plain data with one value replaced, removed or moved to an odd key."""
    data = json.loads(json.dumps(data))
    path = rng.choice(paths_of(data)[1:])
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    match rng.randrange(4):
        case 0:
            del holder[path[-1]]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(["", "x\ny", "²", "stage " * 50])] = holder.pop(path[-1])
        case _:
            holder[path[-1]] = rng.choice(ODD)
    return data


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The same bytes with some flipped, cut off, doubled or put in."""
    place = rng.randrange(max(1, len(content)))
    match rng.randrange(4):
        case 0:
            return content[:place]
        case 1:
            return content[:place] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + content[place:]
        case 2:
            return content[:place] + content[place // 2 :]
        case _:
            return content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]


def expect_refusals(write: Callable[[random.Random], object], read: Callable[[], object]) -> None:
    refusals = []
    for trial in range(TRIALS):
        write(random.Random(trial))
        try:
            read()
        except (UserError, Damaged) as error:
            refusals.append(str(error))
    assert refusals  # something was wrong with some of them
    assert all(told.strip() and "\n" not in told for told in refusals)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    run = make_run(folder, steps=4)
    run_ranks(1, train, run)
    return run.output.path


def test_run_files(tmp_path: Path, run_folder: Path) -> None:
    path, data = tmp_path / "run.yaml", yaml.safe_load((run_folder / "run.yaml").read_text())
    expect_refusals(lambda rng: path.write_text(yaml.safe_dump(changed(data, rng))), lambda: load_run(path))
    content = (run_folder / "run.yaml").read_bytes()
    expect_refusals(lambda rng: path.write_bytes(damaged(content, rng)), lambda: load_run(path))


def test_a_yaml_bomb_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    layers = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path.write_text("a0: &a0 [x, x, x]\n" + "\n".join(layers))
    with pytest.raises(UserError, match=r"not valid YAML: .*an alias"):
        load_run(path)


def test_ds_configs(tmp_path: Path) -> None:
    data = json.loads((Path(__file__).parents[2] / "ds_configs" / "zero3_bf16_offload.json").read_text())
    path = tmp_path / "ds.json"
    expect_refusals(lambda rng: path.write_text(json.dumps(changed(data, rng))), lambda: read_ds_file(path))


def test_manifests(tmp_path: Path, run_folder: Path) -> None:
    """With the right digest: only what they say is wrong."""
    folder = run_folder / "checkpoints" / "global_step4"
    original = (folder / "manifest.json").read_text()
    data = json.loads(original.split("\n")[0])

    def read() -> None:
        read_manifest(folder)
        source = open_model(folder)
        for name in read_manifest(folder).parameters:
            source.weight(name)

    try:
        expect_refusals(lambda rng: write_sealed(folder / "manifest.json", changed(data, rng)), read)
    finally:
        (folder / "manifest.json").write_text(original)


def test_model_folders(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    data = json.loads(path.read_text())

    def read() -> None:
        source = open_model(tmp_path / "model")
        source.load()

    expect_refusals(lambda rng: path.write_text(json.dumps(changed(data, rng))), read)
    path.write_text(json.dumps(data))
    weights = tmp_path / "model" / "model.safetensors"
    content = weights.read_bytes()
    expect_refusals(lambda rng: weights.write_bytes(damaged(content[:400], rng) + content[400:]), read)
    assert tiny_config().vocab_size == data["vocab_size"]


def test_tokenizers(tmp_path: Path) -> None:
    BpeTokenizer.train(["low lower lowest newer wider"] * 5, vocab_size=270).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    expect_refusals(
        lambda rng: path.write_text(json.dumps(changed(data, rng))), lambda: load_tokenizer(path).encode("low\nwide")
    )


def test_token_stores(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    index = tmp_path / "train.idx"
    content = index.read_bytes()
    expect_refusals(
        lambda rng: index.write_bytes(damaged(content, rng)), lambda: open_store(tmp_path / "train").check_ids(37)
    )


def test_records_of_metrics(tmp_path: Path, run_folder: Path) -> None:
    """A start continues with whatever can be read; a report names the line."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_bytes((run_folder / "run.yaml").read_bytes())
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    path = folder / "metrics.jsonl"

    def write(rng: random.Random) -> None:
        odd = [changed(line, rng) if rng.random() < 0.3 else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in odd))

    def read() -> None:
        try:
            read_run("run", folder)
        finally:
            MetricsFile(path, last_step=4).close()

    expect_refusals(write, read)


def test_records_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    record = RankRecord(**vars(this_process()), rank=1, launch="a", step=3, phase="training", time=now())
    write_record(tmp_path, record)
    path = next((tmp_path / "ranks").iterdir())
    content = path.read_bytes()
    for trial in range(TRIALS):
        rng = random.Random(trial)
        path.write_text(json.dumps(changed(json.loads(content), rng)) if trial % 2 else "")
        (tmp_path / "status.json").write_bytes(damaged(content, rng))
        for seen in read_records(tmp_path).values():
            assert set(seen.record.host) <= set(ascii_letters + digits + "_.-")
            assert seen.record.pid > 0
        read_status(tmp_path)


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    content = b"node1 slots=8\n10.0.0.1 slots=4 # old\nuser@node3 slots=1\n"
    expect_refusals(lambda rng: path.write_bytes(damaged(content, rng)), lambda: read_hostfile(path))
