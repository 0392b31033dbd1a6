"""Two workers of Ray on this machine against one process, and a worker that is killed in the middle."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Bar
from benchmarks.simulated import simulated
from urank.clicks.click_settings import ClickConfig
from urank.lab.letor_simulation import SimulationConfig
from urank.log.dataset import Dataset
from urank.model_io import save_model
from urank.pipeline import Training, fit_model
from urank.progress import Report
from urank.ranking.ranking_settings import RankerConfig, UrankConfig
from urank.ranking.urank_network import fit_urank
from urank.ray.cluster import Cluster
from urank.ray.jobs import model_files, model_from_files, train_on_ray
from urank.ray.workers import run_on_workers

WORKERS = 2


def against_one_process(folder: Path, queries: int) -> Iterator[Bar]:
    """The held-out losses of both, and what a lost worker costs."""
    dataset = simulated(folder / "ray", SimulationConfig(queries=queries))
    config = UrankConfig(clicks=ClickConfig(families=("monotone",)), scorer=RankerConfig(), method="score")
    start = time.perf_counter()
    fit = fit_model(dataset, config)
    alone, alone_seconds = fit.rounds, time.perf_counter() - start
    start = time.perf_counter()
    trained = _on_ray(dataset, config)
    together, seconds = trained.rounds, time.perf_counter() - start
    for name in alone:
        if name != "scorer":
            one, many = (min(each["valid"] for each in rounds[name]) for rounds in (alone, together))
            words = f"{WORKERS} workers, {name.partition('-')[0]}: held-out loss against that of one process"
            yield Bar(words, abs(many / one - 1), "share apart", at_most=0.005, part="ray")
    with tempfile.TemporaryDirectory(prefix="urank-benchmark-") as name:
        save_model(fit.model, config, Path(name) / "model", onnx=False)
        settings = {"files": model_files(Path(name) / "model"), "data": dataset.folder, "config": config.scorer}
        many = run_on_workers(_held_out_utility, settings, Cluster(WORKERS))
    one = -min(each["valid"] for each in alone["scorer"])
    words = f"{WORKERS} workers, scorer on one click model: held-out utility against that of one process"
    yield Bar(words, abs(many / one - 1), "share apart", at_most=0.005, part="ray")
    slower = seconds / alone_seconds
    yield Bar(f"{WORKERS} workers: time against one process, start included", slower, "times", part="ray")
    killer = _Killer()
    killer.start()
    survived = _on_ray(dataset, config).rounds
    killer.join()
    yield Bar("workers killed during a training", killer.killed, "", at_least=1, part="ray")
    ended = all(len(survived[name]) == len(together[name]) for name in together)
    yield Bar("trainings that ended all the same", float(ended), "of 1", at_least=1, part="ray")
    worst = max(
        abs(min(each["valid"] for each in survived[name]) / min(each["valid"] for each in together[name]) - 1)
        for name in together
    )
    yield Bar("its held-out losses against those without a loss", worst, "share apart", at_most=0.005, part="ray")


def _held_out_utility(settings: Mapping[str, Any], report: Report) -> float:
    """Of a scorer that workers train on a click model that is given; by that model, as one process judges its own."""
    clicks = model_from_files(settings["files"]).clicks
    _, history = fit_urank(Dataset(settings["data"]), clicks, settings["config"], report=report)
    return -history.best


def _on_ray(dataset: Dataset, config: UrankConfig) -> Training:
    with tempfile.TemporaryDirectory(prefix="urank-checkpoints-") as name:
        folder = Path(name)
        options = {"cluster": Cluster(WORKERS), "checkpoints": folder / "state", "onnx": False}
        _, training = train_on_ray(dataset, config, folder / "model", **options)
        return training


class _Killer(threading.Thread):
    """Kills one worker as soon as it has learned for a while."""

    def __init__(self, seconds: float = 5.0) -> None:
        super().__init__(daemon=True)
        self.seconds = seconds
        self.killed = 0

    def run(self) -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not self.killed:
            time.sleep(0.5)
            for process in workers_of_this_process():
                if sum(process.cpu_times()[:2]) > self.seconds + 5:
                    process.kill()
                    self.killed = 1
                    break


def workers_of_this_process() -> list[psutil.Process]:
    """The processes in which Ray Train runs a function."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if any("RayTrainWorker" in word for word in each.info["cmdline"] or [])]
