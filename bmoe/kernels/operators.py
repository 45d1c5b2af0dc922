"""Registration of operators that torch.compile sees as one node, with as little Python per call as there can be.

`torch.library.custom_op` wraps every call in several layers of Python (0.1-0.3 ms per call on a slow host); a kernel
step of four such calls would then be bound by the host. Registering the function with the dispatcher itself and putting
the derivative into a `torch.autograd.Function` around it costs a tenth of that.
"""

from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("bmoe", "FRAGMENT")


def operator(name: str, fake: Callable) -> Callable[[Callable], Callable]:
    """Decorator: `bmoe::name` from a function with annotated arguments that changes none of them.

    `fake` has the same arguments and returns empty tensors of the right shapes and dtypes. The operator has no
    derivative of its own: call it inside an autograd Function.
    """

    def register(function: Callable) -> Callable:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"bmoe::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.bmoe, name).default

    return register
