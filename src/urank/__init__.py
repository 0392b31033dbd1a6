"""urank: learn, from the click log a ranking system already writes, the order that earns the most.

    log = urank.read("log.parquet")
    model = urank.URank().fit(log)
    model.rank(candidates)
    urank.evaluate([model], log)

>>> import urank
>>> log = urank.read({"path": "log.parquet"})
Traceback (most recent call last):
    ...
urank.errors.DataError: a log must be a path or a table of Polars, pandas or PyArrow; got builtins.dict
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urank.client import AsyncClient, Client
    from urank.errors import ConfigError, DataError, UrankError
    from urank.estimator import URank
    from urank.log.inspection import inspect
    from urank.log.prepare import prepare
    from urank.log.reader import Log, read
    from urank.model_io import load_model
    from urank.pipeline import evaluate
    from urank.progress import bars

    __version__: str

_MODULES = {
    "AsyncClient": "urank.client",
    "Client": "urank.client",
    "ConfigError": "urank.errors",
    "DataError": "urank.errors",
    "Log": "urank.log.reader",
    "URank": "urank.estimator",
    "UrankError": "urank.errors",
    "bars": "urank.progress",
    "evaluate": "urank.pipeline",
    "inspect": "urank.log.inspection",
    "load_model": "urank.model_io",
    "prepare": "urank.log.prepare",
    "read": "urank.log.reader",
}

__all__ = [
    "AsyncClient",
    "Client",
    "ConfigError",
    "DataError",
    "Log",
    "URank",
    "UrankError",
    "__version__",
    "bars",
    "evaluate",
    "inspect",
    "load_model",
    "prepare",
    "read",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `import urank` is fast."""
    if name == "__version__":
        from importlib.metadata import version

        return version("urank")
    if name in _MODULES:
        try:
            return getattr(import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            if _MODULES[name] != "urank.client":
                raise
            raise ImportError(f"urank.{name} needs {error.name}: pip install 'urank[serve]'") from error
    raise AttributeError(f"module 'urank' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
