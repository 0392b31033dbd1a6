"""Every estimation method by name: fit, save, load.

Curves are saved as JSON, a contextual model as safetensors with JSON metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from urank.errors import ConfigError, DataError
from urank.learning.features import Featurizer
from urank.log.dataset import Dataset
from urank.progress import Report, silent
from urank.propensity.cpbm import Contextual, CpbmConfig, build_contextual, fit_cpbm
from urank.propensity.em import fit_em
from urank.propensity.examination import ExaminationCurve, Propensity
from urank.propensity.harvest import fit_harvest
from urank.propensity.randomised import ByCategory, fit_by_category, fit_randomised
from urank.storage import new_file

FORMAT, VERSION = "urank propensity", 1

PropensityMethod = Literal["none", "randomised", "harvest", "cpbm", "em"]


def fit_propensity(
    method: PropensityMethod,
    dataset: Dataset,
    *,
    policies: Sequence[str] | None = None,
    by: str | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    report: Report = silent,
) -> Propensity | None:
    """Estimate examination from the train split of a log.

    Args:
        method: `randomised`, `harvest`, `cpbm` or `em`; `none` returns None.
        dataset, report: the prepared log, and progress callback.
        policies: for `randomised` only: the policies whose lists were randomised.
        by: for `randomised` only: a categorical column, to estimate a curve for each category.
        seed: seed of `cpbm` and `em`; the others draw no random numbers.
        checkpoint: for `cpbm`: file from which an interrupted run resumes.

    Raises:
        DataError: the log lacks what the method needs.
    """
    for flag, argument in (("--randomised", policies), ("--by", by)):
        if argument and method != "randomised":
            raise ConfigError(f"{flag} can only be used with the method randomised; got the method '{method}'")
    match method:
        case "none":
            return None
        case "randomised" if by is not None:
            return fit_by_category(dataset, column=by, policies=policies)
        case "randomised":
            return fit_randomised(dataset, policies=policies)
        case "harvest":
            return fit_harvest(dataset)
        case "cpbm":
            return fit_cpbm(dataset, CpbmConfig(seed=seed), checkpoint=checkpoint, report=report)
        case "em":
            return fit_em(dataset, seed=seed, report=report)
        case _:
            raise ConfigError(f"method must be one of {', '.join(get_args(PropensityMethod))}; got '{method}'")


def save_propensity(propensity: Propensity, path: str | Path) -> None:
    """Save an estimate, atomically.

    Raises:
        ConfigError: it is not an estimate, such as the truth of a simulation.
    """
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": propensity.name}
    with new_file(path) as working:
        if isinstance(propensity, Contextual):
            content |= {"positions": propensity.positions, "config": propensity.config.model_dump(mode="json")}
            content["featurizer"] = propensity.featurizer.to_dict()
            weights = {name: tensor.cpu().contiguous() for name, tensor in propensity.network.state_dict().items()}
            save_file(weights, working, metadata={"propensity": json.dumps(content)})
            return
        if isinstance(propensity, ByCategory):
            curves = {category: _curve_content(curve) for category, curve in propensity.curves.items()}
            content |= {"column": propensity.column, "overall": _curve_content(propensity.overall)}
            content["categories"] = curves
        elif isinstance(propensity, ExaminationCurve):
            content |= _curve_content(propensity)
        else:
            raise ConfigError(f"only curves and contextual models can be saved; got {propensity.name}")
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        working.write_text(text + "\n", encoding="utf-8")


def load_propensity(path: str | Path) -> ExaminationCurve | ByCategory | Contextual:
    """Load an estimate that `save_propensity` wrote.

    Raises:
        DataError: the file is of another kind, damaged, or of a newer version.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            is_json = file.read(1) == b"{"
        return _load_curves(path) if is_json else _load_contextual(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{path} is not an estimate of `urank examination`, or it is damaged") from error


def _load_curves(path: Path) -> ExaminationCurve | ByCategory:
    content = json.loads(path.read_text(encoding="utf-8"))
    _check_format(content, path)
    name = str(content["name"])
    if "column" not in content:
        return _curve(content, name)
    overall = _curve(content["overall"], "randomised")
    curves = {category: _curve(each, "randomised") for category, each in content["categories"].items()}
    if not isinstance(content["column"], str):
        raise TypeError("column must be a name")
    if any(len(curve.values) != len(overall.values) for curve in curves.values()):
        raise ValueError("all curves must have one value for each position")
    return ByCategory(name, content["column"], overall, curves)


def _load_contextual(path: Path) -> Contextual:
    with safe_open(path, framework="pt") as file:
        content = json.loads((file.metadata() or {})["propensity"])
        _check_format(content, path)
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    featurizer = Featurizer.from_dict(content["featurizer"])
    model = build_contextual(featurizer, int(content["positions"]), CpbmConfig.model_validate(content["config"]))
    model.network.load_state_dict(weights)
    model.network.eval()
    return model


def _curve_content(curve: ExaminationCurve) -> dict[str, Any]:
    return {"values": curve.values, "errors": curve.errors}


def _curve(content: Mapping[str, Any], name: str) -> ExaminationCurve:
    values = tuple(float(value) for value in content["values"])
    errors = tuple(float(error) for error in content["errors"]) if content["errors"] is not None else None
    finite = all(math.isfinite(number) and number >= 0 for number in (*values, *(errors or ())))
    if not values or not finite or len(errors or values) != len(values):
        raise ValueError("values and errors must be finite, non-negative, and one for each position")
    return ExaminationCurve(name, values, errors)


def _check_format(content: Mapping[str, Any], path: Path) -> None:
    if content["format"] != FORMAT:
        raise ValueError(f"another format, {content['format']}")
    if content["version"] > VERSION:
        raise DataError(f"{path} was written by a newer version of urank; update urank")
