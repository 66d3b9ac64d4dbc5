"""Every kind of untrusted file, with functions that damage and read it.

A target is a line in `TARGETS`: a function that writes sound files into a folder and returns how to damage and read
them. The suite runs each for a few seeds, `python -m tests.fuzz` for as long as asked."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from string import ascii_letters, digits

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megatron_style.base.errors import UserError
from megatron_style.base.model_files import INDEX
from megatron_style.checkpoint.logical import LogicalReader
from megatron_style.checkpoint.manifest import FILE as MANIFEST
from megatron_style.checkpoint.manifest import Damaged, read_manifest
from megatron_style.checkpoint.store import CheckpointStore
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run_file import load_run
from megatron_style.data.index import DOCUMENT_COUNT, HEADER, MAGIC
from megatron_style.data.readers.chunks import ReadOptions, chunks_of
from megatron_style.data.readers.inputs import find_inputs
from megatron_style.data.readers.parse import read_texts
from megatron_style.data.store import open_store
from megatron_style.data.text import check_text_file
from megatron_style.data.tokenizer import BpeTokenizer, Tokenizer, load_tokenizer
from megatron_style.datastore.retrieval import Retrieval
from megatron_style.datastore.search import nearest
from megatron_style.datastore.store import open_datastore
from megatron_style.engine.build import build_engine
from megatron_style.engine.ds_config import check_one_home, complete_ds_config, read_ds_config
from megatron_style.engine.session import distributed_session
from megatron_style.formats import fairseq, model_folder, universal
from megatron_style.formats.formats import open_model
from megatron_style.formats.huggingface import folder as huggingface
from megatron_style.formats.source import ModelSource
from megatron_style.hosts.hosts import read_hostfile
from megatron_style.inference.decoder import Reading
from megatron_style.journal.metrics_file import MetricsFile
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.reporting.history import read_run
from megatron_style.reporting.page import page
from megatron_style.schedule.stages import StageSchedule
from megatron_style.supervision.lock import FolderLock, Owner
from megatron_style.supervision.process import this_process
from megatron_style.supervision.record import (
    RankRecord,
    Status,
    now,
    read_records,
    read_status,
    write_record,
    write_status,
)
from megatron_style.train import train
from tests.support.datastores import build, write_model_and_texts
from tests.support.input_files import write_input
from tests.support.mutations import BY_SUFFIX, Mutation, damaged, in_sealed_json, poisoned
from tests.support.resuming import make_run, on_ranks
from tests.support.runs import tiny_run
from tests.support.tiny import content, tiny_config, tiny_dictionary, tiny_model, weights_of, write_tiny_model
from tests.support.training import VOCAB_SIZE, write_corpus

ROOT = Path(__file__).parents[2]
HOSTS = "node1 slots=8\n10.0.0.1 slots=4 # old\nuser@node3 slots=1\n"
STEPS = 4


@dataclass(frozen=True)
class Target:
    """Valid files in a folder. `mutate` rewrites them, damages one and returns it; `read` reads that file and the ones
    that belong to it, as the commands do."""

    files: tuple[Path, ...]
    mutate: Callable[[random.Random], Path]
    read: Callable[[Path], object]


Make = Callable[[Path], Target]


def attempt(target: Target, seed: int) -> str | None:
    """Damage and read; return the refusal, or None if the file could be read. Anything else is a failure."""
    file = target.mutate(random.Random(seed))
    try:
        target.read(file)
    except (UserError, Damaged) as error:
        refusal = str(error)
        assert refusal.strip(), "an empty refusal"
        assert refusal.isprintable(), f"a refusal with control characters: {refusal!r}"
        assert len(refusal) < 5000, f"a refusal of {len(refusal)} characters"
        return refusal
    return None


def _target(
    folder: Path,
    patterns: Sequence[str],
    read: Callable[[Path], object],
    *,
    seal: Callable[[Path], object] = lambda file: None,
    mutations: Mapping[str, Sequence[Mutation]] | None = None,
) -> Target:
    """Make a target of the files in the folder now; those that match a pattern are damaged. `seal` makes the digests
    match the damage, so that more than the digests is tested; `mutations` replace those of some suffixes."""
    sound = {folder / name: held for name, held in content(folder).items() if (folder / name).is_file()}
    files = tuple(sorted(file for file in sound if any(file.match(pattern) for pattern in patterns)))
    marker = folder.with_name(f"{folder.name}.executed")
    choices = {**BY_SUFFIX, ".pt": [*BY_SUFFIX[".pt"], poisoned(marker)], **(mutations or {})}

    def mutate(rng: random.Random) -> Path:
        for path, held in sound.items():
            if not path.exists() or path.read_bytes() != held:
                path.write_bytes(held)
        file = rng.choice(files)
        if rng.random() < 0.02:
            file.unlink()
        else:
            file.write_bytes(rng.choice(choices[file.suffix])(sound[file], rng))
        seal(file)
        return file

    def read_unexecuted(file: Path) -> None:
        try:
            read(file)
        finally:
            assert not marker.exists(), "code in a file was executed"

    return Target(files, mutate, read_unexecuted)


def _use(path: Path) -> None:
    """Read a model with everything that belongs to it, as an export does."""
    source = open_model(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        output = Path(place) / "model"
        model_folder.write(output, source)
        model_folder.read(output).load()


def token_store(folder: Path) -> Target:
    """Make stores in the two layouts of an index."""
    write_corpus(folder, tokens=300)
    head = HEADER.pack(MAGIC, 1, 8, 3) + DOCUMENT_COUNT.pack(2)
    sizes = np.array([100, 150, 50], "<i4")
    offsets = np.array([0, 200, 500], "<i8")
    documents = np.array([0, 3], "<i8")
    (folder / "valid.idx").write_bytes(head + sizes.tobytes() + offsets.tobytes() + documents.tobytes())

    def read(file: Path) -> None:
        store = open_store(file.with_name(file.name.split(".")[0]), VOCAB_SIZE)
        assert int(store.line_sizes.sum()) == len(store.tokens)
        assert 0 <= int(store.tokens.min()) <= int(store.tokens.max()) < VOCAB_SIZE

    return _target(folder, ["*.idx", "*.bin", "*.checked.json"], read)


def input_file(folder: Path) -> Target:
    """Make an input of `prepare` in every format, and a saved dataset."""
    suffixes = (".txt", ".jsonl", ".parquet", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".txt.zst", ".arrow")
    files = [write_input(folder / f"x{suffix}", [f"text {n}" for n in range(200)]) for suffix in suffixes]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "x.arrow"}]}))

    def read(file: Path) -> None:
        options = ReadOptions(chunk_bytes=100)
        check_text_file(file)
        for chunk in chunks_of(find_inputs([folder if file.name == "state.json" else file]), options):
            read_texts(chunk, options)

    others = {file.suffix: [damaged] for file in files if file.suffix not in BY_SUFFIX}
    return _target(folder, ["x.*", "state.json"], read, mutations=others)


def run_file(folder: Path) -> Target:
    (folder / "run.yaml").write_bytes(_trained(1)["run/run.yaml"])

    def read(file: Path) -> None:
        StageSchedule(load_run(file), corpus_tokens=1200, data_parallel=1).plan(0)

    return _target(folder, ["run.yaml"], read)


def ds_config(folder: Path) -> Target:
    """Copy the project's own ds_configs, except the one that needs a GPU."""
    for path in (ROOT / "ds_configs").glob("*.json"):
        if "_fp16" not in path.name:
            shutil.copy(path, folder)

    def read(file: Path) -> None:
        run = tiny_run(deepspeed=str(file))
        user = read_ds_config(file)
        check_one_home(user, run)
        stages = StageSchedule(run, corpus_tokens=1200, data_parallel=1).stages
        complete_ds_config(user, run, stages, data_parallel=1)

    return _target(folder, ["*.json"], read)


def manifest(folder: Path) -> Target:
    """Make a run whose manifest has the right digest: only what it says is wrong, or the file `latest`."""
    mutations = {".json": [damaged, in_sealed_json, in_sealed_json, in_sealed_json]}
    _write(folder, _trained(1))
    run = folder / "run"

    def seal(file: Path) -> None:
        if file.name == MANIFEST:
            _seal(file)

    return _target(folder, [MANIFEST, "latest"], lambda _: _use(run), seal=seal, mutations=mutations)


def checkpoint(folder: Path) -> Target:
    """Make runs of three stages of ZeRO whose files are damaged, and have the right digests."""
    for zero in (0, 1, 3):
        _write(folder / f"zero{zero}", _trained(zero))

    def read(file: Path) -> None:
        _use(file.parent)
        LogicalReader(file.parent, read_manifest(file.parent)).counters()

    return _target(folder, ["*.pt"], read, seal=lambda file: _reseal(file.parent / MANIFEST))


def resumption(folder: Path) -> Target:
    """Make a run that was stopped in mid-stage, and an engine that is to continue it. Digests are right."""
    _write(folder, _stopped())
    run = make_run(folder, steps=2 * STEPS)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed reads these
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with distributed_session(tensor=1) as topology:  # it leaves a group open that existed before
        assert topology.is_first
    schedule = StageSchedule(run, corpus_tokens=1200, data_parallel=1)
    engine = build_engine(run, schedule, VOCAB_SIZE, topology)

    def seal(file: Path) -> None:
        if file.name == MANIFEST:
            _seal(file)
        else:
            _reseal(file.parent / MANIFEST)

    def read(file: Path) -> None:
        origin = CheckpointStore(run, topology).origin()
        assert origin is not None
        origin.load(engine, StageSchedule(run, corpus_tokens=1200, data_parallel=1, history=origin.history))

    mutations = {".json": [in_sealed_json]}
    return _target(folder, ["*.pt", "caches*.safetensors", MANIFEST], read, seal=seal, mutations=mutations)


def model_config(folder: Path) -> Target:
    write_tiny_model(folder / "model")
    return _target(folder, ["config.json"], lambda file: _use(file.parent))


def shards(folder: Path) -> Target:
    """A model folder in several files with an index."""
    model_folder.write(folder / "model", _trained_model(), shard_bytes=4000)
    return _target(folder, [INDEX], lambda file: _use(file.parent))


def safetensors(folder: Path) -> Target:
    """Make a model with the state of its optimizer."""
    model_folder.write(folder / "model", _trained_model())
    return _target(folder, ["*.safetensors"], lambda file: _use(file.parent))


def tokenizer(folder: Path) -> Target:
    for name in ("words", "pairs"):
        (folder / name).mkdir()
    tiny_dictionary().save(folder / "words")
    BpeTokenizer.train(["low lower lowest newer wider"] * 5, vocab_size=270).save(folder / "pairs")

    def read(file: Path) -> None:
        found = load_tokenizer(file.parent)
        ids = found.encode("low\nwide w1 <unk>  \x00")
        assert all(0 <= index < found.vocab_size for index in ids)
        found.decode(ids)
        found.decode(range(found.vocab_size))
        assert len(found.digest) == 16
        found.save(file.parent)

    return _target(folder, ["dict.txt", "tokenizer.json"], read)


def metrics(folder: Path) -> Target:
    """Make a record: a report names the line that is wrong, a resumed run uses what can be read."""
    for name in ("run.yaml", "metrics.jsonl"):
        (folder / name).write_bytes(_trained(1)[f"run/{name}"])

    def read(file: Path) -> None:
        try:
            page([read_run("run", folder)])
        finally:
            resumed = MetricsFile(file, last_step=STEPS)
            list(resumed.events())
            resumed.close()

    return _target(folder, ["metrics.jsonl"], read)


def records(folder: Path) -> Target:
    """Make the files that a killed launch leaves in a run's folder."""
    (folder / "ranks").mkdir()
    me = vars(this_process())
    for rank in range(2):
        write_record(folder, RankRecord(**me, rank=rank, launch="a", step=3, phase="training", time=now()))
    write_status(folder, Status("a", "stopped", 3, now()))
    gone = Owner(**(me | {"started": 1}), since=now())
    (folder / "lock.json").write_text(json.dumps(asdict(gone)))

    def read(file: Path) -> None:
        for seen in read_records(folder).values():
            assert set(seen.record.host) <= set(ascii_letters + digits + "_.-")
            assert seen.record.pid > 0
        read_status(folder)
        clock = count(0, 30)
        refusal = FolderLock(folder / "lock.json", clock=lambda: next(clock), sleep=lambda _: None).clear()
        if refusal:
            raise UserError(refusal)

    return _target(folder, ["*.json", "*.jsonl"], read)


def hostfile(folder: Path) -> Target:
    (folder / "hosts").write_text(HOSTS)
    return _target(folder, ["hosts"], read_hostfile)


def fairseq_file(folder: Path) -> Target:
    """Make a checkpoint of the reference, with the state of its optimizer and its dictionary."""
    fairseq.write(folder / "model.pt", _trained_model())
    tiny_dictionary().save(folder)
    return _target(folder, ["model.pt", "dict.txt"], lambda _: _use(folder / "model.pt"))


def universal_checkpoint(folder: Path) -> Target:
    """Make a checkpoint whose index has the right digests."""
    model = folder / "model"
    universal.write(model, _trained_model())
    patterns = ["fp32.pt", "momentum_buffer.pt", "dict.txt"]
    return _target(folder, patterns, lambda _: _use(model), seal=lambda _: _reseal(model / universal.INDEX))


def universal_index(folder: Path) -> Target:
    """Make a checkpoint whose index says odd things under the right digest."""
    universal.write(folder / "model", _trained_model())
    mutations = {".json": [damaged, in_sealed_json, in_sealed_json]}
    return _target(folder, [universal.INDEX], lambda file: _use(file.parent), seal=_seal, mutations=mutations)


def huggingface_folder(folder: Path) -> Target:
    """Make exports with each kind of tokenizer."""
    pairs = BpeTokenizer.train(["low lower lowest"] * 5, vocab_size=270)
    for name, kept in (("words", tiny_dictionary()), ("pairs", pairs)):
        config = ModelFolderConfig.parse(tiny_config().as_data() | {"vocab_size": kept.vocab_size}, source=name)
        weights = weights_of(tiny_model(config, torch.float32))
        huggingface.write(folder / name, ModelSource(folder, config, weights.__getitem__, partial(_same, kept)))
    patterns = ["config.json", "model.safetensors", "tokenizer.json", "dict.txt"]
    return _target(folder, patterns, lambda file: _use(file.parent))


def datastore(folder: Path) -> Target:
    """Make the datastore of a tiny model, which is searched after it was damaged."""
    write_model_and_texts(folder)
    assert build(folder).code == 0
    model = tiny_model(tiny_config(), torch.float32)

    def read(file: Path) -> None:
        store = open_datastore(file.parent)
        retrieval = Retrieval(store, partial(nearest, store.keys), k=3, temperature=1.0, weight=0.5)
        size = store.manifest.hidden_size
        (following,) = retrieval.predict_with(model)(Reading(torch.zeros(1, 16), torch.ones(1, size)))
        assert following.draw(0.5) >= 0

    return _target(folder / "store", ["manifest.json", "*.bin"], read)


TARGETS: Mapping[str, Make] = {
    make.__name__: make
    for make in (
        token_store,
        input_file,
        run_file,
        ds_config,
        manifest,
        checkpoint,
        resumption,
        model_config,
        safetensors,
        shards,
        tokenizer,
        metrics,
        records,
        hostfile,
        fairseq_file,
        universal_checkpoint,
        universal_index,
        huggingface_folder,
        datastore,
    )
}


@cache
def _trained(zero: int) -> Mapping[str, bytes]:
    """Return the files of a run of a few steps."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_corpus(folder)
        run_ranks(1, train, make_run(folder, zero=zero, steps=STEPS))
        return {name: held for name, held in content(folder).items() if (folder / name).is_file()}


@cache
def _stopped() -> Mapping[str, bytes]:
    """Return the files of a run that was stopped in mid-stage."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_corpus(folder)
        on_ranks(make_run(folder, steps=2 * STEPS), 1, halt_after=STEPS - 1)
        return {name: held for name, held in content(folder).items() if (folder / name).is_file()}


def _trained_model() -> ModelSource:
    """Return a small model with some momentum."""
    training = {"optimizer": "nag", "learning_rate": 0.0123, "momentum": 0.95, "epoch": 3}
    config = ModelFolderConfig.parse(tiny_config().as_data() | {"step": 7, "training": training}, source="tiny model")
    weights = weights_of(tiny_model(config, torch.float32))
    return ModelSource(
        Path("tiny"),
        config,
        weights.__getitem__,
        tiny_dictionary,
        lambda name: {"momentum_buffer": weights[name] / 3},
    )


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, held in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(held)


def _same(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


def _reseal(index: Path) -> None:
    """Make the index of a folder agree with the files in it."""
    data = json.loads(index.read_bytes().split(b"\n")[0])
    for name in data["files"]:
        if (index.parent / name).exists():
            held = (index.parent / name).read_bytes()
            data["files"][name] = [len(held), xxhash.xxh3_128(held).hexdigest()]
    index.write_text(json.dumps(data))
    _seal(index)


def _seal(index: Path) -> None:
    """Put the digest of the first line into the second."""
    if index.exists():
        first = index.read_bytes().split(b"\n")[0]
        index.write_bytes(first + b"\n" + xxhash.xxh3_128(first).hexdigest().encode() + b"\n")
