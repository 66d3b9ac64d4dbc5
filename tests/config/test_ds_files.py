"""The ds_configs that come with the project, and what a user's own may set in addition to the run file."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed.comm
import pytest
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from megatron_style.base.errors import UserError
from megatron_style.config.ds_file import zero_stage
from megatron_style.config.run import RunConfig
from megatron_style.engine.ds_config import check_one_home, clip_norm, complete_ds_config, monitor_of, read_ds_config
from megatron_style.schedule.stages import resolve_stage
from tests.support.runs import tiny_run

DS_FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
TWO_STAGES = ({"segment_length": 4, "epochs": 1, "micro_rows": 3}, {"segment_length": 8, "epochs": 1, "micro_rows": 1})

ADAM = {"type": "Adam", "params": {"lr": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {}}


def completed(user: dict[str, Any], run: RunConfig | None = None, *, data_parallel: int = 2) -> dict[str, Any]:
    run = run or tiny_run(deepspeed="ds.json")
    stages = [resolve_stage(run, index) for index in range(len(run.stages))]
    return complete_ds_config(user, run, stages, data_parallel=data_parallel)


@pytest.mark.parametrize("path", DS_FILES, ids=lambda path: path.stem)
class TestEveryFile:
    def test_leaves_the_rest_to_the_run_file(self, path: Path) -> None:
        assert set(read_ds_config(path)) <= {"zero_optimization", "fp16", "bf16", "data_types"}

    def test_half_precision_without_a_loss_scale_accumulates_in_float32(self, path: Path) -> None:
        user = read_ds_config(path)
        assert user.get("data_types", {}) == ({"grad_accum_dtype": "fp32"} if "bf16" in user else {})

    def test_is_what_its_name_says(self, path: Path) -> None:
        user, parts = read_ds_config(path), path.stem.split("_")
        half = [key for key in ("fp16", "bf16") if user.get(key, {}).get("enabled")] or ["fp32"]
        zero = DeepSpeedZeroConfig(**user["zero_optimization"])
        offloaded = [part for part in (zero.offload_optimizer, zero.offload_param) if part is not None]
        assert parts[:2] == [f"zero{zero_stage(user)}", *half]
        assert bool(offloaded) == (parts[-1] == "offload")
        assert all(part.device == "cpu" for part in offloaded)
        has_bf16_optimizer = path.stem == "zero1_bf16"  # DeepSpeed's, which cannot overlap
        assert bool(zero.overlap_comm) == (zero_stage(user) >= 1 and not has_bf16_optimizer)

    @pytest.mark.usefixtures("fp16_allowed")
    def test_deepspeed_takes_it_as_it_is_and_completed(self, path: Path) -> None:
        user = read_ds_config(path)
        DeepSpeedConfig(user | {"train_micro_batch_size_per_gpu": 1})
        config = DeepSpeedConfig(completed(user))
        assert config.zero_optimization_stage == zero_stage(user)
        assert config.float16_config.enabled == ("fp16" in path.stem)
        assert config.bfloat16_config.enabled == ("bf16" in path.stem)


def test_fp16_scales_the_loss_as_the_reference_does() -> None:
    """The reference scales the sum over the 9,216 tokens of a rank by 128 at first, and stops below 1e-4. The loss
    here is the mean over those tokens, so that the same gradients need a scale 9,216 times larger."""
    fp16 = read_ds_config(next(path for path in DS_FILES if "fp16" in path.stem))["fp16"]
    assert 64 < 2 ** fp16["initial_scale_power"] / 9216 <= 128
    assert 0.5e-4 < fp16["min_loss_scale"] / 9216 < 2e-4
    assert (fp16["loss_scale"], fp16["loss_scale_window"], fp16["hysteresis"]) == (0, 2048, 1)


def test_fp16_needs_a_device_that_has_it() -> None:
    with pytest.raises(UserError, match=r"ds\.json: fp16 is not available on this machine's cpu; use bf16 or fp32"):
        completed({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}})


@pytest.mark.usefixtures("fp16_allowed")
@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_half_precision_needs_zero(half: str) -> None:
    for user in ({half: {"enabled": True}}, {half: {"enabled": True}, "zero_optimization": {"stage": 0}}):
        with pytest.raises(UserError, match=rf"ds\.json: {half} with zero_optimization\.stage 0.*use stage 1"):
            completed(user)
    completed({half: {"enabled": False}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '{"zero_optimization": {"stage": 2, "overlap_com": true}}',
            "zero_optimization.overlap_com: .*'overlap_comm'",
        ),
        ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4; it must be 0, 1, 2 or 3"),
        (
            '{"zero_optimization": {"stage": "two"}, "bf16": {"enabled": true}}',
            "zero_optimization.stage is .two.",
        ),
        ('{"zero_optimization": {"stage": 1, "reduce_bucket_size": -1}}', "zero_optimization: .*-1"),
        ('{"zero_optimization": 2}', "zero_optimization is 2; it must be an object"),
        ('{"bf16": true}', "bf16 is true; it must be an object"),
        ('{"fp16": null}', "fp16 is null; it must be an object"),
        ('{"bf16": {"enabeld": true}}', "bf16.enabeld: not a key of DeepSpeed's; did you mean 'enabled'"),
        ('{"gradient_clipping": "x"}', 'gradient_clipping is "x"; it must be a number above 0'),
        ('{"bf16": {}, "bf16": {}}', "duplicate key 'bf16'"),
    ],
)
def test_bad_settings_are_reported_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"ds\.json: .*{told}") as caught:
        read_ds_config(path)
    assert "\n" not in str(caught.value)


class TestBatch:
    """Two stages of 24 tokens per rank: 6 rows of 4, three at once, and 3 rows of 8, one at once."""

    def test_left_out_it_is_derived(self) -> None:
        assert completed({}, tiny_run(stages=TWO_STAGES))["train_micro_batch_size_per_gpu"] == 1

    def test_agreeing_with_every_stage(self) -> None:
        user = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
        given = completed(user, tiny_run(stages=TWO_STAGES[:1]))
        assert "train_batch_size" not in given
        assert given["gradient_accumulation_steps"] == 1  # accumulation is driven by hand

    def test_auto(self) -> None:
        completed({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, tiny_run(stages=TWO_STAGES))

    @pytest.mark.parametrize(
        ("key", "given", "right"),
        [
            ("train_batch_size", 64, 12),
            ("train_micro_batch_size_per_gpu", 2, 3),
            ("gradient_accumulation_steps", 1, 2),
        ],
    )
    def test_fighting(self, key: str, given: int, right: int) -> None:
        run = tiny_run(stages=TWO_STAGES, deepspeed="ds.json")
        message = rf"ds\.json: {key} is {given}, but stage 1 .*6 rows of 4 per rank.*makes it {right}; leave it out"
        with pytest.raises(UserError, match=message):
            completed({key: given}, run)

    def test_right_for_one_stage_only(self) -> None:
        with pytest.raises(UserError, match=r"train_batch_size is 12, but stage 2 .*makes it 6"):
            completed({"train_batch_size": 12}, tiny_run(stages=TWO_STAGES))


class TestOneHome:
    def test_optimizer(self) -> None:
        with pytest.raises(UserError, match=r"ds\.json: has an optimizer, and so has the run file \(optimizer\.name\)"):
            check_one_home({"optimizer": ADAM}, tiny_run(deepspeed="ds.json", optimizer={"name": "nag"}))
        check_one_home({"optimizer": ADAM}, tiny_run())

    def test_scheduler(self) -> None:
        with pytest.raises(UserError, match=r"ds\.json: has a scheduler, and so has the run file"):
            check_one_home({"scheduler": WARMUP}, tiny_run(deepspeed="ds.json"))
        check_one_home({"scheduler": WARMUP}, tiny_run(optimizer={"learning_rate": None}))

    def test_somewhere(self) -> None:
        with pytest.raises(UserError, match=r"optimizer\.learning_rate: missing"):
            check_one_home({}, tiny_run(optimizer={"learning_rate": None}))

    @pytest.mark.parametrize(
        ("theirs", "ours", "expected"),
        [(None, None, 0.1), (None, 0.5, 0.5), (0.25, None, 0.25), (0.5, 0.5, 0.5), ("auto", 0.5, 0.5)],
    )
    def test_clipping(self, theirs: Any, ours: float | None, expected: float) -> None:
        user = {} if theirs is None else {"gradient_clipping": theirs}
        assert clip_norm(user, tiny_run(optimizer={"clip_norm": ours})) == expected

    def test_clipping_in_both(self) -> None:
        run = tiny_run(deepspeed="ds.json", optimizer={"clip_norm": 0.5})
        with pytest.raises(UserError, match=r"gradient_clipping \(1\.0\) conflicts with optimizer\.clip_norm \(0\.5\)"):
            clip_norm({"gradient_clipping": 1.0}, run)


class TestReading:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"zero_optimisation": {}}', r"zero_optimisation: not a key of DeepSpeed's.*mean 'zero_optimization'\?"),
            ('{"train_batchsize": 8}', r"did you mean 'train_batch_size'\?"),
            ('{"learning_speed_of_all": 8}', r"learning_speed_of_all: not a key of DeepSpeed's; remove it"),
            ('{"bf16": ', "not valid JSON"),
            ("# a comment\n{}", "not valid JSON"),
            ("[]", "holds a list; a DeepSpeed config is a JSON object"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "ds.json"
        path.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            read_ds_config(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)

    def test_no_file(self, tmp_path: Path) -> None:
        assert read_ds_config(None) == {}
        with pytest.raises(UserError, match="no such file; a DeepSpeed config in JSON is expected"):
            read_ds_config(tmp_path / "none.json")

    def test_what_the_run_file_does_not_know_is_passed_on(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"wall_clock_breakdown": True, "steps_per_print": 10}))
        given = completed(read_ds_config(path))
        assert given["wall_clock_breakdown"] is True
        assert given["steps_per_print"] == 10


def test_a_project_of_wandb_gets_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb` is a stand-in here."""
    begun: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, float], int]] = []
    stand_in = ModuleType("wandb")
    monkeypatch.setattr(stand_in, "init", lambda **given: begun.append(given), raising=False)
    monkeypatch.setattr(stand_in, "log", lambda data, step, commit: logged.append((data, step)), raising=False)
    monkeypatch.setattr(stand_in, "__spec__", ModuleSpec("wandb", None, origin="a stand-in"))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    run = tiny_run(watch={"wandb": "a-project"}, output={"path": "runs/mine"})
    monitor = MonitorMaster(get_monitor_config(completed({}, run)))
    assert monitor.enabled
    monitor.write_events([("loss/train", 2.5, 8)])
    assert begun == [{"project": "a-project", "group": "mine", "entity": None}]
    assert logged == [({"loss/train": 2.5}, 8)]


def test_wandb_has_one_home_and_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(watch={"wandb": "a-project"}, deepspeed="ds.json")
    with pytest.raises(UserError, match=r"ds.json: has wandb, and so has the run file \(watch.wandb\); remove one"):
        completed({"wandb": {"enabled": False}}, run)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for found in (None, ModuleSpec("wandb", None)):  # nothing, or the folder that W&B has left here
        monkeypatch.setattr("megatron_style.engine.ds_config.find_spec", lambda name, found=found: found)
        with pytest.raises(UserError, match=r"watch.wandb: needs the package wandb; `pip install wandb`, or remove"):
            completed({}, run)


def test_an_error_of_wandb_itself_is_recognised() -> None:
    error = type("UsageError", (Exception,), {"__module__": "wandb.errors.errors"})("No API key configured.")
    assert monitor_of(error) == "wandb"
    assert monitor_of(ValueError("")) is None
