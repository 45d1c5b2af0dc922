"""Sizes of grids and tiles, on the host. Triton's functions of the same meaning serve its compiler too, and take a call 80 times as
long: two microseconds, four hundred times a step."""


def cdiv(length: int, size: int) -> int:
    """Division rounded up: how many tiles of `size` cover `length`."""
    return -(-length // size)


def next_power_of_2(length: int) -> int:
    """The least power of 2 that is not below `length`; 1 for none."""
    return 1 << max(length - 1, 0).bit_length()
