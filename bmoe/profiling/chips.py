"""Published peaks of accelerators, per GPU, dense (without sparsity).

Sources: NVIDIA H100 and H200 datasheets (SXM, 2024), HGX B200 platform page (2025), GB200 NVL72 datasheet (2025; its rack
figures divided by 72). Memory is what the driver reports, in GiB. Links: NVLink both directions together; network is the
usual one 400 Gb/s adapter per GPU.
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


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("h100", (9, 0), BF16_PEAK["H100"], 1979e12, 3.35e12, 79.6, 900e9, 50e9, 8, "NVIDIA H100 SXM datasheet"),
        Chip("h200", (9, 0), BF16_PEAK["H200"], 1979e12, 4.8e12, 140.4, 900e9, 50e9, 8, "NVIDIA H200 SXM datasheet"),
        Chip("b200", (10, 0), BF16_PEAK["B200"], 4500e12, 7.7e12, 179.0, 1800e9, 50e9, 8, "NVIDIA HGX B200 platform page"),
        Chip("gb200", (10, 0), BF16_PEAK["GB200"], 5000e12, 8.0e12, 185.0, 1800e9, 50e9, 72, "NVIDIA GB200 NVL72 datasheet"),
    )
}


def find(name: str) -> Chip:
    """The chip of a name as `--chip` takes it. Raises RequestError."""
    if name.lower() not in CHIPS:
        raise RequestError(f"--chip {name}: known chips are {', '.join(CHIPS)}")
    return CHIPS[name.lower()]


def of_device(device_name: str) -> Chip | None:
    """The chip a driver's device name ("NVIDIA H200") stands for; None if it is not in the table."""
    words = device_name.lower().replace("-", " ").split()
    for chip in CHIPS.values():
        if chip.name in words:
            return chip
    return None
