"""The errors that urank raises on purpose.

Each message is one sentence that names the argument, or the file and row, the requirement and the value received.
The command line prints it without a traceback and exits with code 2.
"""

from __future__ import annotations


class UrankError(Exception):
    """Base class of every error that urank raises on purpose."""


class DataError(UrankError):
    """A file or table violates a requirement."""


class TooFewError(DataError):
    """There are too few queries for the requested work; every worker of a process group raises it alike."""


class ConfigError(UrankError, ValueError):
    """An argument or a configuration value is not allowed; a `ValueError`, as scikit-learn expects of parameters."""
