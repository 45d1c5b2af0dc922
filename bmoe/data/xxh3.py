"""XXH3, 64 bits, seed 0 (Collet, xxHash; https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), for many items in one call.

The same numbers as `xxhash.xxh3_64_intdigest`, whose output is fixed since version 0.8.0, without an object and a call for each item.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bmoe.data.compiled import compiled, folded_product, inlined, load64

_SECRET_HEX = """
b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c
3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364
eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e
"""
SECRET = np.frombuffer(bytes.fromhex("".join(_SECRET_HEX.split())), np.uint8)  # kSecret of the specification, 192 bytes
P32_1, P32_2, P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
P64_1, P64_2, P64_3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
P64_4, P64_5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
MX1, MX2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
STARTS = np.array([P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1])
STRIPE, BLOCK = 64, 1024
_U = np.uint64


def xxh3(data: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Hash of each data[start:end] (uint8), uint64."""
    found = np.empty(start.size, np.uint64)
    _each(data, start, end, SECRET, STARTS, np.empty(8, np.uint64), found)
    return found


@compiled
def _each(data, start, end, secret, starts, sums, found):
    for k in range(start.size):
        found[k] = _hash(data, _U(start[k]), _U(end[k] - start[k]), secret, starts, sums)


@inlined
def _hash(data, at, size, secret, starts, sums):
    if size > _U(240):
        return _long(data, at, size, secret, starts, sums)
    if size > _U(16):
        return _medium(data, at, size, secret)
    return _short(data, at, size, secret)


@inlined
def _short(data, at, size, secret):
    """0 to 16 bytes."""
    if size > _U(8):
        low = load64(data, at) ^ load64(secret, _U(24)) ^ load64(secret, _U(32))
        high = load64(data, at + size - _U(8)) ^ load64(secret, _U(40)) ^ load64(secret, _U(48))
        return _avalanche(size + _swapped(low) + high + folded_product(low, high))
    word = _U(0)
    if size >= _U(4):
        for k in range(_U(4)):
            word |= _U(data[at + k]) << (_U(32) + _U(8) * k)
            word |= _U(data[at + size - _U(4) + k]) << (_U(8) * k)
        word ^= load64(secret, _U(8)) ^ load64(secret, _U(16))
        word ^= (word << _U(49) | word >> _U(15)) ^ (word << _U(24) | word >> _U(40))
        word *= MX2
        word ^= (word >> _U(35)) + size
        word *= MX2
        return word ^ (word >> _U(28))
    if size:
        word = _U(data[at]) << _U(16) | _U(data[at + (size >> _U(1))]) << _U(24) | _U(data[at + size - _U(1)]) | size << _U(8)
        word ^= (load64(secret, _U(0)) ^ (load64(secret, _U(0)) >> _U(32))) & _U(0xFFFFFFFF)
    else:
        word = load64(secret, _U(56)) ^ load64(secret, _U(64))
    word ^= word >> _U(33)
    word *= P64_2
    word ^= word >> _U(29)
    word *= P64_3
    return word ^ (word >> _U(32))


@inlined
def _medium(data, at, size, secret):
    """17 to 240 bytes."""
    total, last = size * P64_1, at + size - _U(16)
    if size <= _U(128):
        for k in range((size - _U(1)) // _U(32), -1, -1):
            step = _U(16) * _U(k)
            total += _mixed(data, at + step, secret, _U(2) * step)
            total += _mixed(data, last - step, secret, _U(2) * step + _U(16))
        return _avalanche(total)
    for k in range(_U(8)):
        total += _mixed(data, at + _U(16) * k, secret, _U(16) * k)
    total = _avalanche(total)
    for k in range(_U(8), size // _U(16)):
        total += _mixed(data, at + _U(16) * k, secret, _U(16) * (k - _U(8)) + _U(3))
    return _avalanche(total + _mixed(data, last, secret, _U(136 - 17)))


@inlined
def _long(data, at, size, secret, starts, sums):
    """More than 240 bytes."""
    for k in range(8):
        sums[k] = starts[k]
    blocks = (size - _U(1)) // _U(BLOCK)
    for block in range(blocks):
        for stripe in range(_U(BLOCK // STRIPE)):
            _accumulate(data, at + block * _U(BLOCK) + stripe * _U(STRIPE), secret, stripe * _U(8), sums)
        for k in range(_U(8)):
            value = sums[k]
            sums[k] = (value ^ (value >> _U(47)) ^ load64(secret, _U(128) + _U(8) * k)) * P32_1
    for stripe in range((size - _U(1) - blocks * _U(BLOCK)) // _U(STRIPE)):
        _accumulate(data, at + blocks * _U(BLOCK) + stripe * _U(STRIPE), secret, stripe * _U(8), sums)
    _accumulate(data, at + size - _U(STRIPE), secret, _U(192 - STRIPE - 7), sums)
    total = size * P64_1
    for k in range(_U(4)):
        low = sums[_U(2) * k] ^ load64(secret, _U(11) + _U(16) * k)
        high = sums[_U(2) * k + _U(1)] ^ load64(secret, _U(19) + _U(16) * k)
        total += folded_product(low, high)
    return _avalanche(total)


@intrinsic
def _accumulate(typing, data, at, secret, place, sums):
    """Take in a stripe of 64 bytes, eight lanes of eight bytes at once: sums[k ^ 1] += value[k], sums[k] += low half * high half
    of value[k] ^ secret[k]."""

    def generate(context, builder, signature, arguments):
        lanes = ir.VectorType(ir.IntType(64), 8)

        def address(array, index):
            pointer = context.make_array(signature.args[array])(context, builder, arguments[array]).data
            if index is not None:
                pointer = builder.gep(pointer, [arguments[index]])
            return builder.bitcast(pointer, lanes.as_pointer())

        def constant(value):
            return ir.Constant(lanes, [value] * 8)

        value = builder.load(address(0, 1), align=1)
        key = builder.xor(value, builder.load(address(2, 3), align=1))
        product = builder.mul(builder.and_(key, constant(0xFFFFFFFF)), builder.lshr(key, constant(32)))
        order = ir.Constant(ir.VectorType(ir.IntType(32), 8), [k ^ 1 for k in range(8)])
        total = builder.add(builder.load(address(4, None), align=8), builder.shuffle_vector(value, value, order))
        builder.store(builder.add(total, product), address(4, None), align=8)
        return context.get_dummy_value()

    return types.void(data, types.uint64, secret, types.uint64, sums), generate


@inlined
def _mixed(data, at, secret, place):
    return folded_product(load64(data, at) ^ load64(secret, place), load64(data, at + _U(8)) ^ load64(secret, place + _U(8)))


@inlined
def _avalanche(word):
    word ^= word >> _U(37)
    word *= MX1
    return word ^ (word >> _U(32))


@inlined
def _swapped(word):
    """Its bytes in the other order."""
    word = (word & _U(0x00FF00FF00FF00FF)) << _U(8) | (word >> _U(8)) & _U(0x00FF00FF00FF00FF)
    word = (word & _U(0x0000FFFF0000FFFF)) << _U(16) | (word >> _U(16)) & _U(0x0000FFFF0000FFFF)
    return word << _U(32) | word >> _U(32)
