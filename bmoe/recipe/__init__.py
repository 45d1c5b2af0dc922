"""The one recipe schema of all commands: sections, defaults, every cross-field rule, `load` and `dump`.

A recipe is YAML. It is checked whole before anything starts and all faults are reported together, each with its place.
Hardware is no business of the schema: every recipe loads on every machine, and `auto` values are resolved by the
commands when they start. This room imports nothing else of bmoe.
"""

from bmoe.recipe.reading import RecipeError, differences, dump, find, load, shipped_directory, to_dict, validate
from bmoe.recipe.schema import (
    BackendSection,
    CheckpointSection,
    DataSection,
    HighPrecisionSection,
    LoggingSection,
    ModelSection,
    MoESection,
    ObjectiveSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    PrepareSection,
    Recipe,
    ScheduleSection,
    Section,
    TrainingSection,
    known_keys,
    section_of,
)

__all__ = [
    "BackendSection",
    "CheckpointSection",
    "DataSection",
    "HighPrecisionSection",
    "LoggingSection",
    "MoESection",
    "ModelSection",
    "ObjectiveSection",
    "OptimizerSection",
    "ParallelSection",
    "PrecisionSection",
    "PrepareSection",
    "Recipe",
    "RecipeError",
    "ScheduleSection",
    "Section",
    "TrainingSection",
    "differences",
    "dump",
    "find",
    "known_keys",
    "load",
    "section_of",
    "shipped_directory",
    "to_dict",
    "validate",
]
