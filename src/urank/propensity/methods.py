"""Every way to estimate examination, by name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError
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

__all__ = ["PropensityMethod", "fit_propensity", "load_propensity", "save_propensity"]

FORMAT, VERSION = "urank propensity", 1


def save_propensity(propensity: Propensity, path: str | Path) -> None:
    """Write an estimate; a file that is there is replaced when the new one is complete.

    Raises:
        ConfigError: when it is not an estimate, such as the truth of a simulation.
    """
    if not isinstance(propensity, ExaminationCurve | ByCategory | Contextual):
        raise ConfigError(f"only curves or a contextual model can be saved; got {propensity.name}")
    head = {"format": FORMAT, "version": VERSION, "name": propensity.name}
    with new_file(path) as working:
        if not isinstance(propensity, Contextual):
            told = head | (
                _told(propensity) if isinstance(propensity, ExaminationCurve) else _told_by_category(propensity)
            )
            text = json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False)
            working.write_text(text + "\n", encoding="utf-8")
        else:
            told = head | {
                "positions": propensity.positions,
                "config": propensity.config.model_dump(mode="json"),
                "featurizer": propensity.featurizer.to_dict(),
            }
            weights = {name: tensor.cpu().contiguous() for name, tensor in propensity.network.state_dict().items()}
            save_file(weights, working, metadata={"propensity": json.dumps(told)})


def load_propensity(path: str | Path) -> ExaminationCurve | ByCategory | Contextual:
    """What `save_propensity` wrote.

    Raises:
        DataError: when the file is another, damaged, or of a newer version.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            is_json = file.read(1) == b"{"
        return _load_curves(path) if is_json else _load_contextual(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError, ValidationError) as error:
        raise DataError(f"{path} is not a propensity that urank wrote, or it is damaged") from error


def _told(curve: ExaminationCurve) -> dict[str, Any]:
    return {"values": curve.values, "errors": curve.errors}


def _told_by_category(propensity: ByCategory) -> dict[str, Any]:
    curves = {category: _told(curve) for category, curve in propensity.curves.items()}
    return {"column": propensity.column, "overall": _told(propensity.overall), "categories": curves}


def _load_curves(path: Path) -> ExaminationCurve | ByCategory:
    told = _checked(json.loads(path.read_text(encoding="utf-8")), path)
    name = str(told["name"])
    if "column" not in told:
        return _curve(told, name)
    overall = _curve(told["overall"], "randomised")
    curves = {category: _curve(each, "randomised") for category, each in told["categories"].items()}
    if not isinstance(told["column"], str):
        raise TypeError("column must be a name")
    if any(len(curve.values) != len(overall.values) for curve in curves.values()):
        raise ValueError("all curves must have a number for each position")
    return ByCategory(name, told["column"], overall, curves)


def _curve(told: dict[str, Any], name: str) -> ExaminationCurve:
    values = tuple(float(value) for value in told["values"])
    errors = tuple(float(error) for error in told["errors"]) if told["errors"] is not None else None
    finite = all(math.isfinite(number) and number >= 0 for number in (*values, *(errors or ())))
    if not values or not finite or len(errors or values) != len(values):
        raise ValueError("values and errors must be numbers from 0 up, one for each position")
    return ExaminationCurve(name, values, errors)


def _load_contextual(path: Path) -> Contextual:
    with safe_open(path, framework="pt") as file:
        told = _checked(json.loads((file.metadata() or {})["propensity"]), path)
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    featurizer = Featurizer.from_dict(told["featurizer"])
    model = build_contextual(featurizer, int(told["positions"]), CpbmConfig.model_validate(told["config"]))
    model.network.load_state_dict(weights)
    model.network.eval()
    return model


def _checked(told: dict[str, Any], path: Path) -> dict[str, Any]:
    if told["format"] != FORMAT:
        raise ValueError(f"another format, {told['format']}")
    if told["version"] > VERSION:
        raise DataError(f"{path} was written by a newer version of urank; update urank")
    return told


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
        method: `randomised`, `harvest`, `cpbm` or `em`; `none` gives none.
        dataset: the prepared log.
        policies: for `randomised` alone: the policies whose lists were randomised.
        by: for `randomised` alone: a categorical column, each of whose categories gets a curve of its own.
        seed: of `cpbm` and `em`; the others draw no random numbers.
        checkpoint: of `cpbm`: a file from which a run that was killed goes on.
        report: told how far it is.

    Raises:
        DataError: when the log does not hold what the method needs.
    """
    if policies and method != "randomised":
        raise ConfigError(f"policies belong to the method randomised; got the method '{method}'")
    if by is not None and method != "randomised":
        raise ConfigError(f"by belongs to the method randomised; got the method '{method}'")
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
