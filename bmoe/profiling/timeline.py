"""Where a step's time goes: marks at the borders of the model's parts, in the forward and in the backward pass.

Modules announce themselves by forward hooks. In the backward pass an identity operator, put behind a part's output in the
forward pass, announces the part whose backward begins; autograd runs operators in the reverse of their order, so the marks
come in the reverse order too. Between two marks all time belongs to one part, and nothing is counted twice or left out.
On CUDA a mark is an event, so times are the device's; on the CPU it is the clock.

The model is not changed for good: `attached` takes every hook off again. Compiled blocks run uncompiled inside it, as
their parts are one graph otherwise.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Key = tuple[str, str]  # (part, "forward" | "backward")
Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """This moment: on CUDA an event in the stream, which the host does not wait for; on the CPU the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to a later one; on CUDA both must have passed."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class Timeline:
    """Seconds by (part, phase), from marks in order."""

    def __init__(self, device: torch.device):
        self.device, self.phase = device, "forward"
        self.marks: list[tuple[Key | None, Mark]] = []

    def enter(self, part: str | None) -> None:
        """From here on time belongs to `part`; None: to nobody."""
        self.marks.append((None if part is None else (part, self.phase), mark(self.device)))

    def seconds(self) -> dict[Key, float]:
        """Sum over all marks; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total: dict[Key, float] = defaultdict(float)
        for (key, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if key is not None:
                total[key] += between(start, end)
        return dict(total)


class _Announce(torch.autograd.Function):
    """Identity; when its gradient arrives, the backward pass of `part` begins."""

    @staticmethod
    def forward(ctx, x: Tensor, timeline: Timeline, part: str) -> Tensor:
        ctx.timeline, ctx.part = timeline, part
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.timeline.enter(ctx.part)
        return gradient, None, None


class _Products:
    """Wraps an experts module's `matmul`: calls alternate between the first and the second product."""

    def __init__(self, product, timeline: Timeline):
        self.product, self.timeline, self.calls = product, timeline, 0

    def __call__(self, x: Tensor, *rest: Tensor) -> Tensor:
        second = self.calls % 2 == 1
        self.calls += 1
        name, before, after = ("gemm 2", "activation", "combine") if second else ("gemm 1", "dispatch", "activation")
        prefix = {"dispatch": "dispatch", "combine": "combine"}
        before, after = (prefix.get(part, f"experts {part}") for part in (before, after))
        x = _Announce.apply(x, self.timeline, before)
        self.timeline.enter(f"experts {name}")
        y = self.product(x, *rest)
        self.timeline.enter(after)
        return _Announce.apply(y, self.timeline, f"experts {name}")


def _wrap(output, timeline: Timeline, part: str):
    """The output with its first differentiable tensor announced; of a sum and its norm, the norm."""
    if type(output) is tuple:
        return *output[:-1], _wrap(output[-1], timeline, part)
    if isinstance(output, Tensor):
        return _Announce.apply(output, timeline, part) if output.requires_grad else output
    if hasattr(output, "weights_TK"):  # the router's Routing
        return output._replace(weights_TK=_Announce.apply(output.weights_TK, timeline, part))
    return output


@contextmanager
def attached(model: nn.Module, timeline: Timeline) -> Iterator[None]:
    """Put marks on a Transformer for the length of the context."""
    handles, products, compiled = [], [], []

    def part(module: nn.Module, name: str, then: str, last: str | None = None) -> None:
        """`module` is part `name`; after it time belongs to `then`; its backward begins with `last`."""
        handles.append(module.register_forward_pre_hook(lambda *_: timeline.enter(name)))

        def leave(_module, _inputs, output):
            timeline.enter(then)
            return _wrap(output, timeline, last or name)

        handles.append(module.register_forward_hook(leave))

    handles.append(model.register_forward_pre_hook(lambda *_: timeline.enter("embedding")))

    def first_block(_module, arguments):
        timeline.enter("norms")
        return (_wrap(arguments[0], timeline, "embedding"), *arguments[1:])

    handles.append(model.blocks[0].register_forward_pre_hook(first_block))
    for block in model.blocks:
        compiled.append((block, block._compiled_call_impl))
        block._compiled_call_impl = None
        part(block.attention_norm, "norms", "norms")
        part(block.attention, "attention", "norms")
        part(block.ffn_norm, "norms", "norms")
        if not block.is_moe:
            part(block.ffn, "ffn", "norms")
            continue
        part(block.ffn.router, "router", "router")
        experts = block.ffn.experts
        if hasattr(experts, "matmul"):
            part(experts, "dispatch", "combine", "combine")
            had = "matmul" in vars(experts)
            products.append((experts, experts.matmul, had))
            experts.matmul = _Products(experts.matmul, timeline)
        else:
            part(experts, "experts", "combine")
        if block.ffn.shared is not None:
            part(block.ffn.shared, "shared expert", "combine")
    part(model.final_norm, "norms", "head + loss")
    part(model.head, "head + loss", "head + loss")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for experts, product, had in products:
            if had:
                experts.matmul = product
            else:
                del experts.matmul
        for block, call in compiled:
            block._compiled_call_impl = call
