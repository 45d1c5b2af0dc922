"""SHA-256 (FIPS 180-4) of two streams at once, where the processor has instructions for it.

Each of its rounds waits for the one before, so that a stream leaves half of the processor's time unused, and a second one, whose rounds
stand between those of the first, costs almost nothing. Elsewhere both go through `hashlib` in turn.
"""

import hashlib
import platform

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bmoe.data.compiled import compiled

BLOCK = 64
_U = np.uint64


def _fraction(prime: int, root: int) -> int:
    """The first 32 bits of the fraction of a root of a prime, exactly."""
    number, low, high = prime << (32 * root), 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**root <= number else (low, middle)
    return low & 0xFFFFFFFF


_PRIMES = [n for n in range(2, 312) if all(n % k for k in range(2, n))]
_ROUNDS = [_fraction(prime, 3) for prime in _PRIMES]  # K of section 4.2.2
_A, _B, _C, _D, _E, _F, _G, _H = (_fraction(prime, 2) for prime in _PRIMES[:8])  # section 5.3.3
_START = np.array([_F, _E, _B, _A, _H, _G, _D, _C], np.uint32)  # as the instructions want it
_ORDER = [3, 2, 7, 6, 1, 0, 5, 4]  # of A ... H in it
SUPPORTED = platform.machine() in ("x86_64", "AMD64") and bool(binding.get_host_cpu_features().get("sha"))


class Sha256:
    """A hash that grows, as those of `hashlib`."""

    def __init__(self):
        self.state, self.rest, self.size = _START.copy(), np.zeros(2 * BLOCK, np.uint8), 0

    def update(self, data: memoryview) -> None:
        """Take in bytes."""
        both(self, data, Sha256(), memoryview(b""))

    def hexdigest(self) -> str:
        """Of the bytes so far."""
        last = Sha256()
        last.state, last.rest, last.size = self.state.copy(), self.rest.copy(), self.size
        last.update(memoryview(b"\x80" + bytes(-(self.size + 9) % BLOCK) + (8 * self.size).to_bytes(8, "big")))
        return "".join(f"{last.state[k]:08x}" for k in _ORDER)


def sha256():
    """A new hash."""
    return Sha256() if SUPPORTED else hashlib.sha256()


def both(one, data_one: memoryview, other, data_other: memoryview) -> None:
    """Take in bytes of two streams; fastest where they are as many."""
    if not SUPPORTED:
        one.update(data_one)
        other.update(data_other)
        return
    a, b = np.frombuffer(data_one, np.uint8), np.frombuffer(data_other, np.uint8)
    _both(one.state, one.rest, one.size % BLOCK, a, other.state, other.rest, other.size % BLOCK, b)
    one.size += a.size
    other.size += b.size


@compiled
def _both(state_a, rest_a, kept_a, a, state_b, rest_b, kept_b, b):
    at_a, at_b = _fill(state_a, rest_a, kept_a, a), _fill(state_b, rest_b, kept_b, b)
    blocks_a, blocks_b = (_U(a.size) - at_a) // _U(BLOCK), (_U(b.size) - at_b) // _U(BLOCK)
    common = min(blocks_a, blocks_b)
    _two(state_a, a, at_a, state_b, b, at_b, common)
    at_a, at_b = at_a + common * _U(BLOCK), at_b + common * _U(BLOCK)
    _one(state_a, a, at_a, blocks_a - common)
    _one(state_b, b, at_b, blocks_b - common)
    _keep(rest_a, a, at_a + (blocks_a - common) * _U(BLOCK))
    _keep(rest_b, b, at_b + (blocks_b - common) * _U(BLOCK))


@compiled
def _fill(state, rest, kept, data):
    """Complete the block that was left over. Returns how many bytes of data are done; all of them if it is not complete yet."""
    if kept == 0:
        return _U(0)
    take = min(_U(BLOCK - kept), _U(data.size))
    for k in range(take):
        rest[_U(kept) + k] = data[k]
    if _U(kept) + take == _U(BLOCK):
        _one(state, rest, _U(0), _U(1))
    return take


@compiled
def _keep(rest, data, at):
    """Keep what is no whole block."""
    for k in range(at, _U(data.size)):
        rest[k - at] = data[k]


def _rounds(builder, streams):
    """Take a block in, for each of some streams: (two vectors of state, 16 words as four vectors). Returns their new states."""
    four, wide = ir.VectorType(ir.IntType(32), 4), ir.IntType(32)
    module = builder.module
    rounds = cgutils.get_or_insert_function(module, ir.FunctionType(four, [four] * 3), "llvm.x86.sha256rnds2")
    first = cgutils.get_or_insert_function(module, ir.FunctionType(four, [four] * 2), "llvm.x86.sha256msg1")
    second = cgutils.get_or_insert_function(module, ir.FunctionType(four, [four] * 2), "llvm.x86.sha256msg2")

    def shuffled(a, b, order):
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(wide, 4), order))

    begun = [state for state, _ in streams]
    states, words = [list(state) for state, _ in streams], [list(message) for _, message in streams]
    for step in range(16):
        constants = ir.Constant(four, _ROUNDS[4 * step : 4 * step + 4])
        for state, word in zip(states, words, strict=True):
            if step >= 4:
                grown = builder.add(builder.call(first, [word[0], word[1]]), shuffled(word[2], word[3], [1, 2, 3, 4]))
                word[:] = [*word[1:], builder.call(second, [grown, word[3]])]
            message = builder.add(word[step] if step < 4 else word[3], constants)
            state[1] = builder.call(rounds, [state[1], state[0], message])
            state[0] = builder.call(rounds, [state[0], state[1], shuffled(message, message, [2, 3, 2, 3])])
    return [[builder.add(old, new) for old, new in zip(*pair, strict=True)] for pair in zip(begun, states, strict=True)]


def _blocks(context, builder, signature, arguments, streams: int):
    """Blocks of some streams, as many of each: for each a state, an array of bytes, and where its first block begins; their number."""
    four, byte = ir.VectorType(ir.IntType(32), 4), ir.IntType(8)
    bytes_of = ir.VectorType(byte, 16)
    swap = ir.Constant(ir.VectorType(ir.IntType(32), 16), [4 * (k // 4) + 3 - k % 4 for k in range(16)])
    places = []
    for k in range(streams):
        state, data = (context.make_array(signature.args[3 * k + n])(context, builder, arguments[3 * k + n]).data for n in (0, 1))
        halves = [builder.gep(builder.bitcast(state, four.as_pointer()), [ir.Constant(ir.IntType(64), n)]) for n in (0, 1)]
        places.append((halves, builder.gep(data, [arguments[3 * k + 2]]), [cgutils.alloca_once(builder, four) for _ in halves]))
    for halves, _, held in places:
        for half, variable in zip(halves, held, strict=True):
            builder.store(builder.load(half, align=4), variable)
    with cgutils.for_range(builder, arguments[-1]) as loop:
        inputs = []
        for _, data, held in places:
            begin = builder.gep(data, [builder.mul(loop.index, ir.Constant(ir.IntType(64), BLOCK))])
            words = []
            for n in range(4):
                place = builder.bitcast(builder.gep(begin, [ir.Constant(ir.IntType(64), 16 * n)]), bytes_of.as_pointer())
                loaded = builder.load(place, align=1)
                words.append(builder.bitcast(builder.shuffle_vector(loaded, loaded, swap), four))
            inputs.append(([builder.load(variable) for variable in held], words))
        for (_, _, held), state in zip(places, _rounds(builder, inputs), strict=True):
            for variable, value in zip(held, state, strict=True):
                builder.store(value, variable)
    for halves, _, held in places:
        for half, variable in zip(halves, held, strict=True):
            builder.store(builder.load(variable), half, align=4)
    return context.get_dummy_value()


@intrinsic
def _one(typing, state, data, at, blocks):
    """Take blocks of `data` in."""

    def generate(context, builder, signature, arguments):
        return _blocks(context, builder, signature, arguments, 1)

    return types.void(state, data, types.uint64, types.uint64), generate


@intrinsic
def _two(typing, state_a, a, at_a, state_b, b, at_b, blocks):
    """Take as many blocks of `a` and of `b` in."""

    def generate(context, builder, signature, arguments):
        return _blocks(context, builder, signature, arguments, 2)

    return types.void(state_a, a, types.uint64, state_b, b, types.uint64, types.uint64), generate
