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
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from urank.errors import ConfigError, DataError, UrankError
from urank.log.inspection import inspect
from urank.log.prepare import prepare
from urank.log.reader import Log, read

if TYPE_CHECKING:
    from urank.client import AsyncClient, Client
    from urank.evaluation.policy_evaluation import Evaluation
    from urank.model_io import load_model
    from urank.pipeline import URank

__version__ = version("urank")

__all__ = [
    "AsyncClient",
    "Client",
    "ConfigError",
    "DataError",
    "Log",
    "URank",
    "UrankError",
    "__version__",
    "evaluate",
    "inspect",
    "load_model",
    "prepare",
    "read",
]

_LATER = {
    "AsyncClient": "urank.client",
    "Client": "urank.client",
    "URank": "urank.pipeline",
    "load_model": "urank.model_io",
}


def __getattr__(name: str) -> Any:
    """Names that need what is slow to load, as torch, are there when they are asked for."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"urank has no attribute '{name}'")


def evaluate(models: Any, log: Any, **settings: Any) -> "Evaluation":
    """What models would earn, from a log, with intervals; arguments as in `urank.pipeline.evaluate`."""
    from urank.pipeline import evaluate as evaluate_models

    return evaluate_models(models, log, **settings)
