"""Profiling: what a recipe costs here, and what it would cost in another precision or on another machine."""

from bmoe.profiling.compare import compare
from bmoe.profiling.estimate import estimate, open_data
from bmoe.profiling.measure import Build, Subject, Take
from bmoe.profiling.run import profile

__all__ = ["Build", "Subject", "Take", "compare", "estimate", "open_data", "profile"]
