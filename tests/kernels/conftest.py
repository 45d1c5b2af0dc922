"""Kernels run through Triton's interpreter where there is no GPU; the switch is read when a kernel file is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
