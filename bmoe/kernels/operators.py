"""Registration of operators that torch.compile sees as one node, with as little Python per call as there can be.

`torch.library.custom_op` wraps every call in several layers of Python (0.1-0.3 ms per call on a slow host); a kernel
step of four such calls would then be bound by the host. Registering the function with the dispatcher itself and putting
the derivative into a `torch.autograd.Function` around it costs a tenth of that.

The tenth still adds up in a model that launches twenty kernels a layer: a call through the dispatcher took 4 us and `Function.apply` 8
more on a host where `Tensor.new_empty` takes 1.2, and an H200's host needed 8.5 for that. So outside torch.compile an operator is its
function, and `apply` runs a Function's forward pass alone where no gradient is wanted.
"""

import functools
from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("bmoe", "FRAGMENT")


def operator(name: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: `bmoe::name` from a function with annotated arguments that changes none of them.

    `fake` has the same arguments and returns empty tensors of the right shapes and dtypes. The operator has no
    derivative of its own: call it inside an autograd Function. Its attribute `operator` is what the compiler sees.
    """

    def register(function: Callable) -> Callable:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"bmoe::{name}", fake, lib=_LIBRARY)
        registered = getattr(torch.ops.bmoe, name).default

        @functools.wraps(function)
        def call(*arguments):
            return registered(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        call.operator = registered
        return call

    return register


class _NoContext:
    """Takes what a forward pass would keep for its backward pass."""

    def save_for_backward(self, *_) -> None: ...

    def mark_non_differentiable(self, *_) -> None: ...


def apply(function: type[torch.autograd.Function], *inputs):
    """`function.apply`, or without gradients its forward pass."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*inputs)
    return function.forward(_NoContext(), *inputs)
