"""A run records every figure once, in `metrics.jsonl` and, made from it, in TensorBoard."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.api_pb2 import DataType
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from megatron_style.base.launches import read_launches
from megatron_style.config.run import RunConfig, WatchConfig
from megatron_style.engine.engine import LossShare, TrainingEngine, Update
from megatron_style.inference.held_out import HeldOut
from megatron_style.journal import metrics_file as metrics
from megatron_style.journal.journal import Journal
from megatron_style.journal.tensorboard import code_block
from megatron_style.journal.work import _NAMES, FlopCounter, peak_flops
from megatron_style.parallel.device.phase_times import PhaseTimes
from megatron_style.parallel.topology import Topology
from megatron_style.planning.hardware import GPUS
from megatron_style.planning.timing import training_flops_per_token
from megatron_style.schedule.stages import StageSchedule
from tests.support.boards import LINES, board, events, expect_points
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE

pytestmark = pytest.mark.slow

STAGES = [{"segment_length": 8, "steps": 9}, {"segment_length": 24, "steps": 7}]
KEYS = {
    "stage": "index segment_length cache_length rows micro_rows tokens seconds flops flops_per_token opens",
    "train": " ".join(LINES["train"]),
    "valid": "loss perplexity tokens seconds flops by_position text_digest scored_tokens",
    "sample": "tokens prompt text",
    "stage_end": "index tokens stage_tokens stage_seconds",
}


def a_run(folder: Path) -> RunConfig:
    return tiny_run(stages=STAGES, tokens_per_batch=192, output={"path": str(folder / "run")})


def schedule_of(run: RunConfig) -> StageSchedule:
    return StageSchedule(run, corpus_tokens=1200, data_parallel=1)


class Driver:
    """The training loop without the training: what a step gives and takes is a function of its number."""

    def __init__(self, run: RunConfig, *, first_step: int = 0) -> None:
        self.run, self.schedule, self.told = run, schedule_of(run), list[dict[str, float]]()
        engine = SimpleNamespace(
            model=SimpleNamespace(vocab_size=VOCAB_SIZE), device=torch.device("cpu"), dtype=torch.float32,
            zero_stage=0, log_to_monitors=self.told.append, times=PhaseTimes(torch.device("cpu")),
        )  # fmt: skip
        self.step = first_step
        self.journal = Journal(run, self.schedule, cast(TrainingEngine, engine), Topology(), first_step=first_step)

    def go(self, until: int, *, every: int = 2, saves: tuple[int, ...] = ()) -> Driver:
        for step in range(self.step, until):
            plan, done, ends = self.schedule.plan(step), step + 1, self.schedule.closes_stage(step)
            if self.schedule.opens_stage(step):
                self.journal.stage_opens(plan)
            show = done % every == 0 or ends or done in saves
            update = Update(0.1 / done, 1.5 + step, applied=done != 5)
            # Where nothing is shown there is no loss to look at.
            loss = LossShare(torch.tensor(5 / done), {}) if show or not update.applied else cast(LossShare, None)
            self.journal.step(plan, loss, update, 0.25 + step / 8, show=show)
            if done % 4 == 0 or ends:
                self.journal.held_out(done, HeldOut(3 / done, 20 / done, (1.0, 2.5 / done), "what", f"is # {done}"))
            if ends:
                self.journal.stage_closes(plan)
            if done in saves:
                self.journal.flush(done)
        self.step = until
        return self

    def finish(self) -> None:
        self.journal.__exit__(None, None, None)


@pytest.fixture
def whole(tmp_path: Path) -> RunConfig:
    run = a_run(tmp_path / "whole")
    Driver(run).go(16).finish()
    return run


def texts(run: RunConfig, tag: str) -> list[tuple[int, str]]:
    points = board(run).Tensors(f"{tag}/text_summary")
    return [(point.step, point.tensor_proto.string_val[0].decode()) for point in points]


def test_every_line_has_what_readers_rely_on(whole: RunConfig) -> None:
    for event in events(whole):
        assert set(event) == {"kind", "step", *KEYS[event["kind"]].split()}
    assert [event["step"] for event in events(whole, "train")] == [2, 4, 5, 6, 8, 9, 10, 12, 14, 16]
    assert [event["skipped"] for event in events(whole, "train")][:4] == [0, 0, 1, 1]


def test_totals_are_what_the_steps_add_up_to(whole: RunConfig) -> None:
    schedule = schedule_of(whole)
    steps = [schedule.plan(step) for step in range(16)]
    costs = [
        round(training_flops_per_token(whole.model, VOCAB_SIZE, segment_length=L, cache_length=L)) for L in (8, 24)
    ]
    assert [event["flops_per_token"] for event in events(whole, "stage")] == costs
    for event in events(whole, "train", "valid", "stage"):
        done = event["step"] - (event["kind"] == "stage")
        assert event["tokens"] == sum(plan.tokens for plan in steps[:done])
        assert event["flops"] == sum(plan.tokens * costs[plan.stage.index] for plan in steps[:done])
        assert event["seconds"] == sum(0.25 + step / 8 for step in range(done))
    lines = events(whole, "train")
    for before, line in pairwise(lines):
        seconds = line["seconds"] - before["seconds"]
        assert line["tokens_per_second"] == (line["tokens"] - before["tokens"]) / seconds
        assert line["flops_per_second"] == (line["flops"] - before["flops"]) / seconds
    assert [event["stage_seconds"] for event in events(whole, "stage_end")] == [
        sum(0.25 + step / 8 for step in steps) for steps in (range(9), range(9, 16))
    ]


def test_tensorboard_equals_the_metrics(whole: RunConfig) -> None:
    expect_points(whole)


def test_texts_are_there(whole: RunConfig) -> None:
    assert [(step, text.split("\n")[-2]) for step, text in texts(whole, "valid/sample")] == [
        (event["step"], event["text"]) for event in events(whole, "sample")
    ]
    assert texts(whole, "stage/opens") == [(event["step"], event["opens"]) for event in events(whole, "stage")]
    ((_, config),) = texts(whole, "run/config")
    assert (whole.output.path / "run.yaml").read_text() in config


def test_hparams_read_back(whole: RunConfig) -> None:
    content = board(whole).PluginTagToContent("hparams")
    found = {tag.split("/")[1]: HParamsPluginData.FromString(data) for tag, data in content.items()}
    settings = dict(found["session_start_info"].session_start_info.hparams)
    assert settings["settings.model.layers"].number_value == 2
    assert settings["settings.stages.1.segment_length"].number_value == 24
    assert settings["settings.optimizer.learning_rate.peak"].number_value == 0.1
    assert settings["settings.model.vocabulary.cutoffs"].string_value == "[10, 20]"
    metrics = [info.name.tag for info in found["experiment"].experiment.metric_infos]
    assert metrics == ["loss/valid", "perplexity/valid", "speed/tokens_per_second"]
    assert found["session_end_info"].session_end_info.status == 1  # success
    assert settings["settings.model.cache"].bool_value is True
    assert settings["settings.model.cache"].WhichOneof("kind") == "bool_value"
    assert settings["lengths"].string_value == "8, 24"
    assert settings["parameters"].number_value > 1000
    assert settings["ranks"].number_value == 1
    columns = {info.name: DataType.Name(info.type) for info in found["experiment"].experiment.hparam_infos}
    assert columns["settings.model.cache"] == "DATA_TYPE_BOOL"
    assert sorted(columns)[:5] == ["layers", "learning_rate", "lengths", "parameters", "ranks"]


def test_one_log_folder_has_one_axis_and_is_named_by_the_run(whole: RunConfig, tmp_path: Path) -> None:
    logs = EventMultiplexer().AddRunsFromDirectory(str(whole.output.path / "tensorboard"))
    assert list(logs.Runs()) == ["run"]
    assert not (whole.output.path / "tensorboard_by_tokens").exists()
    both = whole.model_copy(update={"watch": WatchConfig(by_tokens=True)})
    Driver(both).go(16).finish()
    expect_points(both)
    logs = EventMultiplexer().AddRunsFromDirectory(str(whole.output.path / "tensorboard_by_tokens"))
    assert list(logs.Runs()) == ["run"]


def test_losses_come_first_and_every_chart_of_the_layout_has_its_points(whole: RunConfig) -> None:
    found = board(whole)
    tags = found.Tags()["scalars"]
    assert min(tag.split("/")[0] for tag in tags) == "loss"
    (config,) = found.Tensors("custom_scalars__config__")
    layout = Layout.FromString(config.tensor_proto.string_val[0])
    charts = {chart.title: chart.multiline.tag for category in layout.category for chart in category.chart}
    for title, patterns in charts.items():
        assert any(re.search(pattern, tag) for pattern in patterns for tag in tags), title
    assert "loss, nats per token" in charts


def test_a_run_in_a_folder_of_another_name_has_its_points_once(whole: RunConfig, tmp_path: Path) -> None:
    renamed = whole.output.path.rename(tmp_path / "renamed")
    run = whole.model_copy(update={"output": whole.output.model_copy(update={"path": renamed})})
    Driver(run, first_step=16).finish()
    logs = EventMultiplexer().AddRunsFromDirectory(str(renamed / "tensorboard"))
    assert list(logs.Runs()) == ["renamed"]
    expect_points(run)


def test_a_launch_leaves_a_line(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    Driver(run).go(4, saves=(4,)).finish()
    Driver(run, first_step=4).finish()
    first, second = read_launches(run.output.path / "launches.jsonl")
    assert (first.step, second.step) == (0, 4)
    assert (first.data, first.tensor, first.zero, first.precision, first.device) == (1, 1, 0, "fp32", "cpu")
    assert (first.total_steps, first.corpus_tokens) == (16, 1200)
    assert first.began is not None


def test_a_run_that_will_resume_has_not_ended_its_session(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    Driver(run).go(4).journal.__exit__(ValueError, ValueError(), None)
    assert not any("session_end" in tag for tag in board(run).PluginTagToContent("hparams"))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("saved", [0, 1, 5, 7, 9, 10, 16])
def test_a_killed_run_resumes_as_if_nothing_had_happened(
    tmp_path: Path, whole: RunConfig, saved: int, marked: bool
) -> None:
    """Its TensorBoard was not closed, its last line is torn, and what it did after the checkpoint is done again. The
    old files of events are kept where a mark says that they are complete, and written anew otherwise."""
    run = a_run(tmp_path)
    killed = Driver(run).go(min(16, saved + 3), saves=(saved,))
    mark = run.output.path / "tensorboard" / "complete.json"
    if not marked:
        mark.unlink(missing_ok=True)
    old = sorted((run.output.path / "tensorboard").rglob("events*"))
    with (run.output.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3, "lo')
    Driver(run, first_step=saved).go(16).finish()
    assert without_saves(run, saved) == without_saves(whole, saved)
    expect_points(run)
    assert all(path.exists() == (marked and saved > 0) for path in old)
    killed.journal._metrics.close()


def without_saves(run: RunConfig, saved: int) -> list[dict[str, Any]]:
    """A line more at the checkpoint cuts an interval in two; memory is this process's own."""
    kept = [event for event in events(run) if (event["kind"], event["step"]) != ("train", saved)]
    own = ("memory_bytes", "tokens_per_second", "flops_per_second")
    return [{key: value for key, value in event.items() if key not in own} for event in kept]


def test_a_start_reads_only_the_end_of_a_long_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path)
    Driver(run).go(12, every=1, saves=(10,)).finish()
    read: list[bytes] = []
    plain = metrics._event
    monkeypatch.setattr(metrics, "_event", lambda line: (read.append(line), plain(line))[1])
    Driver(run, first_step=10)
    assert 0 < len(read) <= 10  # of 20 lines: those of steps 11 and 12, and back to the last of step 10


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    Driver(run).go(6).finish()
    path = run.output.path / "metrics.jsonl"
    before = path.read_text()
    path.write_bytes(path.read_bytes() + b"\0\0\0\xff\n")
    Driver(run, first_step=6).finish()
    assert path.read_text() == before


def test_lines_of_an_older_version_are_carried_on(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    Driver(run).go(6).finish()
    path = run.output.path / "metrics.jsonl"
    newer = "stage skipped seconds stage_seconds flops flops_per_second memory_bytes by_position cache_length opens"
    lines = [{k: v for k, v in event.items() if k not in newer.split()} for event in events(run)]
    path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    Driver(run, first_step=6).go(16).finish()
    assert [p.step for p in board(run).Scalars("loss/train")] == [event["step"] for event in events(run, "train")]
    assert [p.step for p in board(run).Scalars("progress/flops")] == [8, 9, 10, 12, 14, 16]


def test_the_time_left_counts_what_the_last_stage_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a steady speed in FLOPs it is exact, although the second stage's tokens cost more."""
    run = a_run(tmp_path)
    driver = Driver(run)
    work = FlopCounter(run.model, VOCAB_SIZE, driver.schedule)
    speed = work.before(16) / 1000  # the whole run takes 1000 seconds
    for step in range(12):
        plan = driver.schedule.plan(step)
        flops = plan.tokens * work.per_token[plan.stage.index]
        loss = LossShare(torch.ones(()), {})
        driver.journal.step(plan, loss, Update(0.1, 1.0, applied=True), flops / speed, show=True)
        left = round(1000 - work.before(step + 1) / speed)
        minutes, seconds = divmod(left, 60)
        assert capsys.readouterr().err.splitlines()[-1].endswith(f", 0:{minutes:02d}:{seconds:02d} left")


def test_monitors_of_deepspeed_are_mentioned(tmp_path: Path) -> None:
    driver = Driver(a_run(tmp_path)).go(4)
    told = {tag for values in driver.told for tag in values}
    assert {"loss/train", "perplexity/valid", "speed/tokens_per_second"} <= told


def test_a_peak_is_shown_only_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    assert peak_flops(gpu, torch.bfloat16, ranks=8) == 8 * 312e12
    assert peak_flops(gpu, torch.float32, ranks=8) == 8 * 19.5e12
    assert peak_flops(torch.device("cpu"), torch.bfloat16, ranks=8) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 PCIe")
    assert peak_flops(gpu, torch.bfloat16, ranks=8) is None
    assert set(_NAMES.values()) <= set(GPUS)


@pytest.mark.parametrize(
    "text",
    [
        "```\n# a heading\n[a link](https://example.org)\n<b>bold</b>\n",
        "`````\n\n````\n# a heading\n```\n<b>bold</b>",
        "~~~\n```\n\n# a heading\n\n~~~\n[a link](https://example.org)",
        "\x02wzxhzdk:0\x03\r```\r# a heading\x1b[2J",
        "    ```\n<b>bold</b>",
    ],
)
def test_a_sample_cannot_leave_its_code_block(text: str) -> None:
    """As TensorBoard itself renders it."""
    page = markdown_to_safe_html(f"{code_block(text, '')}\n\ncontinues:\n\n{code_block('the end', '')}")
    outside = re.sub(r"<pre><code>.*?</code></pre>", "", page, flags=re.DOTALL)
    assert outside.split() == ["<p>continues:</p>"]
    assert not set(page) & {"\x02", "\x03", "\x1b", "\r"}
