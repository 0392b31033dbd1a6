"""Two workers of Ray on this machine against one process, and a worker that is killed in the middle."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import Bar
from benchmarks.simulated import simulated
from urank.api import fit_model
from urank.clicks.config import ClickConfig
from urank.clicks.model import ClickModel
from urank.log.dataset import Dataset
from urank.model import load_model
from urank.rankers.config import UrankConfig
from urank.rankers.network import NetworkScorer
from urank.rankers.ranking import RankingModel
from urank.rankers.urank import RankerConfig, estimated_utility
from urank.scale.cluster import Cluster
from urank.scale.train import Trained, train_on_ray
from urank.simulate.config import SimulationConfig
from urank.stream import Stream

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
        trained.save(Path(name) / "model")
        scorers = [fit.model, load_model(Path(name) / "model")]
    one, many = (_utility(dataset, fit.clicks.model, model, config) for model in scorers)
    words = f"{WORKERS} workers, scorer: held-out utility, by one click table, against that of one process"
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


def _utility(dataset: Dataset, clicks: ClickModel, model: RankingModel, config: UrankConfig) -> float:
    """What the order of a scorer earns on valid. Each training judges its scorer by its own click model, so that what
    they say themselves cannot be compared."""
    stream = Stream(dataset, "valid", clicks.featurizer, table=lambda inputs: np.exp(clicks.log_ctr(inputs)))
    assert isinstance(model.scorer, NetworkScorer)  # noqa: S101 - as configured
    return estimated_utility(model.scorer.network, stream, config.scorer.objective)


def _on_ray(dataset: Dataset, config: UrankConfig) -> Trained:
    with tempfile.TemporaryDirectory(prefix="urank-checkpoints-") as name:
        return train_on_ray(str(dataset.folder), config, Cluster(WORKERS), checkpoints=name, onnx=False)


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
