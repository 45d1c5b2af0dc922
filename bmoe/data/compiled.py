"""Loops over bytes, compiled by Numba when first called and kept on disk, so that later runs only load them.

Compiled functions run without the interpreter's lock: threads share the cores as processes would, without copies between them.
Indices are unsigned wherever speed matters: Numba reads a negative index from the end, and checks for it.
"""

from llvmlite import ir
from numba import njit, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

# Arrays belong to the caller: nothing here makes one, so references need not be counted, which would cost more than short loops.
_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}


def compiled(function):
    """`function`, compiled for the types it is called with."""
    try:
        return njit(function, cache=True, **_OPTIONS)
    except RuntimeError:  # neither the package's folder nor a cache folder of the user can be written: compile in every run
        return njit(function, **_OPTIONS)


def inlined(function):
    """`function`, compiled as a part of those that call it."""
    return njit(function, forceinline=True, **_OPTIONS)


def _address(context, builder, signature, arguments):
    """Pointer to eight bytes of an array of bytes from an index on."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())


@intrinsic
def load64(typing, array, index):
    """Eight bytes of `array` (uint8) from `index` (uint64) on as a little-endian uint64. Not checked against its size."""

    def generate(context, builder, signature, arguments):
        return builder.load(_address(context, builder, signature, arguments), align=1)

    return types.uint64(array, types.uint64), generate


@intrinsic
def store64(typing, array, index, word):
    """Put eight bytes into `array` (uint8) from `index` (uint64) on. Not checked against its size."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], _address(context, builder, signature, arguments), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate


@intrinsic
def copy(typing, target, to, source, at, size):
    """Copy `size` bytes from source[at] (uint8) on to target[to] (uint8) on. Not checked against their sizes."""

    def generate(context, builder, signature, arguments):
        places = (context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 2))
        place, begin = (builder.gep(data, [arguments[k]]) for data, k in zip(places, (1, 3), strict=True))
        cgutils.raw_memcpy(builder, place, begin, arguments[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64, types.uint64), generate


@intrinsic
def folded_product(typing, a, b):
    """Low half of the 128-bit product of two uint64, xor its high half."""

    def generate(context, builder, signature, arguments):
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.trunc(builder.xor(product, high), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@inlined
def first_byte(mask):
    """How many bytes of a mask (the high bits of some of eight bytes) precede the first that is set; 8 if none is."""
    first = (mask & (~mask + uint64(1))) >> uint64(7)
    return (((first - uint64(1)) & uint64(0x0101010101010101)) * uint64(0x0101010101010101)) >> uint64(56)
