"""urank: learn, from the click log a ranking system already writes, the order that earns the most.

>>> import urank
>>> log = urank.read({"path": "log.parquet"})
Traceback (most recent call last):
    ...
urank.errors.DataError: a log must be a path or a table of Polars, pandas or PyArrow; got builtins.dict
"""

from importlib.metadata import version

from urank.errors import ConfigError, DataError, UrankError
from urank.log.inspect import inspect
from urank.log.prepare import prepare
from urank.log.read import Log, read

__version__ = version("urank")

__all__ = ["ConfigError", "DataError", "Log", "UrankError", "__version__", "inspect", "prepare", "read"]
