"""A model in several files is the model in one, wherever a model is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from megatron_style.base.errors import UserError
from megatron_style.base.model_files import INDEX, WEIGHTS, has_weights, is_shard, weight_files
from megatron_style.config.run import RunConfig
from megatron_style.convert import main
from megatron_style.formats import model_folder
from megatron_style.formats.formats import open_model
from megatron_style.formats.source import ModelSource, tensors_of
from megatron_style.formats.tensor_files import write_sharded
from megatron_style.formats.transfer import export_huggingface, export_model, import_transformer_xl
from megatron_style.paper.work.evaluations import weights_digest
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.models import MODELS, model_config
from tests.support.oracle import oracle_is_here
from tests.support.resuming import age_event_files, exported_weights, make_run, metrics, on_ranks
from tests.support.tiny import content, run_here, tiny_config, tiny_dictionary, tiny_model, weights_of, write_tiny_model
from tests.support.transformer_xl import write_folder

SMALL = 3000  # bytes of a shard
Change = Callable[[dict[str, Any]], object]


def write_in_shards(folder: Path, name: str = "shortformer", shard_bytes: int = SMALL) -> ModelSource:
    config = model_config(name)
    weights = weights_of(tiny_model(config, torch.float32))
    source = ModelSource(folder, config, weights.__getitem__, tiny_dictionary)
    model_folder.write(folder, source, shard_bytes=shard_bytes)
    return source


@pytest.mark.parametrize("name", MODELS)
def test_shards_are_read_like_one_file(tmp_path: Path, name: str) -> None:
    source = write_in_shards(tmp_path / "model", name)
    assert not (tmp_path / "model" / WEIGHTS).exists()
    read = open_model(tmp_path / "model")
    for tensor in tensors_of(source.config):
        assert torch.equal(read.weight(tensor), source.weight(tensor)), tensor
    assert read.digest() == source.digest()


def test_the_index_is_hugging_faces(tmp_path: Path) -> None:
    source = write_in_shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    names = sorted(path.name for path in tmp_path.iterdir() if is_shard(path.name))
    assert names == [f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)]
    assert len(names) > 3
    total = 0
    for name in names:
        held = load_file(tmp_path / name)
        size = sum(tensor.nbytes for tensor in held.values())
        assert size <= SMALL or len(held) == 1
        assert held.keys() == {key for key, file in index["weight_map"].items() if file == name}
        total += size
    assert index["metadata"]["total_size"] == total
    assert list(index["weight_map"]) == list(tensors_of(source.config))
    assert weight_files(tmp_path) == [*(tmp_path / name for name in names), tmp_path / INDEX]


def test_what_fits_one_file_is_one_file(tmp_path: Path) -> None:
    source = write_in_shards(tmp_path / "shards")
    size = json.loads((tmp_path / "shards" / INDEX).read_text())["metadata"]["total_size"]
    model_folder.write(tmp_path / "one", source, shard_bytes=size)
    model_folder.write(tmp_path / "default", source)
    model_folder.write(tmp_path / "two", source, shard_bytes=size - 1)
    assert weight_files(tmp_path / "one") == [tmp_path / "one" / WEIGHTS]
    assert content(tmp_path / "one") == content(tmp_path / "default")
    assert len(weight_files(tmp_path / "two")) == 3  # with the index


def test_each_tensor_is_asked_for_once_and_in_order(tmp_path: Path) -> None:
    """As all ranks of a run do, which gather it together."""
    config = tiny_config()
    weights = weights_of(tiny_model(config, torch.float32))
    asked: list[str] = []

    def weight(name: str) -> torch.Tensor:
        asked.append(name)
        return weights[name]

    model_folder.write(tmp_path / "model", ModelSource(tmp_path, config, weight, lambda: None), shard_bytes=SMALL)
    assert asked == list(tensors_of(config))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda index: index.pop("weight_map"), "lacks 'weight_map'"),
        (lambda index: index.update(weight_map=["model-00001-of-00002.safetensors"]), "lacks 'weight_map'"),
        (lambda index: index["weight_map"].update({"extra": "../secret"}), "a file of the same folder is expected"),
        (lambda index: index["weight_map"].update({"extra": 7}), "a file of the same folder is expected"),
        (lambda index: index["weight_map"].update({"extra": "absent.safetensors"}), "absent.safetensors: no such file"),
        (
            lambda index: index["weight_map"].update({"extra": index["weight_map"]["vocabulary.clusters"]}),
            "does not hold it",
        ),
        (lambda index: index["weight_map"].popitem(), "its tensors are not those of its config.json"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, change: Change, told: str) -> None:
    write_in_shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=told):
        open_model(tmp_path)


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    write_in_shards(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(UserError, match=r"index\.json: not valid JSON"):
        open_model(tmp_path)


def test_folders_with_and_without_shards_replace_each_other(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one")
    for shard_size in (SMALL, 10**9, SMALL):
        export_model(tmp_path / "one", tmp_path / "out", overwrite=True, optimizer=False, shard_size=shard_size)
        assert (tmp_path / "out" / WEIGHTS).exists() == (shard_size > SMALL)
        assert any(is_shard(path.name) for path in (tmp_path / "out").iterdir()) == (shard_size == SMALL)
        assert open_model(tmp_path / "out").digest() == open_model(tmp_path / "one").digest()


def test_the_command_takes_a_size(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one")
    words = ("export", tmp_path / "one", "--output", tmp_path / "out", "--shard-size")
    assert run_here(main, *words, "3KB").code == 0
    assert (tmp_path / "out" / INDEX).exists()
    for wrong in ("3", "0GB", "1.5GB", "GB"):
        done = run_here(main, *words, wrong)
        assert (done.code, done.out) == (2, "")
        assert f"'{wrong}' is not a size such as 500MB or 5GB" in done.err


def test_transformers_reads_shards_and_they_come_back(tmp_path: Path) -> None:
    """The command loads what it has written with the library and the folder's own code."""
    pytest.importorskip("transformers")
    write_tiny_model(tmp_path / "one")
    facts = export_huggingface(tmp_path / "one", tmp_path / "hf", overwrite=False, shard_size=SMALL)
    assert str(facts["computed_by"]).startswith("transformers")
    assert (tmp_path / "hf" / INDEX).exists()
    assert open_model(tmp_path / "hf").digest() == open_model(tmp_path / "one").digest()


@oracle_is_here
def test_a_published_transformer_xl_in_shards_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "published", "plain")
    weights = load_file(tmp_path / "published" / WEIGHTS)
    (tmp_path / "published" / WEIGHTS).rename(tmp_path / "published" / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (tmp_path / "published" / INDEX).write_text(json.dumps(index))
    import_transformer_xl(tmp_path / "published", tmp_path / "model", overwrite=False)
    assert has_weights(tmp_path / "model")


def test_the_digest_of_a_measured_model_is_that_of_all_its_files(tmp_path: Path) -> None:
    write_in_shards(tmp_path)
    files = weight_files(tmp_path)
    before = weights_digest(files)
    assert weights_digest(files) == before
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")
    assert weights_digest(files) != before


def train_in_shards(run: RunConfig) -> None:
    small = partial(write_in_small_shards, write_sharded)
    with patch.object(model_folder, "write_sharded", small):
        train(run)


def write_in_small_shards(write: Callable[..., None], *args: Any, shard_bytes: int) -> None:
    write(*args, shard_bytes=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"zero": 3, "tensor": 2, "data": 2},
        pytest.param({"zero": 0, "tensor": 2}, marks=pytest.mark.sweep),
        pytest.param({"zero": 1, "tensor": 2, "data": 2, "half": True}, marks=pytest.mark.sweep),
        pytest.param({"zero": 2, "data": 4}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_a_run_exports_what_its_checkpoint_holds(folder: Path, settings: dict[str, Any]) -> None:
    """From all ranks, in shards; and another run starts from it."""
    world = settings.get("tensor", 1) * settings.get("data", 1)
    run = make_run(folder, steps=2, **settings)
    run_ranks(world, train_in_shards, run)
    model = run.output.path / "model"
    assert (model / INDEX).exists()
    exported = open_model(model)
    assert exported.digest() == open_model(run.output.path).digest()
    data = make_run(folder, "next", steps=2, **settings).as_data() | {"start": str(model)}
    started = RunConfig.parse(data, source="test")
    age_event_files(started)
    on_ranks(started, world)
    assert metrics(started)[-1]["step"] == 2
    assert exported_weights(started).keys() == tensors_of(exported.config).keys()
