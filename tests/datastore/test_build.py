"""A datastore holds the key and the token of every place of the text, whoever wrote it and however often it began."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_style.engine.session  # noqa: F401  once, before ranks are forked
from megatron_style.datastore.store import open_datastore
from megatron_style.inference.scoring.reader import Reader
from megatron_style.parallel.local_ranks import run_ranks
from tests.support.array_memory import peak_of_arrays
from tests.support.datastores import TRAIN, build, stored_keys, tokens_of, walk, write_model_and_texts, write_texts
from tests.support.launch import launch
from tests.support.models import MODELS, model_config
from tests.support.tiny import L, content, expect_refusal, write_tiny_model

LANES = ("--lanes", 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model_and_texts(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_the_key_and_the_token_of_its_place(tmp_path: Path, name: str) -> None:
    config = model_config(name)
    write_model_and_texts(tmp_path, config)
    done = build(tmp_path, "--dtype", "float32", "--json")
    assert done.code == 0, done
    keys, _ = walk(tmp_path, "train", torch.float32)
    np.testing.assert_allclose(stored_keys(tmp_path / "store", "<f4").reshape(keys.shape), keys, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "store/values.bin", "<i4"), tokens_of(tmp_path, "train"))
    facts = json.loads(done.out)
    assert (facts["count"], facts["hidden_size"], facts["key_bytes"]) == (*keys.shape, keys.size * 4)
    assert facts["mode"] == ("cached" if config.model.cache else "nonoverlapping")
    assert facts["search_flops"] == 2 * keys.size


def test_float16_rounds_what_float32_holds(folder: Path) -> None:
    assert build(folder).code == 0
    assert build(folder, "--dtype", "float32", output="exact").code == 0
    np.testing.assert_array_equal(stored_keys(folder / "store"), stored_keys(folder / "exact", "<f4").astype("<f2"))


def test_a_model_in_bfloat16_comes_close(folder: Path) -> None:
    assert build(folder, "--compute-dtype", "bfloat16").code == 0
    keys, _ = walk(folder, "train", torch.float32)
    assert np.abs(stored_keys(folder / "store").reshape(keys.shape) - keys).max() < 0.1
    assert open_datastore(folder / "store").manifest.walk["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [LANES, ("--mode", "sliding", "--stride", 2, "--batch-rows", 3)], ids=["lanes", "windows"]
)
def test_any_number_of_ranks_writes_the_same_bytes(folder: Path, flags: tuple[object, ...]) -> None:
    assert build(folder, *flags).code == 0
    for world in (1, 2, 3):
        for done in run_ranks(world, partial(build, output=f"of{world}"), folder, *flags):
            assert done.code == 0, done
        assert content(folder / f"of{world}") == content(folder / "store")


def test_ranks_of_a_tensor_axis_write_the_same_but_for_rounding(folder: Path) -> None:
    assert build(folder, "--dtype", "float32").code == 0
    for done in run_ranks(2, partial(build, output="two"), folder, "--dtype", "float32", "--tensor", 2):
        assert done.code == 0, done
    np.testing.assert_allclose(stored_keys(folder / "two", "<f4"), stored_keys(folder / "store", "<f4"), atol=1e-5)


class Interrupted:
    """Interrupts after some segments, and counts them."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.read = Reader.read

    def __call__(self, reader: Reader, *args: Any) -> Any:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return self.read(reader, *args)


def interrupted(folder: Path, after: int) -> int:
    """Build until so many segments are read. Return how many are left when it ends."""
    meter = Interrupted(after)
    with patch.object(Reader, "read", lambda reader, *args: meter(reader, *args)):
        assert build(folder, *LANES).code in (0, 130)
    return meter.left


@pytest.mark.parametrize(
    ("after", "world"),
    [
        pytest.param(after, world, marks=() if (after, world) in ((1, 1), (7, 2)) else pytest.mark.slow)
        for after in (0, 1, 7, 17)
        for world in (1, 2)
    ],
)
def test_an_interrupted_build_resumes_to_the_same_bytes(folder: Path, after: int, world: int) -> None:
    assert build(folder, *LANES).code == 0
    shutil.move(folder / "store", folder / "expected")
    interrupted(folder, after)
    assert not (folder / "store").exists()
    for done in run_ranks(world, build, folder, *LANES):
        assert done.code == 0, done
    assert content(folder / "store") == content(folder / "expected")
    assert not list(folder.glob(".*"))


def test_a_resumed_build_reads_only_what_is_missing(folder: Path) -> None:
    segments = TRAIN // L + 4  # four lanes are warmed by one segment
    assert interrupted(folder, 100) == 100 - segments
    shutil.rmtree(folder / "store")
    interrupted(folder, 12)  # 3 of the first lane, 4 of each further one: 3 lanes and a segment
    assert interrupted(folder, 100) == 100 - (segments - 11)


def test_a_resumed_build_says_so(folder: Path) -> None:
    interrupted(folder, 12)
    done = build(folder, *LANES)
    assert "3 of 5 parts are done" in done.err


def test_what_is_built_is_not_built_again(folder: Path) -> None:
    assert build(folder).code == 0
    with patch.object(Reader, "read", side_effect=AssertionError):
        done = build(folder)
    assert (done.code, done.err) == (0, "")
    first, second = run_ranks(2, build, folder, "--json")
    assert json.loads(first.out)["count"] == TRAIN
    assert (second.code, second.out) == (0, "")


def test_a_large_text_is_cut_into_lanes(folder: Path) -> None:
    with patch("megatron_style.datastore.build.TOKENS_PER_LANE", 20):
        assert build(folder).code == 0
    assert open_datastore(folder / "store").manifest.walk["lanes"] == TRAIN // 20


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    peaks = []
    for tokens in (2_000, 10_000):
        write_texts(tmp_path, tokens)
        with peak_of_arrays() as peak:
            lanes = ("--segment-length", 200, "--lanes", tokens // 2000)
            assert build(tmp_path, *lanes, output=f"of{tokens}").code == 0
            peaks.append(peak())
    assert peaks[1] < peaks[0] + 8_000 * 16  # a quarter of the keys in float32


# What is refused


def test_an_output_that_is_something_else_is_refused(folder: Path) -> None:
    (folder / "store").mkdir()
    (folder / "store/notes.txt").write_text("mine")
    expect_refusal(build(folder), "--output", "exists, and is not the datastore of this model and text; remove it")
    assert content(folder / "store") == {"notes.txt": b"mine"}


def test_the_datastore_of_another_text_is_refused(folder: Path) -> None:
    assert build(folder).code == 0
    before = content(folder / "store")
    write_texts(folder, train=50)
    expect_refusal(build(folder), "exists, and is not the datastore of this model and text")
    assert content(folder / "store") == before


def test_the_unfinished_build_of_another_text_is_refused(folder: Path) -> None:
    interrupted(folder, 12)
    write_texts(folder, train=50)
    expect_refusal(build(folder, *LANES), ".store.building: is an unfinished datastore of another model or text")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mode", "token-by-token"], "invalid choice: 'token-by-token'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--lanes", "100"], "the text has only 15 segments of 6"),
        (["--stride", "3"], "--stride 3 needs --mode sliding"),
        (["--tensor", "2"], "--module megatron_style.neighbours build ..."),
    ],
)
def test_a_bad_flag_is_named_in_one_line(folder: Path, flags: list[str], message: str) -> None:
    before = content(folder)
    expect_refusal(build(folder, *flags), message)
    assert content(folder) == before


def change_norms(folder: Path, weight: float) -> None:
    weights = load_file(folder / "model/model.safetensors")
    for name in weights:
        if "ffn_norm.weight" in name:
            weights[name] *= weight
    save_file(weights, folder / "model/model.safetensors")


def test_keys_beyond_float16_are_refused_and_float32_holds_them(folder: Path) -> None:
    change_norms(folder, 1e6)
    done = build(folder)
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("error: --dtype float16: a key is beyond its range; use --dtype float32\n")
    shutil.rmtree(folder / ".store.building")
    assert build(folder, "--dtype", "float32").code == 0


def test_keys_that_are_not_numbers_end_the_build(folder: Path) -> None:
    change_norms(folder, float("nan"))
    done = build(folder)
    assert (done.code, done.out) == (1, "")
    assert "the model's keys are not finite" in done.err


def test_a_disk_that_is_too_small_is_refused_at_once(folder: Path) -> None:
    usage = namedtuple("usage", "free")
    with patch("megatron_style.datastore.build.shutil.disk_usage", return_value=usage(1000)):
        done = build(folder)
    assert done.code == 2
    assert "MiB free, the datastore needs" in done.err
    assert not list(folder.glob("*store*"))


@pytest.mark.sweep  # tests/end_to_end/test_evaluate.py has the launcher, and the ranks are above
def test_the_deepspeed_launcher_writes_the_same_bytes(folder: Path) -> None:
    assert build(folder, *LANES).code == 0
    words = ("build", folder / "model", "--data", folder / "train", "--output", folder / "two", *LANES)
    two = launch("neighbours", *words, processes=2)
    assert two.returncode == 0, two.stderr
    assert content(folder / "two") == content(folder / "store")
