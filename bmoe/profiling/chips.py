"""Published peaks of accelerators, per GPU, dense: half of the data sheets' figures, which count 2:4 sparsity.

| chip | bf16, fp8, fp4 TFLOP/s | HBM | NVLink, both ways | source |
|---|---|---|---|---|
| h100 | 989, 1979 | 80 GB, 3.35 TB/s | 0.9 TB/s, 8 GPUs | NVIDIA H100 Tensor Core GPU data sheet, column SXM |
| h200 | 989, 1979 | 141 GB, 4.8 TB/s | 0.9 TB/s, 8 GPUs | NVIDIA H200 Tensor Core GPU data sheet, column SXM |
| b200 | 2250, 4500, 9000 | 180 GB, 7.7 TB/s | 1.8 TB/s, 8 GPUs | NVIDIA Blackwell data sheet, column HGX B200 (1,000 W) |
| gb200 | 2500, 5000, 10000 | 186 GB, 8 TB/s | 1.8 TB/s, 72 GPUs | NVIDIA Blackwell data sheet, column GB200 NVL72 (1,200 W) |

`memory_gib` is what CUDA calls total on such a device, about 0.6 GiB below what nvidia-smi lists: reported for H100, H200 and
B200, for GB200 nvidia-smi's 185.0 less 0.7. The network is no property of the chip: one adapter of 400 Gb/s a GPU, as DGX
and HGX machines usually have.
"""

from dataclasses import dataclass

from bmoe.errors import RequestError
from bmoe.model.counts import BF16_PEAK


@dataclass(frozen=True)
class Chip:
    """Peaks in FLOP/s and bytes/s; `domain` is the number of GPUs on one NVLink."""

    name: str
    capability: tuple[int, int]
    bf16: float
    fp8: float
    bandwidth: float
    memory_gib: float
    nvlink: float
    network: float
    domain: int
    source: str
    fp4: float = 0.0  # Hopper has none


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("h100", (9, 0), BF16_PEAK["H100"], 1979e12, 3.35e12, 79.1, 900e9, 50e9, 8, "NVIDIA H100 data sheet, SXM"),
        Chip("h200", (9, 0), BF16_PEAK["H200"], 1979e12, 4.8e12, 139.8, 900e9, 50e9, 8, "NVIDIA H200 data sheet, SXM"),
        Chip("b200", (10, 0), BF16_PEAK["B200"], 4500e12, 7.7e12, 178.3, 1800e9, 50e9, 8, "NVIDIA Blackwell data sheet, HGX B200", 9000e12),
        Chip(
            "gb200",
            (10, 0),
            BF16_PEAK["GB200"],
            5000e12,
            8.0e12,
            184.3,
            1800e9,
            50e9,
            72,
            "NVIDIA Blackwell data sheet, GB200 NVL72",
            10000e12,
        ),
    )
}


def find(name: str) -> Chip:
    """The chip of a name as `--chip` takes it. Raises RequestError."""
    if name.lower() not in CHIPS:
        raise RequestError(f"--chip {name}: known chips are {', '.join(CHIPS)}")
    return CHIPS[name.lower()]


def of_device(device_name: str) -> Chip | None:
    """The chip a driver's device name ("NVIDIA H200") stands for; None if it is not in the table, as PCIe cards are not."""
    words = device_name.lower().replace("-", " ").split()
    if not {"pcie", "nvl"}.isdisjoint(words):
        return None
    for chip in CHIPS.values():
        if chip.name in words:
            return chip
    return None
