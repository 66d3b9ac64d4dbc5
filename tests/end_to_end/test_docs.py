"""Files, tests, commands and flags that the documents name exist, and docs/README.md lists every page."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCES = ("megatron_style", "tests", "benchmarks", "launch")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def source_files() -> tuple[Path, ...]:
    return tuple(path for folder in SOURCES for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts)


@cache
def source_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in source_files() if path.suffix in (".py", ".sh"))


def names_a_file(reference: str) -> bool:
    """True if the reference is a path from the root or from the package, or the bare name of a source file."""
    if "/" not in reference:
        return any(path.name == reference for path in source_files()) or (ROOT / reference).is_file()
    return (ROOT / reference).exists() or (ROOT / "megatron_style" / reference).exists()


@every_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"(?<![\w./-])[\w/]+\.(?:py|sh|sbatch)\b", text)
    folders = re.findall(r"`((?:tests|benchmarks|launch|docs|run_configs|ds_configs)/[\w/.]*)`", text)
    placeholders = {name for name in folders if "NAME" in name}
    missing = sorted(name for name in {*files, *folders} - placeholders if not names_a_file(name))
    assert not missing, f"{page.name} names what does not exist: {missing}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != ROOT / "README.md"], ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    """The README's links are held by test_readme.py."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to what does not exist: {missing}"


@every_page
def test_tests_that_a_page_names_exist(page: Path) -> None:
    names = set(re.findall(r"\btest_\w+\b(?!\.py)", page.read_text(encoding="utf-8")))
    stems = {path.stem for path in source_files()}
    missing = sorted(name for name in names - stems if f"def {name}(" not in source_text())
    assert not missing, f"{page.name} names tests that do not exist: {missing}"


@every_page
def test_commands_that_a_page_shows_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"(?:python -m|--module) ((?:megatron_style|tests|benchmarks)[\w.]*)", text))
    missing = sorted(name for name in modules if importlib.util.find_spec(name.rstrip(".")) is None)
    assert not missing, f"{page.name} shows commands that do not exist: {missing}"


@every_page
def test_flags_of_our_commands_exist(page: Path) -> None:
    """Flags are read from the lines of code blocks, after the name of the command."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL))
    words = " ".join(re.findall(r"(?:python -m|--module) megatron_style\.\w+(.*)", blocks))
    flags = set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", words))
    missing = sorted(flag for flag in flags if f'"{flag}"' not in source_text())
    assert not missing, f"{page.name} shows flags that do not exist: {missing}"


def test_the_list_of_documents_is_complete() -> None:
    listed = re.findall(
        r"^- \[[^]]+\]\(([^)]+)\)", (DOCS / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | {"../CONTRIBUTING.md"}
