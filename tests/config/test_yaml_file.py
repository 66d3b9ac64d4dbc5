"""The syntax of run files and of `--set`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_style.base.errors import UserError
from megatron_style.config.run_file import load_run
from megatron_style.config.yaml_file import override, read_yaml

QUICKSTART = Path(__file__).parents[2] / "run_configs" / "quickstart.yaml"


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1e-4", "1.0e-4", "1.e-4", "0.0001"])
def test_numbers_as_people_write_them(tmp_path: Path, text: str) -> None:
    assert read_yaml(written(tmp_path, f"floor: {text}")) == {"floor": 1e-4}


def test_long_numbers_may_have_underscores(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "tokens: 20_650_000_000")) == {"tokens": 20_650_000_000}


@pytest.mark.parametrize("text", ["1e", "e5", "0x1e5g", "v1e4", "1e-4 tokens"])
def test_words_stay_words(tmp_path: Path, text: str) -> None:
    assert read_yaml(written(tmp_path, f"name: {text}")) == {"name": text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", r"duplicate key 'seed'"),
        ("model:\n  layers: 1\n  heads: 2\n  layers: 3\n", r"duplicate key 'layers'.*line 4"),
        ("model: {layers: 1", r"not valid YAML"),
        ("model:\n\tlayers: 1", r"not valid YAML"),
        ("- a\n- b\n", r"holds list, but sections such as `model:` are expected"),
        ("just words", r"holds str, but sections"),
        ("", r"holds NoneType, but sections"),
    ],
)
def test_files_that_are_no_run_files(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        load_run(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: no such file; a run file in YAML is expected"):
        load_run(tmp_path / "none.yaml")


def test_a_folder_and_bytes_are_no_run_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_run(tmp_path)
    (tmp_path / "run.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        load_run(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("seed=7", {"seed": 7}),
        ("optimizer.clip_norm=0.25", {"optimizer": {"clip_norm": 0.25}}),
        ("optimizer.learning_rate.peak=1e-3", {"optimizer": {"learning_rate": {"peak": 1e-3}}}),
        ("stages.1.steps=10", {"stages": [{"steps": 1}, {"steps": 10}]}),
        ("stages.0={steps: 5}", {"stages": [{"steps": 5}, {"steps": 2}]}),
        ("stages=[{steps: 3}]", {"stages": [{"steps": 3}]}),
        ("output.path=runs/a=b", {"output": {"path": "runs/a=b"}}),
        ("deepspeed=null", {"deepspeed": None}),
        ("model.cache=false", {"model": {"cache": False}}),
    ],
)
def test_set(setting: str, expected: dict[str, Any]) -> None:
    data: dict[str, Any] = {"stages": [{"steps": 1}, {"steps": 2}]}
    override(data, setting)
    assert data == {"stages": [{"steps": 1}, {"steps": 2}]} | expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed", r"--set seed: must be section\.key=value"),
        ("=3", r"--set =3: must be section\.key=value"),
        ("stages=[1", r"'\[1' is not a YAML value"),
        ("stages.2.steps=1", r"'2' must be an index from 0 to 1"),
        ("stages.-1.steps=1", r"'-1' must be an index from 0 to 1"),
        ("stages.first.steps=1", r"'first' must be an index from 0 to 1"),
        ("stages.7=1", r"'7' must be an index from 0 to 1"),
        ("stages.0.steps.more=1", r"'steps' holds 1, not a section"),
    ],
)
def test_bad_set(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        override({"stages": [{"steps": 1}, {"steps": 2}]}, setting)


def test_settings_reach_the_run_in_order() -> None:
    run = load_run(QUICKSTART, ["stages.1.steps=7", "stages.1.steps=9", "optimizer.learning_rate.floor=1e-5"])
    assert run.stages[1].steps == 9
    assert run.optimizer.learning_rate is not None
    assert run.optimizer.learning_rate.floor == 1e-5


def test_what_is_set_is_checked_like_the_file() -> None:
    with pytest.raises(UserError, match=r"optimizer\.clip_nrom: unknown key; did you mean 'clip_norm'\?"):
        load_run(QUICKSTART, ["optimizer.clip_nrom=1.0"])
    with pytest.raises(UserError, match=r'seed is "abc", but it should be a valid integer'):
        load_run(QUICKSTART, ["seed=abc"])
