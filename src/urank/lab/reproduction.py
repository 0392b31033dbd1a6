"""Reproduce the paper: run the methods that some tables and figures need, and assemble the results."""

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
from urank.lab import claims
from urank.lab.appstore_experiment import LIVE, STORE_METHODS
from urank.lab.experiment import EXPERIMENTS, PRESENTATION, ExperimentConfig, read_experiment
from urank.lab.experiment_results import (
    METRICS,
    STORE_METRICS,
    MethodRow,
    Reproduction,
    SettingRows,
    StoreRow,
    dataset_name,
)
from urank.lab.letor_experiment import METHODS
from urank.lab.letor_simulation import SimulationConfig
from urank.lab.runner import run_tasks, seed_folder, tasks_for
from urank.lab.user_models import UNWEIGHTED, WITHOUT_TABLE
from urank.progress import Report, silent
from urank.storage import new_file

_LIBRARIES = ("urank", "numpy", "polars", "torch", "lightgbm", "scikit-learn", "scipy")
SETTINGS = "settings.toml"
_METHODS_OF_STORE: dict[str, Collection[str]] = {"table3": STORE_METHODS, "live-test": (LIVE,)}
"""The experiments in the app store, and their methods."""


def experiment_names(what: str) -> list[str]:
    """Return the experiments that a name stands for: `all`, or itself."""
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
    command: str = "",
    report: Report = silent,
) -> Reproduction:
    """Run experiments and assemble their tables and figures; results that exist in the folder are reused.

    Args:
        what: names of experiments.
        folder: output folder.
        data: a LETOR file or folder; documents are generated if left out.
        dataset: the paper's name of the data, if it is the paper's, to show the published figures beside ours.
        seeds: number of seeds.
        workers: number of processes.
        overrides: settings merged into those of every experiment.
        source: name of the overrides in error messages.
        command: for the provenance of the results.
        report: progress callback.

    Raises:
        ConfigError: when the folder contains results of other settings.
    """
    folder = Path(folder)
    if seeds < 1:
        raise ConfigError(f"seeds must be a whole number from 1 up; got {seeds}")
    settings = dict(overrides or {})
    if data is not None:
        if not Path(data).exists():  # fail before the folder is created
            raise ConfigError(f"{data} does not exist; data must be a LETOR file or a folder of such files")
        settings["simulation"] = {**settings.get("simulation", {}), "data": str(Path(data).resolve())}
    if dataset:
        settings["dataset"] = dataset
    configs = {name: read_experiment(name, settings, source) for name in what}
    config = next(iter(configs.values()))
    if config.dataset:
        dataset_name(config.dataset)  # refuses others than the paper's
        if config.simulation.data is None:
            raise ConfigError(f"dataset names the given data, so data must be given too; got '{config.dataset}' alone")
    _check_methods(configs)
    runs = _runs(folder, configs)
    if folder not in runs and not (folder / SETTINGS).is_file():  # mark the folder as that of a reproduction
        _claim_folder(folder, config)
    for own, run in runs.items():
        _claim_folder(own, run)
    try:
        for own, run in runs.items():
            run_tasks(own, run, tasks_for(run.methods, _seeds_of(run, seeds)), workers=workers, report=report)
    except UrankError:  # for example because the data is malformed
        if not _has_results(folder):
            (folder / SETTINGS).unlink(missing_ok=True)
            for own in runs:
                if own != folder and not _has_results(own):
                    (own / SETTINGS).unlink(missing_ok=True)
            inner = ("settings/*/seed-*/store", "settings/*/seed-*", "settings/*", "settings", "seed-*/store", "seed-*")
            for path in (*(path for pattern in inner for path in folder.glob(pattern)), folder):
                with suppress(OSError):  # not empty
                    path.rmdir()
        raise
    return _assemble(folder, configs, seeds, command)


def _setting_folder(folder: Path, name: str) -> Path:
    return folder / "settings" / name


def _runs(folder: Path, configs: dict[str, ExperimentConfig]) -> dict[Path, ExperimentConfig]:
    """Return by folder the experiments to run, each with the methods that anything needs in that folder."""
    runs: dict[Path, ExperimentConfig] = {}
    for config in configs.values():
        parts = {_setting_folder(folder, name): config.with_setting(name) for name in config.settings}
        for own, part in (parts or {folder: config}).items():
            earlier = runs[own].methods if own in runs else ()
            methods = dict.fromkeys((*earlier, *_possible(part.methods, part.simulation)))
            runs[own] = part.model_copy(update={"methods": tuple(methods)})
    return runs


def _seeds_of(config: ExperimentConfig, seeds: int) -> range:
    """Return the seeds of an experiment when so many are asked for."""
    return range(min(seeds, config.seeds or seeds))


def _possible(methods: Sequence[str], simulation: SimulationConfig) -> list[str]:
    """Return the methods that these users allow: an oracle needs a click table."""
    without = simulation.user in WITHOUT_TABLE
    return [key for key in methods if not (without and key in METHODS and METHODS[key].kind == "oracle")]


def _check_methods(configs: dict[str, ExperimentConfig]) -> None:
    for experiment, config in configs.items():
        own = read_experiment(experiment).methods
        possible: Collection[str] = _METHODS_OF_STORE.get(experiment, METHODS)
        unknown = next((name for name in config.methods if name not in possible and name not in own), None)
        if unknown is not None:
            raise ConfigError(f"methods of {experiment} must be some of {', '.join(possible)}; got '{unknown}'")
        if not any(name in possible for name in config.methods):
            raise ConfigError(f"methods of {experiment} must name at least one of {', '.join(possible)}")
        user = config.simulation.user
        if user in WITHOUT_TABLE and experiment not in _METHODS_OF_STORE and not config.settings:
            oracles = [name for name in config.methods if name not in _possible(config.methods, config.simulation)]
            if oracles or experiment.startswith("fig-"):
                asked = f"methods {', '.join(oracles)}" if oracles else experiment
                raise ConfigError(
                    f"simulation.user must have a click table for {experiment}: the clicks of the users '{user}' "
                    f"depend on the items above; got {asked}"
                )
        if experiment in ("table2", "live-test") and config.methods != own:
            raise ConfigError(f"methods of {experiment} must be {', '.join(own)}; got {', '.join(config.methods)}")


def _claim_folder(folder: Path, config: ExperimentConfig) -> None:
    """Write the settings to the folder, or check that it has the same settings."""
    path = folder / SETTINGS
    if path.is_file():
        earlier = validate(ExperimentConfig, read_toml(path), str(path))
        if earlier.same_settings(config):
            return
        if _has_results(folder):
            raise ConfigError(
                f"{folder} contains results of other settings (see its {SETTINGS}); choose another folder"
            )
    elif folder.is_dir() and any(not each.name.startswith(f".{SETTINGS}.") for each in folder.iterdir()):
        raise ConfigError(f"{folder} contains something else (it has no {SETTINGS}); choose another folder")
    with new_file(path) as working:
        working.write_text(_to_toml(config), encoding="utf-8")


def _has_results(folder: Path) -> bool:
    outputs = ("candidates.parquet", "store/test.parquet", f"store/results/{LIVE}.parquet")
    return any(path for output in outputs for path in folder.glob(f"seed-*/{output}"))


def _to_toml(config: ExperimentConfig) -> str:
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude=PRESENTATION))


def _assemble(folder: Path, configs: dict[str, ExperimentConfig], seeds: int, command: str) -> Reproduction:
    folders = [seed_folder(folder, seed) for seed in range(seeds)]
    config = next(iter(configs.values()))
    found: dict[str, Any] = {"seconds": 0.0}
    made: list[tuple[Path, pl.DataFrame]] = []
    if of_letor := {
        name: each for name, each in configs.items() if name not in _METHODS_OF_STORE and not each.settings
    }:
        results, parts = _assemble_letor(folder, folders, of_letor)
        found |= parts
        made.append((folder, results))
    if sweeps := {name: each for name, each in configs.items() if each.settings}:
        found["sweeps"] = {}
        for name, each in sweeps.items():
            found["sweeps"][name], of_settings = _assemble_settings(folder, name, each, seeds)
            made += of_settings
    if "table3" in configs:
        results, parts = _assemble_store(folder, [each / "store" for each in folders], configs["table3"])
        found |= parts
        made.append((folder / "store", results))
    if "live-test" in configs:
        results = claims.read_results([each / "store" for each in folders], [LIVE])
        found["live"] = claims.live_rows(results)
        found["live_claims"] = claims.claims_over_seeds(
            lambda some: claims.live_claims(claims.live_rows(some)), results
        )
        _write(folder / "live-test.parquet", results)
        made.append((folder / "store", results))
    found["seconds"] = _seconds(made)
    return Reproduction(
        what=list(configs),
        data="; ".join(_describe_data(config, configs)),
        setting=setting_name(config.simulation),
        provenance=_provenance([each for _, each in made], command),
        seeds=seeds,
        settings=_to_toml(config),
        versions={"python": python_version(), **{name: version(name) for name in _LIBRARIES}},
        **found,
    )


def _assemble_letor(
    folder: Path, folders: list[Path], configs: dict[str, ExperimentConfig]
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Assemble the results on simulated clicks (Section 5)."""
    dataset = next(iter(configs.values())).dataset
    methods = {name: [key for key in each.methods if key in METHODS] for name, each in configs.items()}
    every = list(dict.fromkeys(key for keys in methods.values() for key in keys))
    results = claims.read_results(folders, every)
    found: dict[str, Any] = {"queries": results.filter(pl.col("method") == every[0]).height}
    if table1 := methods.get("table1", []):
        found["rows"] = claims.method_rows(results, table1, dataset)
        found["claims"] = claims.claims_over_seeds(
            lambda some: claims.method_claims(claims.method_rows(some, table1)), results
        )
        _write(folder / "table1.parquet", pl.DataFrame([_flat(row, METRICS) for row in found["rows"]]))
    if keys := methods.get("table2"):
        rows = claims.architecture_rows(folders, results, keys, dataset)
        found |= {"architectures": rows, "architecture_claims": claims.architecture_claims(rows)}
        columns = ("name", "train", "test", "valid", "clicks", "ctr")
        flat = [{column: getattr(row, column) for column in columns} for row in rows]
        _write(folder / "table2.parquet", pl.DataFrame(flat))
    if keys := methods.get("fig-ctr-by-position"):
        curves = claims.position_curves(folders, results, keys)
        found |= {"curves": curves, "curve_claims": claims.curve_claims(curves)}
    if keys := methods.get("fig-result-list"):
        found["example"] = claims.list_example(folders[0], results, keys)
    if keys := methods.get("differences"):
        found["differences"] = claims.differences(results, keys)
    _write_all_results(folder / "results.parquet", folders, METHODS)
    return results, found


def _assemble_settings(
    folder: Path, experiment: str, config: ExperimentConfig, seeds: int
) -> tuple[list[SettingRows], list[tuple[Path, pl.DataFrame]]]:
    """Assemble Table 1 with each setting; also return the results by folder."""
    tables, every = [], []
    for name in config.settings:
        part, own = config.with_setting(name), _setting_folder(folder, name)
        keys = _possible(part.methods, part.simulation)
        results = claims.read_results([seed_folder(own, seed) for seed in _seeds_of(config, seeds)], keys)
        label = f"users '{part.simulation.user}'" if experiment == "users" else attention_name(part.simulation)
        tables.append(SettingRows(label, claims.method_rows(results, keys), len(_seeds_of(config, seeds))))
        every.append((own, results))
    flat = [{"setting": table.name} | _flat(row, METRICS) for table in tables for row in table.rows]
    _write(folder / f"{experiment}.parquet", pl.DataFrame(flat, infer_schema_length=None))
    return tables, every


def _provenance(results: Sequence[pl.DataFrame], command: str) -> dict[str, str]:
    """Return the commits and the last date of results, several commits if the run was resumed with other code."""
    if not all("commit" in each.columns for each in results):
        return {}
    commits = sorted(set(pl.concat([each.select("commit") for each in results])["commit"]))
    last = max(str(each["date"].max()) for each in results)
    return {"commit": ", ".join(commits), "command": command, "date": last}


def _assemble_store(folder: Path, folders: list[Path], config: ExperimentConfig) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Assemble the results in the app store (Section 6.1)."""
    keys = [key for key in config.methods if key in STORE_METHODS]
    results = claims.read_results(folders, keys)
    rows = claims.store_rows(results, keys)
    _write(folder / "table3.parquet", pl.DataFrame([_flat(row, STORE_METRICS) for row in rows]))
    _write_all_results(folder / "store-results.parquet", folders, STORE_METHODS)
    return results, {
        "store": rows,
        "store_claims": claims.claims_over_seeds(
            lambda some: claims.store_claims(some, claims.store_rows(some, keys)), results
        ),
        "visits": results.filter(pl.col("method") == keys[0]).height,
    }


def _write_all_results(path: Path, folders: list[Path], methods: Collection[str]) -> None:
    """Write the results of all methods, including those of earlier experiments in the folder."""
    known = [key for key in methods if all((each / "results" / f"{key}.parquet").is_file() for each in folders)]
    _write(path, claims.read_results(folders, known))


def _seconds(made: Sequence[tuple[Path, pl.DataFrame]]) -> float:
    """Sum the training time of all methods and seeds; experiments that share a folder share trained methods."""
    times: dict[tuple[Path, int, str], float] = {}
    for folder, results in made:
        for seed, method, seconds in results.select("seed", "method", "seconds").unique().iter_rows():
            times[folder, seed, method] = seconds
    return sum(times.values())


def _flat(row: MethodRow, metrics: Sequence[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {"method": row.key, "name": row.name, "kind": row.kind, "seconds": row.seconds}
    for metric in metrics:
        flat[metric] = row.mean[metric]
        flat[f"{metric} deviation"] = row.deviation[metric]
        flat[f"{metric} p"] = row.p_value.get(metric)
        if isinstance(row, StoreRow):
            flat[f"{metric} true"] = row.true[metric]
            flat[f"{metric} true p"] = row.true_p_value.get(metric)
        flat[f"{metric} published"] = row.published.get(metric)
    return flat


def _write(path: Path, frame: pl.DataFrame) -> None:
    with new_file(path) as working:
        frame.write_parquet(working)


def attention_name(simulation: SimulationConfig) -> str:
    """Name the strength of item-specific attention.

    >>> attention_name(SimulationConfig(eta=0.7, attention_features=10))
    'η 0.7, 10 features'
    """
    return f"η {simulation.eta:g}, {simulation.attention_features or 'all'} features"


def setting_name(simulation: SimulationConfig) -> str:
    """Name the users of a simulation: what the figures of every table depend on."""
    denominator = "2^y_max − 1" if simulation.denominator is None else f"{simulation.denominator:g}"
    attention = "" if simulation.user in UNWEIGHTED else f" ({attention_name(simulation)})"
    return f"users of the kind '{simulation.user}'{attention}, relevance over {denominator}"


def _describe_data(config: ExperimentConfig, what: Collection[str]) -> Iterator[str]:
    if set(what) - set(_METHODS_OF_STORE):
        simulation = config.simulation
        users = setting_name(simulation)
        if simulation.data is None:
            yield f"{simulation.queries:,} generated queries, {simulation.features} features, {users}"
        else:
            name = dataset_name(config.dataset) if config.dataset else Path(simulation.data).name
            yield f"documents of {name}, {users}"
    if "table3" in what:
        market = config.store.market
        yield f"a simulated app store with {market.users:,} users and {market.apps:,} apps"
    if "live-test" in what:
        live = config.store.live
        yield f"a live test of {live.days} days in one with {live.market.users:,} users"
