"""The code matches the drawing: each import is one of its arrows, and each third-party library has one owner."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.drawing import (
    MODULES,
    NEEDS,
    ONLY_IN,
    PACKAGE,
    ROOT,
    TORCH_FREE,
    TORCH_FREE_MODULES,
    graph,
    reachable,
)

PICKLES = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle"})
MAY_NAME_PICKLE = {
    "checkpoint/logical.py": {"pickle.UnpicklingError"},
    "parallel/local_ranks.py": {"pickle.loads", "pickle.dumps"},  # results of its own forked children
}
OBJECT_COLLECTIVES = frozenset(
    {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)
PICKLING_CALLS_OF_MPI = frozenset({"allgather", "bcast", "gather", "scatter", "send", "recv", "alltoall"})


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "commands"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(imports_in(tree_of(path), path))


def imports_in(tree: ast.Module, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield node.module or ""


def every_import() -> Iterator[tuple[Path, str, str]]:
    """Return the module, its room and the name of each import in the package."""
    for path in MODULES:
        for name in imports(path):
            yield path, room_of(path), name


def test_every_import_is_an_arrow_of_the_drawing() -> None:
    found: dict[str, set[str]] = {room: set() for room in NEEDS}
    for path, here, name in every_import():
        package, *rest = name.split(".")
        if package != "megatron_style" or not rest:
            continue
        there = rest[0] if (PACKAGE / rest[0]).is_dir() else "commands"
        if there != here:
            assert there in NEEDS[here], f"{path}: imports {name}, and {here} -> {there} is not in the drawing"
            found[here].add(there)
    assert found == {room: set(needs) for room, needs in NEEDS.items()}, "the drawing has unused arrows"


def test_the_drawing_has_no_cycle() -> None:
    for room in NEEDS:
        assert room not in reachable(room), f"{room} reaches itself"


def test_each_library_has_one_owner() -> None:
    for path, here, name in every_import():
        library = name.split(".")[0]
        assert here in ONLY_IN.get(library, {here}), f"{path}: {library} belongs to {sorted(ONLY_IN[library])}"


def is_free_of_torch(name: str) -> bool:
    """True for other libraries too, but for torch itself."""
    package, *rest = name.split(".")
    if package != "megatron_style" or not rest:
        return package != "torch"
    return rest[0] in TORCH_FREE or name in TORCH_FREE_MODULES


def test_what_is_free_of_torch_imports_nothing_that_is_not() -> None:
    for path, _, name in every_import():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if is_free_of_torch(module):
            assert is_free_of_torch(name), f"{path}: is free of torch, and {name} is not"


def test_no_module_keeps_mutable_state() -> None:
    for path in MODULES:
        for node in tree_of(path).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            where = f"{path}:{node.lineno}"
            assert not isinstance(value, ast.List | ast.Set | ast.ListComp), f"{where}: use a tuple or frozenset"
            assert not isinstance(node, ast.Global), f"{where}: no global statement"


def test_nothing_from_another_process_is_unpickled() -> None:
    for path in MODULES:
        nodes = list(ast.walk(tree_of(path)))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        named = {ast.unparse(node) for node in attributes if ast.unparse(node.value) in PICKLES}
        called = {node.attr for node in attributes}
        assert named <= MAY_NAME_PICKLE.get(str(path.relative_to(PACKAGE)), set()), path
        assert not any(isinstance(node, ast.ImportFrom) and node.module in PICKLES for node in nodes), path
        assert not OBJECT_COLLECTIVES & called, path
        assert "mpi4py" not in imports(path) or not PICKLING_CALLS_OF_MPI & called, path


def test_torch_loads_weights_only() -> None:
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only") == "True", f"{path}:{node.lineno}"


def test_every_test_folder_mirrors_a_room() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= {*NEEDS, "architecture", "support", "end_to_end", "cluster"}


def test_the_readme_shows_the_drawing() -> None:
    assert graph() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_tests_share_what_lies_in_support_only() -> None:
    """Else a test could not be moved, renamed or left out without breaking others."""
    for path in (ROOT / "tests").rglob("*.py"):
        borrowed = {name for name in imports(path) if re.match(r"tests\.(\w+\.)*test_", name)}
        assert not borrowed, f"{path}: imports {sorted(borrowed)}; move what is shared to tests/support"
