"""What a CPU can do, as the system tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.base.cpu import bf16_instructions, cpu_name


@pytest.mark.parametrize(
    ("text", "name", "instructions"),
    [
        ("model name\t: EPYC\nflags\t\t: fpu avx512_bf16 sse\n\nmodel name\t: other\n", "EPYC", ["avx512_bf16"]),
        ("model name\t: Xeon\nflags\t\t: avx512_bf16 amx_bf16\n", "Xeon", ["avx512_bf16", "amx_bf16"]),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", "unknown", ["bf16"]),
        ("model name\t: old\nflags\t\t: fpu avx2\n", "old", []),
    ],
)
def test_instructions_are_those_that_the_system_names(
    tmp_path: Path, text: str, name: str, instructions: list[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_name(tmp_path / "cpuinfo") == name
    assert bf16_instructions(tmp_path / "cpuinfo") == instructions


def test_a_system_that_reports_nothing_has_none(tmp_path: Path) -> None:
    assert bf16_instructions(tmp_path / "none") == []
