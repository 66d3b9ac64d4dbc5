"""A universal checkpoint equals its model bit for bit, when read by us and by a plain DeepSpeed engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import constants
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file
from torch import Tensor

from megatron_style.checkpoint.manifest import digest_of, read_manifest, read_sealed, write_sealed
from megatron_style.checkpoint.store import CheckpointStore
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.convert import main
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.optimizer import make_optimizer
from megatron_style.engine.session import distributed_session
from megatron_style.engine.zero_layout import MpuView
from megatron_style.formats import model_folder, universal
from megatron_style.formats.formats import open_model
from megatron_style.formats.source import ModelSource
from megatron_style.formats.transfer import transfer
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise, layouts_of, shard_of
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import StageSchedule
from tests.support.mutations import Payload
from tests.support.resuming import damage, make_run, on_ranks
from tests.support.tiny import content, expect_refusal, run_here, tiny_config, tiny_dictionary, tiny_model, weights_of
from tests.support.training import VOCAB_SIZE, write_corpus

pytestmark = pytest.mark.slow

LR = 0.003
STEPS = 3  # that a checkpoint of these tests has seen
OPTIMIZERS = {
    "nag": {"name": "nag", "learning_rate": {"peak": 0.1}},
    "adamw": {"name": "adamw", "weight_decay": 0.01, "decay": "all", "eps": 1e-6, "learning_rate": {"peak": 0.01}},
}
STATES = {"nag": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq", "step")}


# Ours -> universal -> ours


def write_folder(folder: Path, kind: str, optimizer: str | None) -> ModelFolderConfig:
    """A model folder as `convert export --optimizer` makes it."""
    training = {
        "optimizer": optimizer,
        "learning_rate": 0.25,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "epoch": 3,
    }
    data = tiny_config(kind).as_data() | {"step": 7, "training": training if optimizer else None}
    config = ModelFolderConfig.parse(data, source="tiny model")
    weights, generator = weights_of(tiny_model(config, torch.float32)), torch.Generator().manual_seed(5)

    def state(name: str) -> dict[str, Tensor]:
        shapes = {key: () if key == "step" else weights[name].shape for key in STATES[optimizer or ""]}
        dtype = torch.float64 if optimizer == "nag" else torch.float32  # as an import of the reference's momentum
        return {key: torch.randn(shape, generator=generator, dtype=dtype) for key, shape in shapes.items()}

    states = {name: state(name) for name in weights} if optimizer else {}
    source = ModelSource(
        folder, config, weights.__getitem__, tiny_dictionary, states.__getitem__ if optimizer else None
    )
    model_folder.write_atomically(folder, source)
    return config


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
@pytest.mark.parametrize("optimizer", ["nag", "adamw", None])
def test_there_and_back_every_bit_is_the_same(tmp_path: Path, kind: str, optimizer: str | None) -> None:
    write_folder(tmp_path / "model", kind, optimizer)
    assert run_here(main, "export-universal", tmp_path / "model", "--output", tmp_path / "there").code == 0
    flags = ["--optimizer"] if optimizer else []
    assert run_here(main, "export", tmp_path / "there", "--output", tmp_path / "back", *flags).code == 0
    before, after = content(tmp_path / "model"), dict(content(tmp_path / "back"))
    assert after.pop("certificate.json")
    assert after.keys() == before.keys()
    assert {name: after[name] for name in ("config.json", "dict.txt")} == {
        name: before[name] for name in ("config.json", "dict.txt")
    }
    for file in (name for name in before if name.endswith(".safetensors")):
        ours, again = (load_file(tmp_path / folder / file) for folder in ("model", "back"))
        assert ours.keys() == again.keys()
        assert all(ours[name].dtype == again[name].dtype and torch.equal(ours[name], again[name]) for name in ours)


def test_it_is_a_model_like_any_other(tmp_path: Path) -> None:
    config = write_folder(tmp_path / "model", "adaptive", "adamw")
    transfer(open_model(tmp_path / "model"), universal, tmp_path / "there")
    assert open_model(tmp_path / "there").config == config
    assert run_here(main, "verify", tmp_path / "model", tmp_path / "there").code == 0
    written = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert written == ["certificate.json", "dict.txt", "global_step7", "latest_universal", "universal.json"]


def test_views_are_written_alone(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "tied", None)
    source = open_model(tmp_path / "model")
    universal.write(tmp_path / "plain", source)
    views = replace(source, weight=lambda name: torch.cat([source.weight(name)] * 2)[: len(source.weight(name))])
    universal.write(tmp_path / "views", views)
    assert content(tmp_path / "plain") == content(tmp_path / "views")


# Ours -> universal -> a plain engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of NAG and of AdamW on TP2, and the same as universal ones."""
    folder = tmp_path_factory.mktemp("universal")
    write_corpus(folder)
    for optimizer in OPTIMIZERS:
        run = make_run(folder, optimizer, tensor=2, zero=2, steps=6, optimizer=OPTIMIZERS[optimizer])
        on_ranks(run, 2, halt_after=STEPS)
        transfer(open_model(run.output.path), universal, folder / f"{optimizer}_universal")
    return folder


def restored_engine(run: RunConfig, checkpoint: Path, topology: Topology) -> TrainingEngine:
    """Our own, with the checkpoint as we read it."""
    manifest = read_manifest(checkpoint)
    schedule = StageSchedule(run, corpus_tokens=manifest.corpus_tokens, data_parallel=topology.data.size)
    engine = build_engine(run, schedule, manifest.vocab_size, topology)
    CheckpointStore(run, topology).restore(checkpoint, manifest, engine, schedule)
    return engine


def plain_engine(
    run: RunConfig, zero: int, topology: Topology, *, groups: int = 1, sub_group_size: float = 1e9, **settings: Any
) -> Any:
    """As anybody may build one around this model, with other weights; nothing is loaded yet."""
    model = Shortformer(run.model, VOCAB_SIZE, topology.tensor)
    initialise(model, 99, topology.tensor)
    optimizer = make_optimizer(run.optimizer, model, on_cpu=False)
    (all_of_it,) = optimizer.param_groups
    params = all_of_it["params"]
    parts = [params[index::groups] for index in range(groups)]
    optimizer.param_groups = [all_of_it | {"params": part, "lr": LR} for part in parts]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": run.optimizer.clip_norm,
        "zero_optimization": {"stage": zero, "sub_group_size": sub_group_size},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
        **settings,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, mpu=MpuView(topology), dist_init_required=False
    )
    if zero == 3:
        for param in model.vocabulary.parameters():
            deepspeed.zero.register_external_parameter(model, param)
    return engine


def expect_same_tensors(engine: Any, source: ModelSource, topology: Topology, *, state: bool = True) -> None:
    layouts = layouts_of(engine.module)
    for name, param in engine.module.named_parameters():
        wanted = {"fp32": source.weight(name)}
        if state:
            assert source.state is not None
            wanted |= {key: tensor for key, tensor in source.state(name).items() if tensor.dim()}
        for key, tensor in wanted.items():
            mine = safe_get_full_fp32_param(param) if key == "fp32" else safe_get_full_optimizer_state(param, key)
            shard = shard_of(tensor, layouts[name], topology.tensor)
            assert torch.equal(mine.reshape(-1), shard.reshape(-1)), (name, key)


def batches(topology: Topology, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(topology.data.rank)
    rows = [torch.randint(0, VOCAB_SIZE, (2, 9), generator=generator) for _ in range(count)]
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def losses_of_ours(engine: TrainingEngine, topology: Topology, count: int = 4) -> list[float]:
    losses, cache = [], engine.model.empty_memory(2, 8)
    for inputs, targets in batches(topology, count):
        nll, cache, *_ = engine.forward(inputs, targets, cache, None)
        engine.accumulate(nll.mean(), is_last=True)
        engine.update(LR)
        losses.append(nll.mean().item())
    return losses


def losses_of_theirs(engine: Any, topology: Topology, count: int = 4) -> list[float]:
    losses, cache = [], engine.module.empty_memory(2, 8)
    for inputs, targets in batches(topology, count):
        nll, cache, *_ = engine(inputs, targets, cache, None)
        engine.backward(nll.mean())
        engine.step()
        losses.append(nll.mean().item())
    return losses


def go_on_in_both(run: RunConfig, zero: int, checkpoint: Path, folder: Path, settings: dict[str, Any]) -> None:
    """The loaded state is the checkpoint's, and so is what training makes of it."""
    with distributed_session(tensor=run.parallel.tensor) as topology:
        theirs = plain_engine(run, zero, topology, **settings)
        path, _ = theirs.load_checkpoint(str(folder))
        assert path is not None
        assert theirs.global_steps == STEPS
        expect_same_tensors(theirs, open_model(checkpoint), topology)
        steps = [state["step"] for state in theirs.optimizer.optimizer.state.values() if "step" in state]
        assert steps == [STEPS] * len(steps)
        assert bool(steps) == (run.optimizer.name == "adamw")
        ours = restored_engine(run, checkpoint, topology)
        assert losses_of_theirs(theirs, topology) == losses_of_ours(ours, topology)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "zero", "data"),
    [
        ("adamw", 3, 1),
        ("nag", 1, 2),
        *(pytest.param("adamw", *grid, marks=pytest.mark.sweep) for grid in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2))),
        pytest.param("nag", 2, 1, marks=pytest.mark.sweep),
    ],
)
def test_a_plain_engine_continues_as_ours_does(folder: Path, optimizer: str, zero: int, data: int) -> None:
    run = make_run(folder, "elsewhere", data=data, zero=zero, steps=6, optimizer=OPTIMIZERS[optimizer])
    checkpoint = folder / optimizer / "checkpoints" / f"global_step{STEPS}"
    run_ranks(data, go_on_in_both, run, zero, checkpoint, folder / f"{optimizer}_universal", {})


@pytest.mark.parametrize("zero", [1, 2])
def test_an_engine_with_tensor_parallelism_takes_its_shards(folder: Path, zero: int) -> None:
    """Of a vocabulary of 37, too, in bands that do not divide by two."""
    run = make_run(folder, "elsewhere", tensor=2, zero=zero, steps=6, optimizer=OPTIMIZERS["adamw"])
    checkpoint = folder / "adamw" / "checkpoints" / f"global_step{STEPS}"
    run_ranks(2, go_on_in_both, run, zero, checkpoint, folder / "adamw_universal", {})


@pytest.mark.sweep
def test_an_engine_with_several_groups_loads_them_all(folder: Path) -> None:
    run = make_run(folder, "elsewhere", zero=1, steps=6, optimizer=OPTIMIZERS["adamw"])
    checkpoint = folder / "adamw" / "checkpoints" / f"global_step{STEPS}"
    run_ranks(1, go_on_in_both, run, 1, checkpoint, folder / "adamw_universal", {"groups": 2})


def load_in_sub_groups(run: RunConfig, folder: Path) -> None:
    with distributed_session(tensor=1) as topology:
        engine = plain_engine(run, 3, topology, sub_group_size=500)
        engine.load_checkpoint(str(folder))
        expect_same_tensors(engine, open_model(folder), topology)
        losses_of_theirs(engine, topology, count=1)
        steps = [state["step"].item() for state in engine.optimizer.optimizer.state.values()]
        assert len(steps) > 1
        assert steps == [STEPS + len(steps)] * len(steps)


@pytest.mark.sweep
def test_zero_3_counts_a_step_once_for_each_of_its_sub_groups(folder: Path) -> None:
    """An error of DeepSpeed's, which lets all of them share what it has loaded. The documentation warns of it: when
    this test fails, the warning can go."""
    run = make_run(folder, "elsewhere", zero=3, steps=6, optimizer=OPTIMIZERS["adamw"])
    run_ranks(1, load_in_sub_groups, run, folder / "adamw_universal")


def load_weights_only(run: RunConfig, folder: Path) -> None:
    with distributed_session(tensor=1) as topology:
        engine = plain_engine(run, 3, topology)
        engine.load_checkpoint(str(folder), load_module_only=True)
        expect_same_tensors(engine, open_model(folder), topology, state=False)


def test_zero_3_takes_the_weights_of_nag(folder: Path) -> None:
    run_ranks(2, load_weights_only, make_run(folder, "elsewhere", data=2, zero=3, steps=6), folder / "nag_universal")


def only_load(run: RunConfig, zero: int, folder: Path) -> None:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        plain_engine(run, zero, topology).load_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("optimizer", "zero", "tensor", "told"),
    [("adamw", 0, 1, "KeyError: 'optimizer'"), ("nag", 3, 1, "KeyError: 0"), ("adamw", 3, 2, "exceeds dimension size")],
)
def test_what_deepspeed_cannot_load_fails_and_is_not_half_loaded(
    folder: Path, optimizer: str, zero: int, tensor: int, told: str
) -> None:
    run = make_run(folder, "elsewhere", tensor=tensor, zero=zero, steps=6, optimizer=OPTIMIZERS[optimizer])
    with pytest.raises(Exception, match=told):
        run_ranks(tensor, only_load, run, zero, folder / f"{optimizer}_universal")


def load_in_half_precision(run: RunConfig, folder: Path) -> None:
    with distributed_session(tensor=1) as topology:
        engine = plain_engine(run, 1, topology, bf16={"enabled": True})
        engine.load_checkpoint(str(folder))
        source = open_model(folder)
        expect_same_tensors(engine, source, topology)
        for name, param in engine.module.named_parameters():
            assert torch.equal(param, source.weight(name).bfloat16()), name


@pytest.mark.sweep
def test_in_half_precision_the_master_copy_is_complete(folder: Path) -> None:
    run = make_run(folder, "elsewhere", data=2, zero=1, steps=6, optimizer=OPTIMIZERS["adamw"])
    run_ranks(2, load_in_half_precision, run, folder / "adamw_universal")


def load_with_a_schedule(run: RunConfig, folder: Path) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 10, "warmup_type": "linear"}}
    with distributed_session(tensor=1) as topology:
        engine = plain_engine(run, 1, topology, scheduler=schedule)
        engine.load_checkpoint(str(folder))
        losses_of_theirs(engine, topology, count=1)
        assert engine.get_lr() == pytest.approx([STEPS / 10])


@pytest.mark.sweep
def test_a_schedule_of_deepspeeds_own_resumes_at_the_step(folder: Path) -> None:
    run = make_run(folder, "elsewhere", zero=1, steps=6, optimizer=OPTIMIZERS["adamw"])
    run_ranks(1, load_with_a_schedule, run, folder / "adamw_universal")


@pytest.mark.slow
def test_deepspeeds_own_converter_writes_the_same_tensors(folder: Path) -> None:
    run = make_run(folder, "own", data=2, zero=1, steps=2, optimizer=OPTIMIZERS["adamw"])
    on_ranks(run, 2)
    source, theirs = run.output.path / "checkpoints" / "global_step2", folder / "theirs" / "global_step2"
    words = ["--input_folder", source, "--output_folder", theirs, "--inject_missing_state"]
    words += ["--num_extract_workers", 1, "--num_merge_workers", 1]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    transfer(open_model(source), universal, folder / "ours")
    ours = folder / "ours" / "global_step2"
    names = sorted(str(path.relative_to(theirs)) for path in theirs.glob("zero/*/*.pt"))
    assert names == sorted(str(path.relative_to(ours)) for path in ours.glob("zero/*/*.pt"))
    for name in names:
        pair = [torch.load(side / name, weights_only=True) for side in (ours, theirs)]
        mine, other = (each["param"] if isinstance(each, dict) else each for each in pair)
        assert torch.equal(mine, other), name
    assert (folder / "ours" / "latest_universal").read_text() == (folder / "theirs" / "latest_universal").read_text()


def test_deepspeed_still_calls_things_by_these_names(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "adaptive", "adamw")
    universal.write(tmp_path / "there", open_model(tmp_path / "model"))
    inner = tmp_path / "there" / "global_step7"
    counters = torch.load(inner / "mp_rank_00_model_states.pt", weights_only=True)
    found = counters[constants.UNIVERSAL_CHECKPOINT_INFO][constants.UNIVERSAL_CHECKPOINT_VERSION_KEY]
    assert found == constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE
    table = torch.load(inner / "zero" / "vocabulary.bands.0.table.weight" / f"{constants.FP32_WEIGHT_KEY}.pt")
    assert table.keys() == {constants.PARAM, constants.CAT_DIM, constants.VOCAB_TENSOR}


# What it refuses

Damage = Callable[[Path], object]
WEIGHT = "global_step7/zero/blocks.1.up.weight/fp32.pt"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", "adaptive", "adamw")
    transfer(open_model(tmp_path / "model"), universal, tmp_path / "there")
    return tmp_path


def expect_nothing_written(here: Path, *words: object) -> None:
    before = content(here)
    expect_refusal(run_here(main, "export", here / "there", "--output", here / "out"), here / "there", *words)
    assert content(here) == before


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize(
    "file",
    [
        "universal.json",
        "dict.txt",
        WEIGHT,
        "global_step7/zero/vocabulary.clusters/exp_avg_sq.pt",
        "global_step7/zero/optimizer_state.pt",
        "global_step7/mp_rank_00_model_states.pt",
    ],
)
def test_a_damaged_checkpoint_is_named_in_one_line(here: Path, file: str, how: str) -> None:
    damage(here / "there" / file, how)
    expect_nothing_written(here, "is not a complete checkpoint of `convert export-universal`", file)


def put(file: str, value: object) -> Damage:
    """In place of a file, and the index made to agree, as somebody would who means it."""

    def change(folder: Path) -> None:
        torch.save(value, folder / file)
        index = read_sealed(folder / "universal.json")
        index["files"][file] = ((folder / file).stat().st_size, digest_of(folder / file))
        write_sealed(folder / "universal.json", index)

    return change


def without_a_weight(folder: Path) -> None:
    index = read_sealed(folder / "universal.json")
    del index["files"][WEIGHT]
    write_sealed(folder / "universal.json", index)


def with_another_model(folder: Path) -> None:
    index = read_sealed(folder / "universal.json")
    index["config"]["model"]["layers"] = 3
    write_sealed(folder / "universal.json", index)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (put(WEIGHT, {"param": torch.ones(3)}), "does not hold a tensor of [32, 16], as its model wants"),
        (put(WEIGHT, torch.ones(())), "does not hold a tensor of [32, 16]"),
        (put(WEIGHT, {"param": [1.0]}), "does not hold a tensor of [32, 16]"),
        (put(WEIGHT, [torch.ones(32, 16)]), "does not hold a tensor of [32, 16]"),
        (without_a_weight, "does not hold all weights of the model in its universal.json"),
        (with_another_model, "does not hold all weights of the model in its universal.json"),
    ],
)
def test_a_checkpoint_that_is_not_of_its_model_is_refused(here: Path, change: Damage, told: str) -> None:
    change(here / "there")
    expect_nothing_written(here, told)


def test_code_in_a_file_is_refused_and_does_not_run(here: Path) -> None:
    put(WEIGHT, {"param": Payload(here / "marker", "system")})(here / "there")
    expect_nothing_written(here, WEIGHT, "more than a tensor or not one, so it was not loaded")
    torch.load(here / "there" / WEIGHT, weights_only=False)
    assert (here / "marker").exists()  # or the trap would prove nothing


def test_an_output_that_is_there_already_is_left_alone(here: Path) -> None:
    before = content(here)
    expect_refusal(run_here(main, "export-universal", here / "model", "--output", here / "there"), "choose another")
    assert content(here) == before
