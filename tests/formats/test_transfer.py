"""A conversion proves itself, or says that it failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_style.convert import main
from megatron_style.formats import fairseq, model_folder
from megatron_style.formats.certificate import certify, fixed_text, streamed_nll
from megatron_style.formats.source import ModelSource
from megatron_style.formats.transfer import transfer
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from tests.support.tiny import content, expect_refusal, read_model, run_here, tiny_config, write_tiny_model

PROVEN = {"largest_weight_difference": 0.0, "largest_nll_difference": 0.0, "passed": True}


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    write_tiny_model(tmp_path / "model")
    return model_folder.read(tmp_path / "model")


def slightly_wrong(path: Path, source: ModelSource, **_: int) -> None:
    """One weight of the output is off by a little."""

    def weight(name: str) -> torch.Tensor:
        found = source.weight(name).clone()
        if name == "blocks.1.up.weight":
            found[3, 5] += 1e-3
        return found

    original_write(path, replace(source, weight=weight))


original_write = model_folder.write


def test_the_certificate_is_in_the_folder_or_next_to_the_file(tmp_path: Path, source: ModelSource) -> None:
    transfer(source, model_folder, tmp_path / "again")
    transfer(source, fairseq, tmp_path / "again.pt")
    for path in (tmp_path / "again" / "certificate.json", tmp_path / "again.pt.certificate.json"):
        told = json.loads(path.read_text())
        assert told | PROVEN == told
        assert told["source_digest"] == told["output_digest"]
        assert told["tokens"] == 18
        assert told["tolerance"] == 1e-9
        assert told["versions"].keys() >= {"python", "torch", "megatron_style"}


def test_an_output_that_differs_is_marked_and_the_exit_code_is_1(tmp_path: Path, source: ModelSource) -> None:
    with patch.object(model_folder, "write", slightly_wrong):
        done = run_here(main, "export", source.path, "--output", tmp_path / "out")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {tmp_path}/out.failed: differs from {source.path} by ")
    assert not (tmp_path / "out").exists()
    told = json.loads((tmp_path / "out.failed" / "certificate.json").read_text())
    assert told["passed"] is False
    assert told["source_digest"] != told["output_digest"]
    assert told["largest_weight_difference"] == pytest.approx(1e-3, rel=1e-3)
    assert 0 < told["largest_nll_difference"] < 1


def test_what_is_not_a_number_is_never_proven(tmp_path: Path, source: ModelSource) -> None:
    broken = replace(source, weight=lambda name: source.weight(name) * float("nan"))
    assert not certify(source, broken).passed


def test_a_crash_leaves_nothing(tmp_path: Path, source: ModelSource) -> None:
    before = content(tmp_path)

    def weight(name: str) -> torch.Tensor:
        if name == "blocks.1.up.weight":
            raise OSError("the disk is gone")
        return source.weight(name)

    for form, name in ((model_folder, "out"), (fairseq, "out.pt")):
        with pytest.raises(OSError, match="the disk is gone"):
            transfer(replace(source, weight=weight), form, tmp_path / name)
    assert content(tmp_path) == before


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
@pytest.mark.parametrize(("positions", "cache"), [("infused", True), ("infused", False), ("added", False)])
def test_layer_by_layer_gives_what_the_full_model_gives(tmp_path: Path, kind: str, positions: str, cache: bool) -> None:
    config = tiny_config(kind, positions=positions, cache=cache)
    write_tiny_model(tmp_path / "model", config)
    text = fixed_text(config)
    model, _ = read_model(tmp_path / "model", torch.float64)
    protocol = Protocol("cached" if cache else "nonoverlapping", config.segment_length, config.cache_length)
    whole = score(model, text[1:].numpy(), protocol, eos=int(text[0])).nll
    assert streamed_nll(model_folder.read(tmp_path / "model"), text) == pytest.approx(whole, abs=1e-12)


def test_another_model_is_replaced_only_when_asked(tmp_path: Path, source: ModelSource) -> None:
    write_tiny_model(tmp_path / "other", tiny_config("tied"))
    output = tmp_path / "out"
    for _ in range(2):  # the same model again is no loss
        assert run_here(main, "export", source.path, "--output", output).code == 0
    before = content(output)
    done = run_here(main, "export", tmp_path / "other", "--output", output)
    expect_refusal(done, f"--output {output}: holds a model made from {source.path}; use --overwrite")
    assert content(output) == before
    assert run_here(main, "export", tmp_path / "other", "--output", output, "--overwrite").code == 0
    (output / "certificate.json").unlink()
    expect_refusal(run_here(main, "export", source.path, "--output", output), "a model of unknown origin")
