"""Shared set-up: one thread a process, so that several ranks do not fight for the cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch._dynamo

torch.set_num_threads(1)
