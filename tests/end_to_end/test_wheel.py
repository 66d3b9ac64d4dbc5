"""The installed package, outside the repository: the wheel is enough for every command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_style.__main__ import COMMANDS
from tests.support.launch import ROOT

pytestmark = pytest.mark.slow
SOURCES = ("megatron_style", "run_configs", "ds_configs", "pyproject.toml", "setup.py", "requirements.txt")
# In one process, because torch takes seconds to import.
HELP_OF_ALL = """
import sys
from megatron_style.__main__ import COMMANDS, main

for name in COMMANDS:
    sys.argv = ["shortformer", name, "--help"]
    try:
        main()
    except SystemExit as left:
        assert left.code == 0, name
print(sys.modules["megatron_style"].__file__)
"""


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--no-index", "--no-deps", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy, because a build writes into its sources, and install it into a folder."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / "sources" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / "sources" / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, folder / "sources")
    (wheel,) = folder.glob("*.whl")
    pip("install", "--target", folder / "installed", wheel)
    return folder / "installed"


def run(installed: Path, folder: Path, *words: object) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_holds_every_module_and_every_shipped_file(installed: Path) -> None:
    def files(folder: Path, *patterns: str) -> set[Path]:
        return {path.relative_to(folder) for pattern in patterns for path in folder.rglob(pattern)}

    package = installed / "megatron_style"
    assert files(package, "*.py") == files(ROOT / "megatron_style", "*.py")
    assert files(package / "run_configs", "*") == files(ROOT / "run_configs", "*")
    assert files(package / "ds_configs", "*") == files(ROOT / "ds_configs", "*")


def test_every_command_has_help(installed: Path, tmp_path: Path) -> None:
    out = run(installed, tmp_path, "-c", HELP_OF_ALL)
    for name in COMMANDS:
        assert f"usage: shortformer {name} " in out
    assert Path(out.splitlines()[-1]).parent == installed / "megatron_style"


def test_the_console_command_finds_its_run_files(installed: Path, tmp_path: Path) -> None:
    shortformer = installed / "bin" / "shortformer"
    assert "COMMAND" in run(installed, tmp_path, shortformer, "--help")
    table = run(installed, tmp_path, shortformer, "reproduce", "--table", 10, "--output", "out")
    assert "Rows that fit a V100" in table
    assert (tmp_path / "out" / "results.md").is_file()
    run_file = ("run_configs/wikitext103_shortformer.yaml", "--set", "data.vocab_size=267744")
    assert "246,933,504" in run(installed, tmp_path, shortformer, "plan", *run_file)
