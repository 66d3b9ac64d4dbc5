"""Run files and ds_configs that come with the package are found from any folder, after those of the folder itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.base.errors import UserError
from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run_file import load_run
from megatron_style.config.shipped import shipped_file
from tests.support.launch import ROOT


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_file_and_its_ds_config_are_found_anywhere() -> None:
    run = load_run(Path("run_configs/wikitext103_shortformer.yaml"))
    assert run == load_run(ROOT / "run_configs" / "wikitext103_shortformer.yaml")
    assert run.deepspeed == Path("ds_configs/zero1_fp16.json")  # as the file has it: another host has it elsewhere
    assert read_ds_file(run.deepspeed) == read_ds_file(ROOT / run.deepspeed) != {}


def test_a_file_of_this_folder_comes_first(elsewhere: Path) -> None:
    (elsewhere / "run_configs").mkdir()
    (elsewhere / "ds_configs").mkdir()
    text = shipped_file("run_configs/quickstart.yaml").read_text().replace("seed: 1\n", "")
    (elsewhere / "run_configs" / "quickstart.yaml").write_text(f"{text}\nseed: 77\n")
    (elsewhere / "ds_configs" / "zero1_fp32.json").write_text("{}")
    run = load_run(Path("run_configs/quickstart.yaml"))
    assert run.seed == 77
    assert read_ds_file(run.deepspeed) == {}


@pytest.mark.parametrize("name", ["none.yaml", "other/quickstart.yaml", "run_configs/../run_configs/quickstart.yaml"])
def test_only_the_shipped_folders_are_looked_into(name: str) -> None:
    with pytest.raises(UserError, match="no such file; a run file in YAML is expected"):
        load_run(Path(name))


def test_a_missing_file_says_where_it_was_looked_for() -> None:
    for read, name in ((load_run, "run_configs/none.yaml"), (read_ds_file, "ds_configs/none.json")):
        with pytest.raises(UserError) as caught:
            read(Path(name))
        folder, file = name.split("/")
        assert str(caught.value).startswith(f"{name}: no such file, and {file} is not in {ROOT / folder} either; a ")
        assert str(caught.value).endswith(" is expected")
