"""`urank.URank`: the pipeline as an estimator.

Constructing one validates its parameters without importing torch and LightGBM, which take seconds: `fit` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from html import escape
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from urank.config import deep_merge, validate
from urank.errors import ConfigError
from urank.log.reader import table_frame
from urank.memory import DEFAULT_MEMORY, Memory
from urank.progress import Report, silent
from urank.ranking.ranking_settings import UrankConfig

if TYPE_CHECKING:
    from urank.pipeline import AnyLog
    from urank.ranking.ranking_model import RankingModel

_ROW_INDEX = "__urank_candidate"


class URank:
    """Learn from a click log the order that earns the most.

        log = urank.read("log.parquet")
        model = urank.URank().fit(log)
        model.rank(candidates)
        print(urank.evaluate(model, log))

    Parameters can be read, changed and cloned as in scikit-learn, whose base class takes a second to import. Tables
    are of Polars, pandas or PyArrow, and a result that is a table is of the same kind.

    Args:
        goal: What the order is to earn: `clicks`, or `conversions` of a log that has them.
        ranker: What scores items: `network`, `trees`, a ranker of another paper (see `UrankConfig`), or `none`.
        method: How items are ranked: `auto`, `score`, `match` or `ctr1`.
        clicks: Any setting of `ClickConfig`.
        scorer: Any setting of `RankerConfig`.
        trees: Any setting of `TreesConfig`.
        baseline: Any setting of `BaselineConfig`.
        seed: Seed of all random numbers.

    Attributes:
        model_: The fitted `RankingModel`.
        fit_: Its `ModelFit`, with the training records.
    """

    def __init__(
        self,
        *,
        goal: str = "clicks",
        ranker: str = "network",
        method: str = "auto",
        clicks: Mapping[str, Any] | None = None,
        scorer: Mapping[str, Any] | None = None,
        trees: Mapping[str, Any] | None = None,
        baseline: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.goal, self.ranker, self.method, self.seed = goal, ranker, method, seed
        self.clicks, self.scorer, self.trees, self.baseline = clicks, scorer, trees, baseline
        self._settings()

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name; `deep` is ignored, since none is an estimator."""
        return {name: getattr(self, name) for name in sorted(_DEFAULTS)}

    def set_params(self, **params: Any) -> Self:
        """Change parameters, as in scikit-learn; invalid ones are refused, and nothing changes."""
        if unknown := sorted(params.keys() - _DEFAULTS.keys()):
            raise ConfigError(f"URank has no parameter '{unknown[0]}'; it has {', '.join(sorted(_DEFAULTS))}")
        type(self)(**self.get_params() | params)  # refuses invalid values
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = (f"{name}={value!r}" for name, value in self.get_params().items() if value != _DEFAULTS[name])
        return f"URank({', '.join(changed)})"

    def __sklearn_tags__(self) -> Any:
        """Describe the estimator to scikit-learn, which asks for this; nothing else here needs it."""
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            input_tags=InputTags(two_d_array=False, allow_nan=True),
        )

    def _settings(self) -> UrankConfig:
        """Validate the parameters."""
        tables = {"clicks": self.clicks, "scorer": self.scorer, "trees": self.trees, "baseline": self.baseline}
        for name, table in tables.items():
            if not isinstance(table, Mapping | None):
                raise ConfigError(f"{name} in URank must be a mapping of settings, or None; got {table!r}")
        own = {"goal": self.goal, "ranker": self.ranker, "method": self.method}
        seeds = {name: {"seed": self.seed} for name in ("clicks", "scorer", "svm")}
        given = {name: dict(table) for name, table in tables.items() if table is not None}
        return validate(UrankConfig, deep_merge({**own, **seeds}, given), "URank")

    def fit(
        self,
        log: AnyLog,
        *,
        keep: Collection[str] = (),
        memory: Memory = DEFAULT_MEMORY,
        report: Report = silent,
    ) -> Self:
        """Learn from a log: a `Log` of `urank.read`, a path, a prepared folder, or a table.

        `keep` is as in `urank.prepare`.
        """
        from urank.pipeline import fit_model, limited_threads, prepared

        self.config_ = self._settings()
        with limited_threads(), prepared(log, keep=keep, memory=memory, report=report) as dataset:
            self.fit_ = fit_model(dataset, self.config_, report=report)
        self.model_ = self.fit_.model
        return self

    def rank(self, candidates: Any, **options: Any) -> Any:
        """Rank candidates; options (`method`, `top`, `guard`, …) as in `RankingModel.rank`."""
        return self.fitted_model().rank(candidates, **options)

    def predict(self, candidates: Any, **options: Any) -> NDArray[np.int64]:
        """Return the position of each candidate `[rows]`, 1 for the best of its list; options as in `rank`."""
        frame = table_frame(candidates, "the candidates", "candidates").with_row_index(_ROW_INDEX)
        columns = dict(options.pop("columns", None) or {}) | {"item_id": _ROW_INDEX}
        ranked = self.fitted_model().rank(frame, columns=columns, **options)
        positions = np.zeros(frame.height, dtype=np.int64)
        positions[ranked["item_id"].to_numpy().astype(np.int64)] = ranked["position"].to_numpy()
        return positions

    def score(self, candidates: Any, value: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Score each candidate; pass whole lists, with ids as in `rank`."""
        return self.fitted_model().score(candidates, value)

    def log_ctr(self, candidates: Any) -> NDArray[np.float32]:
        """Return log P(click | candidate, position), or that of the goal, `[rows, K]`; candidates as in `score`."""
        return self.fitted_model().log_ctr(candidates)

    def save(self, folder: str | Path, *, overwrite: bool = False, onnx: bool = True) -> None:
        """Write the model into a folder; `urank.load_model` reads it."""
        from urank.model_io import save_model

        save_model(self.fitted_model(), self.config_, folder, overwrite=overwrite, onnx=onnx)

    def _repr_html_(self) -> str:
        """Return the view in a notebook: of the fitted model or, before, the parameters."""
        if not hasattr(self, "fit_"):
            return f"<code>{escape(repr(self))}</code>"
        from urank.report.model_report import model_html

        return model_html(self.model_, self.fit_.why, self.fit_.choice)

    def fitted_model(self) -> RankingModel:
        """Return the fitted model; a ConfigError before `fit`."""
        if not hasattr(self, "model_"):
            raise ConfigError("this URank has not been fitted; call fit with a log first")
        return self.model_


_DEFAULTS = {name: each.default for name, each in signature(URank).parameters.items()}
