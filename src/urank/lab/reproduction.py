"""`urank reproduce`: run what some tables and figures need, and put them together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import polars as pl
import tomli_w

from urank.config import read_toml, validate
from urank.errors import ConfigError, UrankError
from urank.lab.appstore_experiment import STORE_METHODS
from urank.lab.claims import (
    architecture_claims,
    architectures,
    claims_over_seeds,
    curve_claims,
    differences,
    list_example,
    position_curves,
    read_results,
    read_store_results,
    rows,
    store_claims,
    store_rows,
)
from urank.lab.letor_experiment import METHODS
from urank.lab.results import DATASETS, METRICS, STORE_METRICS, Reproduction, Row, StoreRow, dataset_name
from urank.lab.runner import run_steps, seed_folder, steps_for
from urank.lab.settings import EXPERIMENTS, ExperimentConfig, read_experiment
from urank.progress import Report, silent
from urank.storage import new_file

__all__ = ["experiments_of", "reproduce"]

_LIBRARIES = ("urank", "numpy", "polars", "torch", "lightgbm", "scikit-learn", "scipy")
SETTINGS = "settings.toml"


def experiments_of(what: str) -> list[str]:
    """The experiments that a name stands for; `all` for all of them."""
    if what == "all":
        return list(EXPERIMENTS)
    if what not in EXPERIMENTS:
        raise ConfigError(f"there are the experiments {', '.join(EXPERIMENTS)}, and all; got '{what}'")
    return [what]


def reproduce(
    what: Sequence[str],
    folder: str | Path,
    *,
    data: str | None = None,
    dataset: str = "",
    seeds: int = 5,
    workers: int | None = None,
    overrides: dict[str, Any] | None = None,
    source: str = "",
    report: Report = silent,
) -> Reproduction:
    """Run experiments and put their tables and figures together; what the folder holds already is not run again.

    Args:
        what: names of experiments, as `experiments_of` gives them.
        folder: where all of it is kept.
        data: a LETOR file or folder; documents are generated when left out.
        dataset: the paper's name of the data, if it is the paper's, so that its figures can stand beside ours.
        seeds: how many.
        workers: processes at a time.
        overrides: settings laid over those of every experiment.
        source: what errors call these.
        report: told how far it is.

    Raises:
        ConfigError: when the folder holds results of other settings.
    """
    folder = Path(folder)
    if seeds < 1:
        raise ConfigError(f"seeds must be a whole number from 1 up; got {seeds}")
    settings = dict(overrides or {})
    if data is not None:
        if not Path(data).exists():  # better refused before a folder is made
            raise ConfigError(f"{data} does not exist; data must be a LETOR file or a folder of such files")
        settings["simulation"] = {**settings.get("simulation", {}), "data": str(Path(data).resolve())}
    if dataset:
        settings["dataset"] = dataset
    configs = {name: read_experiment(name, settings, source) for name in what}
    config = next(iter(configs.values()))
    _check_dataset(config)
    _check_methods(configs)
    _claim(folder, config)
    names = list(dict.fromkeys(name for each in configs.values() for name in each.methods))
    try:
        run_steps(folder, config, steps_for(names, range(seeds)), workers=workers, report=report)
    except UrankError:
        _leave_nothing(folder)
        raise
    return _assemble(folder, configs, seeds)


def _check_dataset(config: ExperimentConfig) -> None:
    if config.dataset and config.dataset not in DATASETS:
        raise ConfigError(f"the paper's data sets are {', '.join(DATASETS)}; got '{config.dataset}'")
    if config.dataset and config.simulation.data is None:
        raise ConfigError(f"dataset says what the data is, so data must be given; got '{config.dataset}' alone")


def _check_methods(configs: dict[str, ExperimentConfig]) -> None:
    for experiment, config in configs.items():
        own = read_experiment(experiment).methods
        possible = STORE_METHODS if experiment == "table3" else METHODS
        unknown = next((name for name in config.methods if name not in possible and name not in own), None)
        if unknown is not None:
            raise ConfigError(f"methods of {experiment} must be some of {', '.join(possible)}; got '{unknown}'")
        if not any(name in possible for name in config.methods):
            raise ConfigError(f"methods of {experiment} must name at least one of {', '.join(possible)}")
        if experiment == "table2" and config.methods != own:
            raise ConfigError(f"methods of table2 must be {', '.join(own)}; got {', '.join(config.methods)}")


def _claim(folder: Path, config: ExperimentConfig) -> None:
    """Make the folder that of these settings, or see that it is."""
    path = folder / SETTINGS
    if path.is_file():
        earlier = validate(ExperimentConfig, read_toml(path), str(path))
        if earlier.same_settings(config):
            return
        if _holds_results(folder):  # else nothing was made by those settings
            raise ConfigError(f"{folder} holds results of other settings (see its {SETTINGS}); choose another folder")
    elif folder.is_dir() and any(not each.name.startswith(f".{SETTINGS}.") for each in folder.iterdir()):
        raise ConfigError(f"{folder} holds something else (it has no {SETTINGS}); choose another folder")
    with new_file(path) as working:
        working.write_text(_to_toml(config), encoding="utf-8")


def _holds_results(folder: Path) -> bool:
    return any(folder.glob("seed-*/candidates.parquet")) or any(folder.glob("seed-*/store/test.parquet"))


def _leave_nothing(folder: Path) -> None:
    """Take the folder back if nothing came of it, as when the data is not of the form."""
    if not _holds_results(folder):
        (folder / SETTINGS).unlink(missing_ok=True)
        for path in (*folder.glob("seed-*/store"), *folder.glob("seed-*"), folder):
            with suppress(OSError):  # what holds anything else stays
                path.rmdir()


def _to_toml(config: ExperimentConfig) -> str:
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude={"title", "methods"}))


def _assemble(folder: Path, configs: dict[str, ExperimentConfig], seeds: int) -> Reproduction:
    folders = [seed_folder(folder, seed) for seed in range(seeds)]
    config = next(iter(configs.values()))
    found: dict[str, Any] = {}
    of_letor = {name: each for name, each in configs.items() if name != "table3"}
    if of_letor:
        found |= _assemble_letor(folder, folders, of_letor)
    if "table3" in configs:
        found |= _assemble_store(folder, folders, configs["table3"])
    return Reproduction(
        what=list(configs),
        data="; ".join(_data_in_words(config, configs)),
        seeds=seeds,
        settings=_to_toml(config),
        versions={"python": python_version(), **{name: version(name) for name in _LIBRARIES}},
        seconds=found.pop("seconds", 0.0) + found.pop("seconds_store", 0.0),
        **found,
    )


def _assemble_letor(folder: Path, folders: list[Path], configs: dict[str, ExperimentConfig]) -> dict[str, Any]:
    """What was found on simulated clicks (Section 5)."""
    config = next(iter(configs.values()))
    methods = {name: [key for key in each.methods if key in METHODS] for name, each in configs.items()}
    every = list(dict.fromkeys(key for keys in methods.values() for key in keys))
    results = read_results(folders, every)
    found: dict[str, Any] = {}
    if "table1" in configs:
        found["rows"] = rows(results, methods["table1"], config.dataset)
        found["claims"] = claims_over_seeds(results, found["rows"])
        _write(folder / "table1.parquet", pl.DataFrame([_flat(row) for row in found["rows"]]))
    if "table2" in configs:
        own = rows(results, methods["table2"], config.dataset)
        found["architectures"] = architectures(folders, own, config.dataset)
        found["architecture_claims"] = architecture_claims(found["architectures"])
        columns = ("name", "train", "test", "valid", "clicks", "ctr")
        flat = [{column: getattr(row, column) for column in columns} for row in found["architectures"]]
        _write(folder / "table2.parquet", pl.DataFrame(flat))
    if "fig-ctr-by-position" in configs:
        found["curves"] = position_curves(folders, results, methods["fig-ctr-by-position"])
        names = (METHODS[key].name for key in ("lambdarank-truth", "urank", "km"))
        found["curve_claims"] = curve_claims(found["curves"], *names)
    if "fig-result-list" in configs:
        found["example"] = list_example(folders[0], results, methods["fig-result-list"])
    if "differences" in configs:
        found["differences"] = differences(results, methods["differences"])
    # With what earlier experiments in this folder found.
    known = [key for key in METHODS if all((each / "results" / f"{key}.parquet").is_file() for each in folders)]
    _write(folder / "results.parquet", read_results(folders, known))
    found["queries"] = results.filter(pl.col("method") == every[0]).height
    return found | {"seconds": _seconds(results)}


def _assemble_store(folder: Path, folders: list[Path], config: ExperimentConfig) -> dict[str, Any]:
    """What was found in the app store (Section 6.1)."""
    keys = [key for key in config.methods if key in STORE_METHODS]
    stores = [each / "store" for each in folders]
    results = read_store_results(stores, keys)
    found = store_rows(results, keys)
    _write(folder / "table3.parquet", pl.DataFrame([_flat_store(row) for row in found]))
    known = [key for key in STORE_METHODS if all((each / "results" / f"{key}.parquet").is_file() for each in stores)]
    _write(folder / "store-results.parquet", read_store_results(stores, known))
    return {
        "store": found,
        "store_claims": store_claims(results, found),
        "visits": results.filter(pl.col("method") == keys[0]).height,
        "seconds_store": _seconds(results),
    }


def _seconds(results: pl.DataFrame) -> float:
    return float(results.group_by("seed", "method").agg(pl.col("seconds").first())["seconds"].to_numpy().sum())


def _flat_store(row: StoreRow) -> dict[str, Any]:
    told: dict[str, Any] = {"method": row.key, "name": row.name, "kind": row.kind, "seconds": row.seconds}
    for metric in STORE_METRICS:
        told[metric] = row.mean[metric]
        told[f"{metric} deviation"] = row.deviation[metric]
        told[f"{metric} p"] = row.p_value.get(metric)
        told[f"{metric} true"] = row.true[metric]
        told[f"{metric} true p"] = row.true_p_value.get(metric)
        told[f"{metric} published"] = row.published.get(metric)
    return told


def _flat(row: Row) -> dict[str, Any]:
    told: dict[str, Any] = {"method": row.key, "name": row.name, "kind": row.kind, "seconds": row.seconds}
    for metric in METRICS:
        told[metric] = row.mean[metric]
        told[f"{metric} deviation"] = row.deviation[metric]
        told[f"{metric} p"] = row.p_value.get(metric)
        told[f"{metric} published"] = row.published.get(metric)
    return told


def _write(path: Path, frame: pl.DataFrame) -> None:
    with new_file(path) as working:
        frame.write_parquet(working)


def _data_in_words(config: ExperimentConfig, what: Collection[str]) -> Iterator[str]:
    if set(what) - {"table3"}:
        simulation = config.simulation
        denominator = "2^y_max − 1" if simulation.denominator is None else f"{simulation.denominator:g}"
        users = f"users of the kind '{simulation.user}', relevance over {denominator}"
        if simulation.data is None:
            yield f"{simulation.queries:,} generated queries, {simulation.features} features, {users}"
        else:
            name = dataset_name(config.dataset) if config.dataset else Path(simulation.data).name
            yield f"documents of {name}, {users}"
    if "table3" in what:
        market = config.store.market
        yield f"a simulated app store with {market.users:,} users and {market.apps:,} apps"
