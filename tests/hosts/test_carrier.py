"""Variables on other hosts are in files that only the ranks can read, and only during the launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_style.base.errors import UserError
from megatron_style.hosts.carrier import launch_environment
from megatron_style.hosts.forwarded_environment import LAUNCH, carried_variables, own_variables
from megatron_style.hosts.hosts import Host, Unanswered, this_machine
from tests.support.launch import ROOT
from tests.support.observed import held_folders

VALUE = "s3cret $HOME \"x\" 'y' %n \\"


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the `.deepspeed_env` of a project's root, where the test is."""
    value = f"{os.getpid()} {tmp_path.name} {VALUE}"
    (tmp_path / ".deepspeed_env").write_text(f"# mine\n\nWANDB_API_KEY={value}\n")
    (tmp_path / "megatron_style").symlink_to(ROOT / "megatron_style")
    monkeypatch.chdir(tmp_path)
    return value


def lines_of(environment: dict[str, str]) -> dict[str, str]:
    """What the deepspeed launcher would write into command lines."""
    lines = Path(environment["DS_ENV_FILE"]).read_text().splitlines()
    return dict(line.split("=", maxsplit=1) for line in lines)


def test_a_host_holds_the_variables_as_long_as_the_launch_lasts(secret: str) -> None:
    with launch_environment((this_machine(),), "key") as environment:
        line = lines_of(environment)["WANDB_API_KEY"]
        found = re.fullmatch(r"\$\(cat (\S+)/WANDB_API_KEY\)", line)
        assert found
        folder = Path(found[1].replace("%n", "0"))
        file = folder / "WANDB_API_KEY"
        assert (oct(folder.stat().st_mode)[-3:], oct(file.stat().st_mode)[-3:]) == ("700", "600")
        command = f'export NAME="{line.replace("%n", "0")}"; printf %s "$NAME"'  # as DeepSpeed quotes it
        assert subprocess.check_output(["sh", "-c", command], text=True) == secret
    assert not folder.exists()
    assert not Path(environment["DS_ENV_FILE"]).exists()


def test_nothing_is_left_when_the_launcher_is_killed(secret: str) -> None:
    code = (
        "import time\nfrom megatron_style.hosts.carrier import launch_environment\n"
        "from megatron_style.hosts.hosts import this_machine\n"
        "with launch_environment((this_machine(),), 'key'):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout
    assert launcher.stdout.readline() == "held\n"
    assert len(held_folders(secret)) == 1
    launcher.kill()
    launcher.communicate()
    for _ in range(100):
        if not held_folders(secret):
            return
        time.sleep(0.1)
    raise AssertionError(held_folders(secret))


def test_what_a_killed_holder_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """Not what a living one holds, nor what may be about to be locked."""
    folders = {name: tmp_path / f"megatron_style-{name}" for name in ("killed", "living", "young")}
    holders = {name: start_holder(folders[name]) for name in ("killed", "living")}
    holders["killed"].kill()
    holders["killed"].communicate()
    folders["young"].mkdir()
    for name in ("killed", "living"):
        os.utime(folders[name], (1, 1))
    assert folders["killed"].is_dir()
    next_one = start_holder(tmp_path / "megatron_style-next")
    assert {name for name, folder in folders.items() if folder.exists()} == {"living", "young"}
    for holder in (holders["living"], next_one):
        holder.communicate()
        assert holder.returncode == 0


def start_holder(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "megatron_style.hosts.holder", str(folder)]
    holder = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin
    assert holder.stdout
    holder.stdin.write('{"A": "1"}\n')
    holder.stdin.flush()
    assert holder.stdout.readline() == "held\n"
    return holder


@pytest.mark.usefixtures("secret")
def test_a_host_that_does_not_take_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "words", lambda *_: ["sh", "-c", "echo no room >&2; exit 3"])
    with (
        pytest.raises(Unanswered, match=r"node1: did not take the variables of \.deepspeed_env: no room"),
        launch_environment((Host("node1", 1),), "key"),
    ):
        raise AssertionError("it was launched")


def test_ranks_of_this_machine_inherit_them(secret: str) -> None:
    with launch_environment((), "key") as environment:
        assert environment["WANDB_API_KEY"] == secret
        assert environment[LAUNCH] == "key"


def test_a_question_carries_variables_where_no_other_user_sees_them(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], str]] = []

    def run(words: list[str], *, input: str, **_: object) -> subprocess.CompletedProcess[str]:
        asked.append((words, input))
        return subprocess.CompletedProcess(words, 0, stdout="{}", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    Host("node1").ask("look", path="/")
    ((words, told),) = asked
    assert json.loads(told)["WANDB_API_KEY"] == secret
    assert not [word for word in words if "WANDB" in word or os.environ["PATH"] in word]


def test_the_users_own_file_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p")
    assert own_variables() == {"MLFLOW_TRACKING_PASSWORD": "p"}
    Path(".deepspeed_env").write_text('OMP_NUM_THREADS = 4 \nA="x y"\nB=\'\nC=a=b\nD=\n')
    own = {"OMP_NUM_THREADS": "4", "A": "x y", "B": "'", "C": "a=b", "D": "", "MLFLOW_TRACKING_PASSWORD": "p"}
    assert own_variables() == own
    assert carried_variables().items() >= own.items()


def test_the_file_may_be_in_the_projects_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".deepspeed_env").write_text("A=1\n")
    monkeypatch.setattr("megatron_style.hosts.forwarded_environment._PROJECT", tmp_path / "project")
    monkeypatch.chdir(tmp_path)
    assert own_variables()["A"] == "1"
    (tmp_path / ".deepspeed_env").write_text("A=2\n")
    assert own_variables()["A"] == "2"


@pytest.mark.parametrize("line", ["WANDB", "2A=b", "A B=c", "../A=b", "=b"])
def test_a_line_that_is_no_variable_is_refused_unseen(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message does not repeat it: it may be a secret."""
    monkeypatch.chdir(tmp_path)
    Path(".deepspeed_env").write_text(f"A=1\n{line}\n")
    with pytest.raises(UserError, match=r"^\.deepspeed_env, line 2: not a variable; expected NAME=value$"):
        own_variables()
