"""What rounding did to the tensors of one training step: underflow, saturation, error and scales, by layer and tensor.

Emulated products report to a `Recorder` while one is active (`recording`); for the length of that context compiled blocks
run uncompiled, as a compiled one has no place to look in. The step's numbers and gradients are unchanged.

Tensors: input, weight and gradient of the experts' first and second product, each rounded along its rows as in fprop and
dgrad. Statistics, all over the finite elements of a tensor:
    underflow   share of non-zero values that became 0
    saturation  share of values that were cut to the largest (beyond its rounding range, 464 / 448 of it in E4M3)
    error       |rounded - x| / |x|, Frobenius
    scales      counts of scales by power of two, in bins of 4 from 2^-128 to 2^128; mxfp8 gives blocks of zeros 2^-127, nvfp4 2^-128
Where the format has one scale for a tensor, each expert's rows and each expert's weight are one, as in the products. Rows beyond the
last expert's are left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bmoe.precision import block, blocks, current, mxfp8, nvfp4
from bmoe.precision.emulate import EmulatedProduct
from bmoe.precision.float8 import E4M3, E5M2, round_to, saturate

TENSORS = ("input_1", "weight_1", "gradient_1", "input_2", "weight_2", "gradient_2")
BINS, BIN_WIDTH, LOWEST = 64, 4, -128
EACH_EXPERT = ("fp8_current", "fp8_row", "nvfp4")  # one scale for an expert's weight and, but under fp8_row, for its rows


def _rounded(x: Tensor, kind: str, tensor: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of a rounded tensor: its values (float32), where a value is the format's largest, and the powers of two of its scales."""
    weight, gradient = tensor.startswith("weight"), tensor.startswith("gradient")
    if kind == "nvfp4":
        axis, rows = (None if weight else -1), x.reshape(-1, x.shape[-1])
        noise = nvfp4.noise_of(rows, torch.arange(len(rows), device=x.device)).view(x.shape) if gradient else None
        codes, scales, amax = nvfp4.quantize(x, axis, noise)
        return nvfp4.dequantize(codes, scales, amax, axis), (codes & 7) == 7, (scales.double() * amax / nvfp4.RANGE).log2()
    if kind == "mxfp8":
        codes, exponents = mxfp8.quantize(x)
        return mxfp8.dequantize(codes, exponents), codes.float().abs() == E4M3.maximum, exponents.double() - 127
    if kind == "fp8_block":
        axis = None if weight else -1
        codes, inverse = block.quantize(x, axis)
        return block.dequantize(codes, inverse, axis), codes.float().abs() == E4M3.maximum, inverse.double().log2()
    form = E5M2 if kind == "fp8_current" and gradient else E4M3
    one = kind == "fp8_current" or weight  # scale for the tensor, else one for each row
    scale = current.scales(blocks.amax(x.flatten() if one else x, -1), form)
    values = round_to(saturate(x.float() * scale, form), form)
    return values * (1.0 / scale), values.abs() == form.maximum, -scale.double().log2()


def sums(x: Tensor, kind: str, tensor: str) -> Tensor:
    """fp64 [5 + BINS]: non-zero, underflowed, saturated values, squared error, squared norm, then the scale counts.

    They add up over calls; `shares` makes the statistics of them.
    """
    form = nvfp4.E2M1 if kind == "nvfp4" else E5M2 if kind == "fp8_current" and tensor.startswith("gradient") else E4M3
    rounded, largest, power = _rounded(x, kind, tensor)
    finite = x.isfinite()
    exact = torch.where(finite, x.double(), 0.0)
    rounded = torch.where(finite, rounded.double(), 0.0)
    nonzero = exact != 0
    beyond = 1 + 2.0 ** -(form.mantissa + 2) / (2 - 2.0**-form.mantissa) * 2
    saturated = largest & (exact.abs() > rounded.abs() * beyond)
    head = [nonzero, nonzero & (rounded == 0), saturated]
    squares = [(rounded - exact).square().sum(), exact.square().sum()]
    bins = ((power.flatten() - LOWEST) / BIN_WIDTH).floor().clamp(0, BINS - 1).long()
    counts = torch.zeros(BINS, dtype=torch.float64, device=x.device).scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
    return torch.cat([torch.stack([t.sum().double() for t in head] + squares), counts])


def shares(total: Tensor) -> dict[str, float]:
    """underflow, saturation and error of summed `sums`."""
    nonzero, under, over, error, norm = total[:5].tolist()
    return {
        "underflow": under / nonzero if nonzero else 0.0,
        "saturation": over / nonzero if nonzero else 0.0,
        "error": (error / norm) ** 0.5 if norm else 0.0,
    }


def _scaled_together(x: Tensor, kind: str, offsets_E: Tensor | None) -> list[Tensor]:
    """The parts of a tensor, empty ones left out, that a format with one scale for a tensor scales by themselves: experts' weights of
    w_EOI, experts' rows of x_NI; else all of it."""
    if offsets_E is None:
        parts = x.unbind() if x.ndim == 3 and kind in EACH_EXPERT else [x]
    else:
        *inner, last = offsets_E.tolist()
        parts = x[:last].tensor_split(inner) if kind in EACH_EXPERT and kind != "fp8_row" else [x[:last]]
    return [part for part in parts if part.numel()]


class Recorder:
    """Sums by (layer, tensor) of everything that passed the emulated products while it was active."""

    def __init__(self, layers: int):
        self.layers = layers
        self.totals: dict[tuple[int, str], Tensor] = {}

    def add(self, layer: int, tensor: str, kind: str, x: Tensor, offsets_E: Tensor | None = None) -> None:
        """Count one tensor of one product: a weight, or rows, which end for each expert at `offsets_E`, if there are several."""
        for part in _scaled_together(x.detach(), kind, offsets_E):
            with torch.no_grad():
                found = sums(part, kind, tensor)
            key = (layer, tensor)
            self.totals[key] = found if key not in self.totals else self.totals[key] + found

    def metrics(self) -> dict:
        """{tensor: {underflow, saturation, error: [layers] with null where nothing was rounded, scales: [BINS]}}."""
        found: dict = {}
        for tensor in TENSORS:
            rows = {layer: total.cpu() for (layer, name), total in self.totals.items() if name == tensor}
            if not rows:
                continue
            by_layer = {layer: shares(total) for layer, total in rows.items()}
            found[tensor] = {
                key: [by_layer[layer][key] if layer in by_layer else None for layer in range(self.layers)]
                for key in ("underflow", "saturation", "error")
            }
            found[tensor]["scales"] = sum(rows.values())[5:].long().tolist()
        return found


class _Watched:
    """An emulated product that tells a recorder of its tensors; calls alternate between the first and second product."""

    def __init__(self, product: EmulatedProduct, recorder: Recorder, layer: int):
        self.product, self.recorder, self.layer, self.calls = product, recorder, layer, 0

    def __call__(self, x: Tensor, w: Tensor, *offsets: Tensor) -> Tensor:
        number, kind = self.calls % 2 + 1, self.product.kind
        self.calls += 1
        self.recorder.add(self.layer, f"input_{number}", kind, x, *offsets)
        self.recorder.add(self.layer, f"weight_{number}", kind, w)
        y = self.product(x, w, *offsets)
        if y.requires_grad:
            y.register_hook(lambda dy: self.recorder.add(self.layer, f"gradient_{number}", kind, dy, *offsets))
        return y


@contextmanager
def recording(model: nn.Module) -> Iterator[Recorder]:
    """Record every emulated product of `model.blocks`, forward and backward, within the context."""
    recorder, changed, compiled = Recorder(len(model.blocks)), [], []
    for index, layer in enumerate(model.blocks):
        compiled.append((layer, layer._compiled_call_impl))
        layer._compiled_call_impl = None
        for module in layer.modules():
            product = vars(module).get("matmul")
            if isinstance(product, EmulatedProduct):
                module.matmul = _Watched(product, recorder, index)
                changed.append((module, product))
    try:
        yield recorder
    finally:
        for module, product in changed:
            module.matmul = product
        for layer, call in compiled:
            layer._compiled_call_impl = call
