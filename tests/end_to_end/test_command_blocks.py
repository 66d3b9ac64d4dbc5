"""Every command block of the README and of docs/ works, on a corpus of 200 lines.

The README's block for one's own text runs word for word, in a fresh shell and under the launcher, but for the number of
steps and the size of the model. The commands of all other blocks run in this process on its corpus and model; trainings
at the paper's size, and what only a cluster has, are checked as far as they can be without it.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_style.config.run_file import load_run
from megatron_style.config.train_arguments import parse_train_arguments
from megatron_style.schedule.stages import stages_of
from tests.support.command_blocks import (
    PAGES,
    SHORT,
    Block,
    blocks,
    fresh_environment,
    make_world,
    own_text_block,
    recorded,
    run_block,
)
from tests.support.in_child import in_child

pytestmark = pytest.mark.slow
OTHERS = [block for block in blocks() if block.text != own_text_block()]
SCRIPTS_WITH_TESTS = ("launch/quickstart.sh", "launch/test.sh")  # test_readme.py runs one, and the other runs the tests


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the README's block, and return its folder and output."""
    for library in ("pyarrow", "zstandard"):
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    launch = "./launch/local.sh run_configs/mine.yaml"
    assert own_text_block().count(launch) == 1
    output = run_block(own_text_block().replace(launch, f"{launch} {SHORT}"), folder, fresh_environment(folder))
    return folder, output


@pytest.fixture(scope="module")
def world(trained: tuple[Path, str]) -> Path:
    """Give the corpus and the model the names that the documents use."""
    folder, _ = trained
    for name in ("sotu", "wikitext-103"):
        (folder / "data" / name).symlink_to("mine")
    for name in ("quickstart", "shortformer", "baseline"):
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / name)
    shutil.copytree(folder / "data" / "mine", folder / "WIKITEXT-2")
    for split in ("bin", "idx"):
        shutil.copy(folder / "WIKITEXT-2" / f"valid.{split}", folder / "WIKITEXT-2" / f"test.{split}")
    (folder / "RUN.yaml").symlink_to("run_configs/mine.yaml")
    for name in ("HOSTFILE", "hosts"):
        (folder / name).write_text("localhost slots=2\n")
    return folder


def test_the_block_for_your_own_text_works_in_a_fresh_shell(trained: tuple[Path, str]) -> None:
    folder, output = trained
    assert "an update: 2 ranks x 1,024 = 2,048 tokens" in output
    assert re.search(r"finished: held-out perplexity [\d.,]+ after step 4", output)
    assert "unknown share" in output
    assert (folder / "models" / "mine" / "config.json").is_file()
    assert (folder / "runs" / "mine" / "report.html").is_file()


def test_the_three_commands_that_a_run_names_at_its_end_work(trained: tuple[Path, str]) -> None:
    folder, output = trained
    commands = re.findall(r"^  python -m megatron_style\.(\w+) (.*)$", output.partition("; next:\n")[2], re.MULTILINE)
    assert [name for name, _ in commands] == ["evaluate", "generate", "report"]
    for name, words in commands:
        run_here(name, words.split(), folder)


@pytest.mark.parametrize("block", OTHERS, ids=str)
def test_the_commands_of_a_block_work(block: Block, world: Path, tmp_path: Path) -> None:
    count = 0
    for words in recorded(block.text, world, tmp_path):
        count += 1
        run_words(words, world)
    assert count


def run_words(words: list[str], folder: Path) -> None:
    program, *arguments = words
    if program in SCRIPTS_WITH_TESTS:
        return
    if program == "launch/supervise.sh":
        from megatron_style.supervise import parse_args, spec_of

        with at(folder, "supervise", arguments):
            assert spec_of(parse_args()).run.output.path
        return
    assert program in ("python", "deepspeed")
    flag, module, *rest = arguments
    assert (program, flag) in (("python", "-m"), ("deepspeed", "--module"))
    name = module.removeprefix("megatron_style.")
    if name == "train":
        check_training(rest, folder)
    elif name == "doctor":
        check_doctor(rest, folder)
    elif name == "reproduce":
        corpus = [] if "--corpus" in rest else ["--corpus", "WIKITEXT-2"]
        run_here(name, [*rest, *corpus, "--emit"], folder)
    else:
        run_here(name, rest, folder)


def check_training(arguments: list[str], folder: Path) -> None:
    """A training at the paper's size is read, checked and divided into steps, as far as that needs no corpus."""
    with at(folder, "train", arguments):
        given = parse_train_arguments()
        run = load_run(given.run_file, given.settings)
        assert stages_of(run)


def check_doctor(arguments: list[str], folder: Path) -> None:
    """The 13B run is rehearsed on fewer ranks and as a small model; hosts of a hostfile need not answer here."""
    if "--rehearse" not in arguments:
        run_here("doctor", arguments, folder, codes=(0, 1))
        return
    smaller = [
        "model.layers=1",
        "model.hidden_size=64",
        "model.heads=8",
        "model.ffn_size=64",
        "data.tokens_per_batch=1024",
    ]
    stages = "stages=[{segment_length: 128, steps: 4}]"
    more = [word for setting in (*smaller, stages) for word in ("--set", setting)]
    arguments = ["16" if word == "512" else word for word in arguments]
    in_child(run_here, "doctor", [*arguments, *more], folder)  # a rehearsal changes DeepSpeed's global state


def run_here(name: str, arguments: list[str], folder: Path, codes: tuple[int, ...] = (0,)) -> None:
    """Run a command in this process."""
    main = importlib.import_module(f"megatron_style.{name}").main
    code = None
    with at(folder, name, arguments):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert (code or 0) in codes, f"{name} {arguments}: exit code {code}"


class at:
    """Be in a folder, with the words of a command, and two typed lines as standard input."""

    def __init__(self, folder: Path, name: str, arguments: list[str]) -> None:
        self._folder = folder
        self._patches = [
            patch.object(sys, "argv", [name, *arguments]),
            patch.object(sys, "stdin", io.StringIO("Once upon\n/quit\n")),
        ]

    def __enter__(self) -> None:
        self._before = Path.cwd()
        os.chdir(self._folder)
        for each in self._patches:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()
        os.chdir(self._before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_with_a_command_is_marked_as_one(page: Path) -> None:
    """So that no command escapes the tests above."""
    fences = re.findall(r"```(\w*)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    command = re.compile(r"^\s*(python -m|deepspeed|\./launch/|torchrun|mpirun|srun|pip install)", re.MULTILINE)
    assert not [text for language, text in fences if language != "bash" and command.search(text)]
