"""`plan` as users run it: numbers for people and programs, a picture, and one line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_style.plan import main
from megatron_style.planning.hardware import GPUS
from tests.support.blends import blend_in, write_blend
from tests.support.small_run import write_small_run
from tests.support.tiny import Done, content, expect_refusal, run_here

ROOT = Path(__file__).parents[2]
RUN_FILES = sorted((ROOT / "run_configs").glob("*.yaml"))
WIKITEXT, LARGE = ROOT / "run_configs/wikitext103_shortformer.yaml", ROOT / "run_configs/shortformer_13b.yaml"
TBC = ROOT / "run_configs/tbc_shortformer.yaml"
NO_CORPUS = ("--set", "data.train=no/corpus/train")  # whatever this machine has prepared


def vocabulary_of(path: Path) -> str:
    return "267744" if path.stem.startswith("wikitext") else "50000"


def plan(path: Path, *argv: object) -> Done:
    return run_here(main, path, *NO_CORPUS, "--set", f"data.vocab_size={vocabulary_of(path)}", *argv)


def planned(path: Path, *argv: object) -> Any:
    done = plan(path, *argv, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # run files name their ds_config from there


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_run_file_has_a_plan(path: Path) -> None:
    gpus = 16 if path.stem == "mine" else 64  # its updates are too small for more
    told = planned(path, "--gpus", str(gpus))
    assert told["data"] * told["tensor"] == gpus
    for stage in told["stages"]:
        memory = stage["memory"]
        states = sum(memory["states"][part] for part in ("weights", "gradients", "optimizer"))
        assert states + memory["caches"] + memory["activations"]["peak"] <= memory["total"] < 200e9
        assert stage["recomputed"] < stage["unrecomputed"]
        assert stage["fits"]  # these files are made for GPUs of 80 GB or less
        assert stage["stage"]["micro_rows"] <= stage["largest_micro_rows"]
        assert stage["stage"]["rows"] % stage["largest_micro_rows"] == 0
        # At least two operations a parameter forward and four backward, but for those of the vocabulary.
        # A vocabulary of full width has many parameters that few tokens use.
        assert 6 * 0.3 * told["parameters"] < stage["flops_per_token"] < 6 * 3 * told["parameters"]
        assert 0 < stage["time"]["total"] < 60


def test_the_papers_run_in_words() -> None:
    done = plan(WIKITEXT, "--gpu", "v100-32gb")
    assert done.code == 0
    for words in ("246,933,504", "286,000", "ZeRO 3", "largest micro_rows", "saved by stages", "FLOPs per token"):
        assert words in done.out
    assert done.err.count("\n") == 1
    assert "does not exist yet" in done.err


def test_stages_save_time_and_one_stage_saves_none() -> None:
    staged = planned(ROOT / "run_configs/wikitext103_staged.yaml")["totals"]["saving"]
    shortformer = planned(WIKITEXT)["totals"]["saving"]
    baseline = planned(ROOT / "run_configs/wikitext103_baseline.yaml")["totals"]["saving"]
    assert staged > 0
    assert shortformer > 0
    assert baseline == pytest.approx(0, abs=1e-9)


def test_less_memory_leaves_fewer_rows() -> None:
    rows = [
        planned(WIKITEXT, "--gpu-memory", size)["stages"][0]["largest_micro_rows"] for size in ("2GB", "6GB", "80GB")
    ]
    assert rows[0] is None or rows[0] < rows[1]
    assert rows[1] < rows[2] == 72


def test_offloading_moves_states_to_the_host() -> None:
    here, there = (
        planned(LARGE, "--set", f"deepspeed=ds_configs/zero3_bf16{kind}.json")["stages"][0]["memory"]["states"]
        for kind in ("", "_offload")
    )
    assert (there["weights"], there["optimizer"], here["host"]) == (0, 0, 0)
    assert there["host"] >= here["weights"] + here["optimizer"]


def test_more_gpus_communicate_more_and_where_it_dominates_is_marked() -> None:
    counts = [8, 64, 512, 4096]
    argv = ("--gpu", "rtx-4090", "--gpus", ",".join(map(str, counts)))
    told = planned(WIKITEXT, *argv)
    scaling = told["scaling"]
    assert [scale["gpus"] for scale in scaling] == counts
    shares = [scale["communication_share"] for scale in scaling]
    assert shares == sorted(shares)
    assert [scale["dominates"] for scale in scaling] == [False, True, True, True]
    assert told["communication_dominates_from"] == 64
    marked = [line for line in plan(WIKITEXT, *argv).out.splitlines() if "communication dominates" in line]
    assert [line.split()[0] for line in marked] == ["64", "512", "4,096"]


def test_twice_the_efficiency_is_half_the_arithmetic() -> None:
    slow, fast = (planned(WIKITEXT, "--efficiency", share)["stages"][0]["time"] for share in ("0.2", "0.4"))
    assert slow["compute"] == pytest.approx(2 * fast["compute"])
    assert slow["data"] == fast["data"]


def test_epochs_of_a_corpus_that_is_not_there_have_no_length() -> None:
    told = planned(TBC)
    assert told["stages"][0]["extent"]["tokens"] == 20_650_000_000
    assert told["stages"][1]["extent"] == {"steps": None, "tokens": None}
    assert told["totals"]["seconds"] is None
    assert "unknown" in plan(TBC).out


def test_a_corpus_that_is_there_is_counted(tmp_path: Path) -> None:
    path = write_small_run(tmp_path, ranks=2)
    done = run_here(main, path, "--set", "stages=[{segment_length: 8, epochs: 3}]", "--gpus", 2, "--json")
    assert (done.code, done.err) == (0, "")
    told = json.loads(done.out)
    assert told["text"]["tokens"] == 1200
    assert told["totals"]["tokens"] == 3600
    assert told["totals"]["steps"] == 3 * 7  # 192 tokens a step
    assert sum(told["text"]["band_shares"]) == pytest.approx(1)
    assert told["text"]["band_shares"][0] == pytest.approx(10 / 37, abs=0.05)  # its words are all as frequent


@pytest.mark.parametrize(("name", "begin"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_the_picture(tmp_path: Path, name: str, begin: bytes) -> None:
    done = plan(WIKITEXT, "--gpus", "8,64", "--picture", tmp_path / name)
    assert done.code == 0
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_the_efficiency_of_a_run_that_was_measured(tmp_path: Path) -> None:
    """A plan of that very run, with it, takes the time that the run took."""
    path = write_small_run(tmp_path, ranks=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.yaml").write_text(path.read_text())
    seconds = 0.25  # for each of the first stage's steps, of 192 tokens
    events = [{"kind": "stage", "step": 1, "index": 0}]
    events += [
        {"kind": "train", "step": step, "tokens": 192 * step, "tokens_per_second": 192 / seconds} for step in (1, 2)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    done = run_here(main, path, "--gpus", 2, "--calibrate", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["stages"][0]["time"]["total"] == pytest.approx(seconds)
    assert 0 < told["efficiency"] < 0.01


def test_a_plan_takes_neither_torch_nor_deepspeed() -> None:
    code = "import sys, megatron_style.plan; assert not {'torch', 'deepspeed', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpu", "abacus"], ["--gpu abacus", "v100-32gb"]),
        (["--gpu-memory", "much"], ["--gpu-memory much", "32GB"]),
        (["--gpu-memory", "0GB"], ["--gpu-memory 0GB"]),
        (["--gpu-peak", "0"], ["--gpu-peak 0", "above 0, such as 989"]),
        (["--gpu-peak", "fast"], ["--gpu-peak fast"]),
        (["--gpus", "0"], ["--gpus 0", "numbers of at least 1"]),
        (["--gpus", "8,,64"], ["--gpus 8,,64"]),
        (["--gpus", "-8"], ["--gpus"]),
        (["--efficiency", "40"], ["--efficiency 40", "such as 0.4"]),
        (["--efficiency", "fast"], ["--efficiency fast"]),
        (["--efficiency", "0.4", "--calibrate", "x"], ["--calibrate", "not allowed with"]),
        (["--calibrate", "no/run"], ["--calibrate no/run", "no run.yaml in it"]),
        (["--picture", "plan.gif"], ["--picture plan.gif", ".png or .svg"]),
        (["--picture", "no/such/plan.png"], ["--picture", "a folder that exists"]),
        (["--set", "model.vocabulary.cutoffs=[20000, 300000]"], ["model.vocabulary.cutoffs", "267744"]),
        (["--set", "deepspeed=ds_configs/none.json"], ["ds_configs/none.json: no such file"]),
        (["--gpu", "v100-32gb", "--set", "deepspeed=ds_configs/zero1_bf16.json"], ["v100-32gb", "bf16"]),
        (["--unknown"], ["--unknown"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_mistake_is_one_line(argv: list[str], words: list[str]) -> None:
    expect_refusal(plan(WIKITEXT, *argv), *words)


def test_a_run_file_that_names_its_gpus_is_planned_for_them() -> None:
    named = planned(LARGE)
    assert named["data"] * named["tensor"] == 256
    assert planned(LARGE, "--gpus", "64")["data"] == 8
    assert planned(LARGE, "--set", "parallel.meant_for=512")["data"] == 64
    expect_refusal(plan(LARGE, "--set", "parallel.meant_for=12"), "meant_for (12) must be a multiple of", "tensor (8)")


@pytest.mark.parametrize("gpu", ["h200-141gb", "b200-180gb", "mi300x-192gb"])
def test_current_gpus_are_known_and_another_peak_can_be_given(gpu: str) -> None:
    usual = planned(LARGE, "--gpu", gpu)["stages"][0]["time"]["compute"]
    half = GPUS[gpu].half_peak / 2e12
    slower = planned(LARGE, "--gpu", gpu, "--gpu-peak", half)["stages"][0]["time"]["compute"]
    assert slower == pytest.approx(2 * usual)


def test_gpus_must_hold_the_tensor_parallel_ranks() -> None:
    expect_refusal(plan(LARGE, "--gpus", "12"), "--gpus 12", "multiples of parallel.tensor (8)")


def test_without_a_corpus_the_vocabulary_must_be_given() -> None:
    expect_refusal(run_here(main, WIKITEXT, *NO_CORPUS), "data.vocab_size: missing", "--set data.vocab_size=")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; it must be 0, 1, 2 or 3"),
        ({"zero_optimization": []}, "zero_optimization is []"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "big"}}, 'reduce_bucket_size is "big"'),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type Muon: DeepSpeed computes it differently"),
        ({"bf16": True}, "bf16 is true"),
    ],
)
def test_a_ds_config_that_says_nothing_clear(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings))
    expect_refusal(plan(WIKITEXT, "--set", f"deepspeed={path}"), "ds.json", words)


def test_a_run_that_cannot_calibrate(tmp_path: Path) -> None:
    path = write_small_run(tmp_path, ranks=1)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text(path.read_text())
    expect_refusal(run_here(main, path, "--calibrate", folder), "no metrics.jsonl in it")
    for text, words in (
        ("", "has not recorded any training yet"),
        ("{\n", "metrics.jsonl:1: holds '{'"),
        ('{"kind": "train", "step": 1, "tokens": 192, "tokens_per_second": 1e18}\n', "set --gpu to the GPU"),
    ):
        (folder / "metrics.jsonl").write_text(text)
        before = content(tmp_path)
        expect_refusal(run_here(main, path, "--calibrate", folder), words)
        assert content(tmp_path) == before


def test_the_plan_of_a_blend_shows_its_shares(tmp_path: Path) -> None:
    path = write_small_run(tmp_path, ranks=2)
    write_blend(tmp_path)
    blend = f"data.train={json.dumps(blend_in(tmp_path))}"
    done = run_here(main, path, "--gpus", "2", "--set", blend)
    assert done.code == 0, done.err
    assert "24 rows: news 16 (66.7%; wanted 66.7%), books 8 (33.3%; wanted 33.3%)" in done.out
    assert json.loads(run_here(main, path, "--gpus", "2", "--set", blend, "--json").out)["blend"][1].startswith(
        "8 rows"
    )
    none = run_here(main, path, "--gpus", "2", "--set", blend, "--set", "data.train.1.weight=0.01")
    expect_refusal(none, "stages.0: data.train: 'books' would get none of the 24 rows of an update")
