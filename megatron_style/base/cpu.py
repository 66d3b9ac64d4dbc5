"""What this machine's CPU can do."""

from __future__ import annotations

from pathlib import Path

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # x86, x86 with tiles, ARM


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model, or "unknown" where the system does not tell."""
    return _entries(cpuinfo).get("model name", "unknown")


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the instructions with which the CPU multiplies bfloat16 numbers, none if the system does not tell."""
    entries = _entries(cpuinfo)
    has = set(entries.get("flags", entries.get("Features", "")).split())
    return [name for name in _BF16_INSTRUCTIONS if name in has]


def describe_bf16(instructions: list[str]) -> str:
    """Return a sentence for users. Without such instructions, bfloat16 saves memory, but no time."""
    if instructions:
        return f"bfloat16 instructions: {', '.join(instructions)}"
    return "no bfloat16 instructions, so float32 trains faster on this CPU"


def _entries(cpuinfo: Path) -> dict[str, str]:
    """Return the entries of the first core."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
