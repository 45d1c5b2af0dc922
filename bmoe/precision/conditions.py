"""Which conditions a machine and a model must meet for a precision, as a pure function of their descriptions.

Numbers are Transformer Engine 2.20's own checks and what its kernels demand; `unmet` names each that fails, one
sentence each, and an empty list means the precision runs here. Those of mxfp8 are its fused grouped MLP's (`is_supported` and
the fusion's checks in ops/fused/grouped_mlp.py): unfused it is slower than bf16, and is refused.
"""

from dataclasses import dataclass

from bmoe.precision.machine import FUSED_SWITCH, Machine
from bmoe.recipe import ModelSection

ROW_MULTIPLE = {"fp32": 1, "bf16": 1, "fp8_row": 1, "fp8_current": 16, "fp8_delayed": 16, "fp8_block": 128, "mxfp8": 256, "nvfp4": 128}
"""Rows of one expert are padded to a multiple of this: what Transformer Engine's GroupedLinear wants (16 is a matter of speed; the
native path of fp8_block stops the program at less than 128), and for mxfp8 its fused grouped MLP."""


@dataclass(frozen=True)
class _Needs:
    chip: str
    lowest: tuple[int, int]  # compute capability
    below: tuple[int, int]
    cuda: tuple[int, int]
    multiple: int  # of every GEMM dimension


NEEDS = {
    "fp8_row": _Needs("Hopper", (9, 0), (10, 0), (12, 8), 16),
    "fp8_current": _Needs("Ada, Hopper or newer", (8, 9), (99, 0), (12, 1), 16),
    "fp8_delayed": _Needs("Ada, Hopper or newer", (8, 9), (99, 0), (12, 1), 16),
    "fp8_block": _Needs("Hopper or newer", (9, 0), (99, 0), (12, 9), 16),
    "mxfp8": _Needs("data-center Blackwell", (10, 0), (11, 0), (12, 8), 64),
    "nvfp4": _Needs("data-center Blackwell", (10, 0), (11, 0), (12, 8), 32),
}


def dotted(version: tuple[int, ...]) -> str:
    """2.20.2 of (2, 20, 2)."""
    return ".".join(map(str, version))


def gemm_dimensions(model: ModelSection) -> dict[str, int]:
    """The dimensions of the GEMMs that run in low precision, by recipe key: the experts', or the dense layers'."""
    if model.moe is None:
        return {"model.width": model.width, **({"model.ffn_width": model.ffn_width} if model.ffn_width else {})}
    return {"model.width": model.width, "model.moe.expert_width": model.moe.expert_width}


def unmet(kind: str, machine: Machine, model: ModelSection) -> list[str]:
    """Sentences naming what `machine` or `model` lacks for real (not emulated) arithmetic in `kind`; [] if nothing."""
    needs = NEEDS.get(kind)
    if needs is None:
        old = kind == "bf16" and machine.capability is not None and machine.capability < (8, 0)
        return [f"bf16 needs compute capability 8.0 or more, and {machine.device} has {dotted(machine.capability)}."] if old else []
    return [
        *_chip(kind, needs, machine),
        *_software(kind, needs, machine),
        *model_unmet(kind, model),
        *(
            ["Kernels: nvfp4 is emulated only, no implementation of the experts multiplies in it; set precision.emulate to true."]
            * (kind == "nvfp4")
        ),
    ]


def _chip(kind: str, needs: _Needs, machine: Machine) -> list[str]:
    wanted = f"{kind} needs an NVIDIA GPU of compute capability {dotted(needs.lowest)}"
    wanted += f" to below {dotted(needs.below)}" if needs.below < (99, 0) else " or more"
    if machine.capability is None:
        return [f"Chip: {wanted} ({needs.chip}); this device is a CPU ({machine.device})."]
    if not needs.lowest <= machine.capability < needs.below:
        return [f"Chip: {wanted} ({needs.chip}); {machine.device} has {dotted(machine.capability)}."]
    return []


def _software(kind: str, needs: _Needs, machine: Machine) -> list[str]:
    found = []
    if machine.cuda is None:
        found.append(f"CUDA: {kind} needs torch built for CUDA {dotted(needs.cuda)} or later; this torch is built for the CPU.")
    elif machine.cuda < needs.cuda:
        found.append(f"CUDA: {kind} needs torch built for CUDA {dotted(needs.cuda)} or later; this one is for {dotted(machine.cuda)}.")
    if kind == "fp8_row":
        if machine.quack is None:
            found.append(f"Kernels: {kind} needs quack-kernels, which is not installed; install bmoe[fused].")
        return found
    if machine.te is None:
        found.append(f"Transformer Engine: {kind} needs it, and {machine.te_problem or 'it is not installed'}; install bmoe[te].")
    elif machine.te < (2, 17):
        found.append(f"Transformer Engine: {kind} needs 2.17 or later, and {dotted(machine.te)} is installed.")
    if kind == "mxfp8" and machine.te is not None:
        found += _fused(machine)
    hopper = machine.capability is not None and machine.capability[0] == 9
    if kind == "fp8_block" and hopper and machine.cublas_lt and machine.cublas_lt < (13, 6):
        found.append(f"cuBLASLt: grouped fp8_block on Hopper needs 13.6 or later, and {dotted(machine.cublas_lt)} is loaded.")
    return found


def _fused(machine: Machine) -> list[str]:
    """What Transformer Engine's fused grouped MLP lacks beside the chip and the model."""
    found = []
    if machine.cudnn_frontend is None or machine.cudnn_frontend < (1, 23):
        has = "is not installed" if machine.cudnn_frontend is None else f"is {dotted(machine.cudnn_frontend)}"
        found.append(f"cuDNN frontend: mxfp8 needs nvidia-cudnn-frontend 1.23 or later, and it {has}.")
    if not machine.fused_switch:
        found.append(f"Switch: mxfp8 needs {FUSED_SWITCH}=1 before Transformer Engine is imported; set it in the environment.")
    return found


def model_unmet(kind: str, model: ModelSection) -> list[str]:
    """What of `unmet` is the model's: it keeps the model from real arithmetic in `kind` on any machine."""
    needs = NEEDS.get(kind)
    if needs is None:
        return []
    found = [
        f"Dimensions: {kind} needs {key} to be a multiple of {needs.multiple}, and it is {size}."
        for key, size in gemm_dimensions(model).items()
        if size % needs.multiple
    ]
    if model.moe is None:
        experts = f"Model: {kind} is a format of experts' products, and model.moe is null; emulate_linears can emulate it in dense layers."
        return [experts, *found]
    whose = "the fused kernels" if kind == "fp8_row" else "Transformer Engine's experts"
    if model.ffn != "swiglu":
        found.append(f"Feed-forward: {whose} need model.ffn swiglu, and it is {model.ffn}.")
    if model.bias:
        found.append(f"Feed-forward: {whose} have no biases here; set model.bias to false.")
    return found
