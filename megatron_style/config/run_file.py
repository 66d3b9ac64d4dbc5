"""RUN.yaml, read and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_style.config.paths import located
from megatron_style.config.run import RunConfig
from megatron_style.config.yaml_file import override, read_yaml, write_yaml, yaml_text


def load_run(path: Path, settings: Sequence[str] = ()) -> RunConfig:
    """Read RUN.yaml, apply `--set section.key=value`, check everything, and find the files that it names."""
    data = read_yaml(path)
    for setting in settings:
        override(data, setting)
    return located(RunConfig.parse(data, source=str(path)), path.parent)


def save_run(run: RunConfig, path: Path) -> None:
    """Write the resolved run file."""
    write_yaml(run.as_data(), path)


def run_text(run: RunConfig) -> str:
    """Return the run file with all defaults."""
    return yaml_text(run.as_data())


def keep_older(path: Path, run: RunConfig, step: int) -> None:
    """Keep the run file of the earlier steps as `run.until_step500.yaml`, if it differs."""
    if path.exists() and read_yaml(path) != run.as_data():
        path.replace(path.with_name(f"{path.stem}.until_step{step}{path.suffix}"))
