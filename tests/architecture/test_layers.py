"""The drawing is a test: imports point downwards, and third parties have one owner."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_style"
LAYERS = [
    "config",
    "schedule",
    "data",
    "planning",
    "reporting",
    "reproduction",
    "parallel",
    "model",
    "inference",
    "runtime",
    "checkpoint",
    "commands",
]
ONLY_IN = {
    "deepspeed": {"runtime", "checkpoint"},
    "yaml": {"config"},
    "pydantic": {"config"},
    "mpi4py": {"data", "runtime"},
    "transformers": {"checkpoint"},
}
TORCH_STARTS_AT = "parallel"
MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "commands"


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    here = layer_of(path)
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "megatron_style" and rest:
            target = rest[0] if rest[0] in LAYERS else "commands"
            assert LAYERS.index(target) <= LAYERS.index(here), f"{path} must not import {name}"
        assert here in ONLY_IN.get(top, {here}), f"{top} belongs to {ONLY_IN[top]}, not to {path}"
        if top == "torch":
            assert LAYERS.index(here) >= LAYERS.index(TORCH_STARTS_AT), f"{path} is below the layers that know torch"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_keeps_mutable_state(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.List | ast.Set | ast.ListComp):
            raise AssertionError(f"{path}:{node.lineno}: a list or set at module level; use a tuple or frozenset")
        assert not isinstance(node, ast.Global)


def test_every_test_folder_mirrors_a_layer() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {*LAYERS, "architecture", "support", "end_to_end", "cluster"}
