"""The names of a run folder's files have one home."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_style.base.run_folder import RunFolder
from tests.architecture.drawing import MODULES, PACKAGE

HOME = PACKAGE / "base" / "run_folder.py"
FILES = re.compile(r"\b(run\.yaml|metrics\.jsonl|(lock|supervisor|status)\.json|global_step(?!s))|^rank_$")
PARTS = frozenset({"tensorboard", "checkpoints", "latest", "model", "ranks", "logs"})


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Return every string of a module that is not a docstring."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node


def spelled(source: str) -> list[str]:
    """Return the names of a run folder's files that this code spells, each with its line."""
    tree = ast.parse(source)
    found = [node for node in strings(tree) if FILES.search(str(node.value))]
    for node in ast.walk(tree):
        is_joined = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        if is_joined and isinstance(node.right, ast.Constant) and node.right.value in PARTS:
            found.append(node.right)
    return [f"line {node.lineno}: {node.value}" for node in found]


@pytest.mark.parametrize(
    "source",
    ["folder / 'run.yaml'", "a / 'checkpoints' / name", "f'global_step{n}'", "f'rank_{n:05d}.log'", "x('lock.json')"],
)
def test_a_name_is_noticed(source: str) -> None:
    assert spelled(source)


def test_other_uses_of_the_words_are_left_alone() -> None:
    assert not spelled("'''global_step3 of run.yaml'''\nrun['model'] + f'mp_rank_{n}' + 'global_steps'")


def test_no_other_module_spells_a_name_of_the_run_folder() -> None:
    for path in MODULES:
        found = spelled(path.read_text(encoding="utf-8"))
        assert bool(found) == (path == HOME), f"{path}: use base.run_folder.RunFolder: {found}"


def test_checkpoints_are_found_by_their_names(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("global_step10", "global_step9", "global_step09", "global_step3.partial", "global_step", "other"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert folder.steps() == [9, 10]
    assert folder.checkpoint(9).name == "global_step9"
