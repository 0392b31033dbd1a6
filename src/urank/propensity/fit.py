"""Every way to estimate examination, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from urank.errors import ConfigError
from urank.log.dataset import Dataset
from urank.progress import Report, silent
from urank.propensity.categories import fit_by_category
from urank.propensity.cpbm import CpbmConfig, fit_cpbm
from urank.propensity.em import fit_em
from urank.propensity.harvest import fit_harvest
from urank.propensity.model import Propensity
from urank.propensity.randomised import fit_randomised

__all__ = ["PropensityMethod", "fit_propensity"]

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
