"""Run files and ds_configs are at the top of the repository, for people to edit; a wheel has them in the package."""

from setuptools import find_packages, setup

SHIPPED = ("run_configs", "ds_configs")

setup(
    packages=[*find_packages(include=["megatron_style*"]), *(f"megatron_style.{name}" for name in SHIPPED)],
    package_dir={f"megatron_style.{name}": name for name in SHIPPED},
    package_data={
        "megatron_style.paper": ["*.json"],
        "megatron_style.run_configs": ["*.yaml"],
        "megatron_style.ds_configs": ["*.json"],
    },
)
