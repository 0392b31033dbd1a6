"""The few kinds of error that urank raises on purpose.

Each message is one sentence that names the argument, or the file and row, what was required and what came.
The command line prints it without a traceback and exits with code 2.
"""

from __future__ import annotations

__all__ = ["ConfigError", "DataError", "TooFewError", "UrankError"]


class UrankError(Exception):
    """Base of every error that urank raises on purpose."""


class DataError(UrankError):
    """A file or table does not hold what was required of it."""


class TooFewError(DataError):
    """There are too few queries for what is asked; every worker of a team finds that alike."""


class ConfigError(UrankError):
    """An argument or a configuration value is not one of those allowed."""
