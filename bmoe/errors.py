"""The errors a user meets: each is one plain sentence with the place and what to do."""


class RequestError(Exception):
    """The request was wrong (recipe, flags, input, missing hardware). The command line exits with 2."""


class RunError(Exception):
    """The work failed while running (disk full, non-finite loss, a rank died). The command line exits with 1."""


class FaultError(RunError):
    """A RunError that the same work may not meet again: hardware or a network failed. `--restarts` tries again."""
