"""Untrusted files: whatever is in them, they are read, or refused in one line.

Each kind is tried with a few seeds; `python -m tests.fuzz` tries as many as there is time for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.base.errors import UserError
from megatron_style.config.run_file import load_run
from tests.support.fuzz_targets import TARGETS
from tests.support.fuzzing import fuzz

pytestmark = pytest.mark.slow
TRIALS = 25
FOUND = [
    ("fairseq_file", 579),  # a momentum without elements
    ("fairseq_file", 847),  # a momentum of a single element
    ("universal_index", 967),  # the name of a file that is longer than a name can be
    ("universal_index", 1933),  # cutoffs beyond the vocabulary
    ("run_file", 4362),  # more passes over the text than could be laid out in seconds
    ("metrics", 3459),  # a number at the end of the range, on a logarithmic axis
    ("resumption", 3032),  # a manifest whose run has no model
    ("resumption", 7724),  # a history of updates with fewer tokens than a segment
]
NEVER_REFUSED = {"records"}  # what a killed launch has left does not keep the next one from starting


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_read_or_refused_in_one_line(name: str) -> None:
    found = fuzz(name, trials=TRIALS)
    assert not found.failures, "\n".join(f"seed {seed}: {detail}" for seed, detail in found.failures.items())
    assert found.trials == TRIALS
    assert found.refusals or name in NEVER_REFUSED


@pytest.mark.parametrize(("name", "seed"), FOUND)
def test_what_a_longer_search_has_found_is_mended(name: str, seed: int) -> None:
    assert not fuzz(name, first=seed, trials=1).failures


def test_a_yaml_bomb_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    layers = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path.write_text("a0: &a0 [x, x, x]\n" + "\n".join(layers))
    with pytest.raises(UserError, match=r"not valid YAML: .*an alias"):
        load_run(path)
