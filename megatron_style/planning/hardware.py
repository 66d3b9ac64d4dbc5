"""GPUs by name, with the figures of their datasheets. Efficiency is the share of the peak that a program reaches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from megatron_style.base.errors import UserError
from megatron_style.planning.setup import Precision

GIB = 2**30
_UNITS = {"": 1, "MB": 2**20, "GB": GIB, "TB": 2**40, "MIB": 2**20, "GIB": GIB, "TIB": 2**40}


@dataclass(frozen=True)
class Gpu:
    """One GPU: peaks of dense matrix products in FLOP/s, sizes in bytes, speeds in bytes/s per direction."""

    name: str
    half_peak: float  # fp16, summed in fp32
    full_peak: float  # fp32 as torch computes it by default, without TF32
    memory: int
    memory_speed: float
    host_speed: float  # to the other GPUs of its host
    network_speed: float  # its share of the host's network
    has_bf16: bool = True
    per_host: int = 8

    def peak(self, precision: Precision) -> float:
        if precision == "bf16" and not self.has_bf16:
            raise UserError(f"--gpu {self.name}: does not support bf16; use a ds_config with fp16, or another GPU")
        return self.full_peak if precision == "fp32" else self.half_peak


_TABLE = (
    # NVIDIA V100 datasheet (SXM2): 125 TFLOPS tensor, 15.7 fp32, 900 GB/s, NVLink 300 GB/s both ways together.
    # Hosts: NVIDIA DGX-1 system guide, 4 x 100 Gb/s for 8 GPUs.
    Gpu("v100-16gb", 125e12, 15.7e12, 16 * GIB, 900e9, 150e9, 6.25e9, has_bf16=False),
    Gpu("v100-32gb", 125e12, 15.7e12, 32 * GIB, 900e9, 150e9, 6.25e9, has_bf16=False),
    # NVIDIA A100 datasheet (SXM): 312 TFLOPS, 19.5 fp32, 1,555 and 2,039 GB/s, NVLink 600 GB/s both ways together.
    # Hosts: NVIDIA DGX A100 datasheet, 8 x 200 Gb/s.
    Gpu("a100-40gb", 312e12, 19.5e12, 40 * GIB, 1555e9, 300e9, 25e9),
    Gpu("a100-80gb", 312e12, 19.5e12, 80 * GIB, 2039e9, 300e9, 25e9),
    # NVIDIA H100 datasheet (SXM): 1,979 TFLOPS with sparsity, so 989 dense; 67 fp32, 3.35 TB/s, NVLink 900 GB/s.
    # NVIDIA H200 datasheet: the same, with 141 GB at 4.8 TB/s. Hosts: NVIDIA DGX H100/H200 datasheet, 8 x 400 Gb/s.
    Gpu("h100-80gb", 989e12, 67e12, 80 * GIB, 3350e9, 450e9, 50e9),
    Gpu("h200-141gb", 989e12, 67e12, 141 * GIB, 4800e9, 450e9, 50e9),
    # NVIDIA B200 in an HGX or DGX, at 1,000 W: 4,500 TFLOPS with sparsity, so 2,250 dense; 75 fp32, 8 TB/s. NVIDIA DGX
    # B200 user guide: 1,440 GB and 14.4 TB/s of NVLink both ways together for 8 GPUs; 8 x 400 Gb/s.
    Gpu("b200-180gb", 2250e12, 75e12, 180 * GIB, 8000e9, 900e9, 50e9),
    # AMD Instinct MI300X datasheet: 1,307 TFLOPS dense, 163.4 fp32 (304 compute units at 2.1 GHz), 192 GB at 5.3 TB/s;
    # seven Infinity Fabric links of 128 GB/s both ways together. Hosts of 8 usually have 8 x 400 Gb/s.
    Gpu("mi300x-192gb", 1307e12, 163.4e12, 192 * GIB, 5300e9, 448e9, 50e9),
    # NVIDIA Ampere GA102 whitepaper: 71 TFLOPS summed in fp32, 35.6 fp32, 936 GB/s; PCIe 4.0 x16.
    # NVIDIA Ada whitepaper: 165.2, 82.6, 1,008 GB/s. Hosts of either differ widely: 100 Gb/s for 8 GPUs is assumed.
    Gpu("rtx-3090", 71e12, 35.6e12, 24 * GIB, 936e9, 32e9, 1.56e9),
    Gpu("rtx-4090", 165.2e12, 82.6e12, 24 * GIB, 1008e9, 32e9, 1.56e9),
    # NVIDIA L40S datasheet: 362 TFLOPS, 91.6 fp32, 864 GB/s; PCIe 4.0 x16. NVIDIA A10 datasheet: 125, 31.2, 600 GB/s.
    Gpu("l40s-48gb", 362e12, 91.6e12, 48 * GIB, 864e9, 32e9, 6.25e9),
    Gpu("a10-24gb", 125e12, 31.2e12, 24 * GIB, 600e9, 32e9, 1.56e9),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _TABLE})


def gpu_named(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: unknown GPU; choose one of {', '.join(GPUS)}")
    return GPUS[name.lower()]


def with_peak(gpu: Gpu, peak: float, precision: Precision) -> Gpu:
    """Return the GPU with another peak in this precision, in FLOP/s."""
    gpu.peak(precision)  # refuses a precision that it does not have
    return replace(gpu, full_peak=peak) if precision == "fp32" else replace(gpu, half_peak=peak)


def bytes_of(text: str, flag: str) -> int:
    """Return the bytes of a size such as `32GB`. Units are powers of two, as GPUs are sold: GB is 2^30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)", text.strip().upper())
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise UserError(f"{flag} {text}: not a size; use for example 32GB or 80GB")
    return int(float(found[1]) * _UNITS[found[2]])
