"""On a full disk a writer leaves neither its file nor a temporary one next to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_style.base.files import atomic_file, write_atomic

WRITERS = """
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megatron_style.base.events import SampleEvent
from megatron_style.config.run_file import save_run
from megatron_style.data.corpus import keep_tokenizer
from megatron_style.data.tokenizer import BpeTokenizer
from megatron_style.inference.measure import Measurement
from megatron_style.report import main as report
from megatron_style.supervision.lock import FolderLock
from megatron_style.journal.metrics_file import MetricsFile
from megatron_style.supervision.record import Status, write_status
from tests.support.runs import tiny_run
from tests.support.tiny import run_here, tiny_dictionary, write_tiny_model
from tests.support.written_runs import WrittenRun, write_run

disk, elsewhere = map(Path, sys.argv[1:])
event = SampleEvent(step=1, text="x" * 5000)
score = SimpleNamespace(nll=np.random.default_rng(1).random(5000))
measured = Measurement(np.arange(5000), None, score, mixed=None, processes=1, seconds=1.0, peak_bytes=1.0)
bpe = BpeTokenizer.train(["some text", "some more text"], vocab_size=264)
corpus_of = lambda tokenizer: SimpleNamespace(tokenizer=tokenizer)
run = write_run(elsewhere / "run", WrittenRun(()))


def write_report():
    done = run_here(report, run, "--output", disk / "report.html")
    assert "cannot be written: No space left on device" in done.err, done
    raise OSError(28, "told in one line")


writers = {
    "status.json": lambda: write_status(disk, Status("launch", "failed", 1, "now", "x" * 5000)),
    "run.yaml": lambda: save_run(tiny_run(), disk / "run.yaml"),
    "metrics.jsonl": lambda: MetricsFile(disk / "metrics.jsonl", last_step=0).write(event),
    "dict.txt": lambda: keep_tokenizer(corpus_of(tiny_dictionary()), disk),
    "tokenizer.json": lambda: keep_tokenizer(corpus_of(bpe), disk),
    "lock.json": lambda: FolderLock(disk / "lock.json").take(),
    "report.html": write_report,
    "model": lambda: write_tiny_model(disk / "model"),
    "nll.npz": lambda: measured.save_nll(disk / "nll.npz"),
}
for free in (0, 1):  # blocks of the disk: nothing fits, or a beginning
    fill = (disk / "fill").open("wb", buffering=0)
    try:
        while True:
            fill.write(bytes(4096))
    except OSError:
        fill.truncate(fill.tell() - 4096 * free)
    fill.close()
    before = sorted(path.name for path in disk.rglob("*"))
    for name, write in writers.items():
        if free and name in ("run.yaml", "dict.txt", "lock.json"):
            continue  # it fits
        try:
            write()
        except OSError as error:
            assert error.errno == 28, (name, error)
        else:
            raise AssertionError(f"{name} was written on a full disk")
        left = sorted(path.name for path in disk.rglob("*"))
        assert left == before, (name, left)
print("nothing is left")
"""


@pytest.mark.slow
def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=256k none {disk}"
    mounted = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False)
    if os.geteuid() != 0 or mounted.returncode != 0:
        pytest.skip("a small disk is mounted: run the tests as root, in a container with CAP_SYS_ADMIN")
    (tmp_path / "writers.py").write_text(WRITERS)
    script = f"{mount} && PYTHONPATH=. {sys.executable} {tmp_path}/writers.py {disk} {tmp_path}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "nothing is left\n", done.stderr


def write_half(path: Path) -> NoReturn:
    with atomic_file(path) as new:
        new.write_text("half")
        raise OSError(28, "full")


def test_the_file_before_stays_when_the_new_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "before")
    with pytest.raises(OSError, match="full"):
        write_half(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_atomic(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    write_atomic(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()
