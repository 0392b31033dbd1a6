"""urank: learn, from the click log a ranking system already writes, the order that earns the most.

>>> import urank
>>> log = urank.read({"path": "log.parquet"})
Traceback (most recent call last):
    ...
urank.errors.DataError: a log must be a path or a table of Polars, pandas or PyArrow; got builtins.dict
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from urank.errors import ConfigError, DataError, UrankError
from urank.log.inspect import inspect
from urank.log.prepare import prepare
from urank.log.read import Log, read

if TYPE_CHECKING:
    from urank.model import load_model

__version__ = version("urank")

__all__ = ["ConfigError", "DataError", "Log", "UrankError", "__version__", "inspect", "load_model", "prepare", "read"]


def __getattr__(name: str) -> Any:
    """Names that need torch, which is slow to load, are there when they are asked for."""
    if name == "load_model":
        from urank.model import load_model

        return load_model
    raise AttributeError(f"urank has no attribute '{name}'")
