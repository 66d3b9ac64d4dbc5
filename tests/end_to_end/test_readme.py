"""The commands of the README work, and the files that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
SHORT = (
    "--set stages.0.steps=2 --set stages.1.steps=2 --set data.tokens_per_batch=512 --set output.evaluate_tokens=500 "
    "--set output.log_every=1"
)
SMALLER = " --set model.layers=2 --set model.hidden_size=32 --set model.ffn_size=64"


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "times"),
    [(SHORT + SMALLER, 1), pytest.param(SHORT, 2, marks=pytest.mark.sweep)],
    ids=["once", "again"],
)
def test_quickstart_runs_from_beginning_to_end_and_again(tmp_path: Path, settings: str, times: int) -> None:
    assert any("./launch/quickstart.sh" in block for block in BLOCKS)
    command = [str(ROOT / "launch" / "quickstart.sh"), *settings.split()]
    for _ in range(times):
        result = subprocess.run(
            command, env=environment(QUICKSTART_RUN=str(tmp_path / "run")), capture_output=True, text=True, timeout=600
        )
        assert result.returncode == 0, result.stderr
        assert "tensorboard --logdir" in result.stdout
        assert (tmp_path / "run" / "report.html").is_file()
    assert times == 1 or "is finished after 4 steps" in result.stderr


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_tree_is_the_tree() -> None:
    (tree,) = re.findall(r"## The tree\n```\n(.*?)```", README, flags=re.DOTALL)
    named = set(re.findall(r"\b(\w+\.py|\w+/)", tree))
    package = ROOT / "megatron_style"
    commands = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert commands | folders <= named


def test_the_files_to_read_first_have_the_size_that_is_said() -> None:
    section = README.partition("## Reading order")[2].partition("## Results")[0]
    (said,) = re.findall(r"These ten files have ([\d,]+) lines", section)
    files = [
        ROOT / "megatron_style" / name for name in re.findall(r"`([\w/]+\.py)`", section) if "__init__" not in name
    ]
    assert len(files) == 10
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert abs(lines / int(said.replace(",", "")) - 1) < 0.05, f"they have {lines}"
