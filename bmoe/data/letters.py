"""64 letters at once: their codes, where the processor can look 32 bytes up in a table at once (AVX2).

Letters of either case differ from each other in their last five bits, so a table of 32 codes has them all; what is no letter gets the
high bit set.
"""

from llvmlite import binding, ir
from numba import types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from bmoe.data.compiled import inlined

WIDE = 64
AVX2 = bool(binding.get_host_cpu_features().get("avx2"))


@intrinsic
def _look_up(typing, data, at, ids, o, folded):
    """Put the codes of data[at : at + WIDE] (uint8) into ids[o:]. Returns masks of those with the high bit, and of lower-case letters.

    folded: uint8 [32], codes of letters by their last five bits, the high bit set where there is none.
    """
    pair = types.UniTuple(types.uint64, 2)

    def generate(context, builder, signature, arguments):
        half = ir.VectorType(ir.IntType(8), 32)
        source, target, table = (context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 2, 4))
        shuffle = cgutils.get_or_insert_function(builder.module, ir.FunctionType(half, [half, half]), "llvm.x86.avx2.pshuf.b")

        def place(pointer, index):
            return builder.bitcast(builder.gep(pointer, [index]), half.as_pointer())

        def all_of(value):
            return ir.Constant(half, [value] * 32)

        def mask(bits, shift):
            return builder.shl(builder.zext(builder.bitcast(bits, ir.IntType(32)), ir.IntType(64)), shift)

        whole = builder.load(place(table, ir.Constant(ir.IntType(64), 0)), align=1)
        first, second = (
            builder.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(ir.IntType(32), 32), [*range(k, k + 16)] * 2)) for k in (0, 16)
        )
        masks = []
        for k in (0, 32):
            shift = ir.Constant(ir.IntType(64), k)
            letters = builder.load(place(source, builder.add(arguments[1], shift)), align=1)
            last = builder.and_(letters, all_of(31))
            codes = builder.select(
                builder.icmp_unsigned("<", last, all_of(16)), builder.call(shuffle, [first, last]), builder.call(shuffle, [second, last])
            )
            inside = builder.icmp_unsigned("==", builder.and_(letters, all_of(0xC0)), all_of(0x40))
            codes = builder.select(inside, codes, all_of(0x80))
            small = builder.and_(letters, all_of(0x20))
            codes = builder.or_(codes, builder.shl(small, all_of(1)))
            builder.store(codes, place(target, builder.add(arguments[3], shift)), align=1)
            masks.append(mask(builder.icmp_signed("<", codes, all_of(0)), shift))
            masks.append(mask(builder.icmp_unsigned("!=", small, all_of(0)), shift))
        special, lower = builder.or_(masks[0], masks[2]), builder.or_(masks[1], masks[3])
        return context.make_tuple(builder, pair, [special, lower])

    return pair(data, types.uint64, ids, types.uint64, folded), generate


@intrinsic
def trailing_zeros(typing, word):
    """Place of the lowest bit set; 64 where none is."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@intrinsic
def set_bits(typing, word):
    """Number of bits set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


if AVX2:

    @inlined
    def letters(data, at, ids, o, folded):
        """Put codes of data[at:] into ids[o:], WIDE at a time, up to the first that is no letter or the last WIDE bytes. Returns (its
        place, the new end of ids, number of lower-case letters)."""
        size, small = uint64(data.size), uint64(0)
        while at + uint64(WIDE) <= size:
            special, lower = _look_up(data, at, ids, o, folded)
            count = trailing_zeros(special)
            if lower:
                small += set_bits(lower & ((uint64(1) << count) - uint64(1) if special else ~uint64(0)))
            at, o = at + count, o + count
            if special:
                break
        return at, o, small

else:

    @inlined
    def letters(data, at, ids, o, folded):
        """Nothing is done."""
        return at, o, uint64(0)
