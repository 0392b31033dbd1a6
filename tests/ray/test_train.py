"""Workers that learn together learn what one process does, and go on when one of them is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

import urank
from simulated import Small
from urank.config import validate
from urank.errors import DataError
from urank.pipeline import fit_model
from urank.ranking.ranking_settings import UrankConfig
from urank.ray.cluster import Cluster
from urank.ray.jobs import train_on_ray

QUICK = {"epochs": 4, "batch_lists": 16}
TOLERANCE = {"scorer": 0.015}
"""The utility of a scorer by its own click table differs by 0.9 % between the seeds of one process."""

CONFIG = validate(
    UrankConfig,
    {
        "method": "score",
        "clicks": {"families": ["monotone"], "training": QUICK},
        "scorer": {"training": QUICK},
    },
)


def best(rounds: list[dict[str, float]]) -> float:
    return min(each["valid"] for each in rounds)


def test_the_held_out_losses_are_those_of_one_process(larger: Small, cluster: Cluster, tmp_path: Path) -> None:
    here = fit_model(larger.dataset, CONFIG).rounds
    options = {"cluster": cluster, "checkpoints": tmp_path / "state", "onnx": False}
    _, trained = train_on_ray(larger.dataset, CONFIG, tmp_path / "model", **options)
    assert trained.rounds.keys() == here.keys()
    for name, rounds in trained.rounds.items():
        assert [each["rows"] for each in rounds] == [each["rows"] for each in here[name]]
        assert best(rounds) == pytest.approx(best(here[name]), rel=TOLERANCE.get(name, 0.005)), name
    model = urank.load_model(tmp_path / "model")
    assert model.method == "score"
    candidates = larger.simulation.candidates.head(50)
    assert model.rank(candidates).height == 50


class Killer(threading.Thread):
    """Kills one worker once a training has left its first checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.killed = 0

    def run(self) -> None:
        deadline = time.monotonic() + 300
        while not any(self.folder.glob("*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in psutil.process_iter(["cmdline"]):
            if any("RayTrainWorker" in word for word in process.info["cmdline"] or []):
                process.kill()
                self.killed += 1
                return


def test_a_killed_worker_does_not_end_the_training(larger: Small, cluster: Cluster, tmp_path: Path) -> None:
    state = tmp_path / "state"
    killer = Killer(state)
    killer.start()
    _, trained = train_on_ray(
        larger.dataset, CONFIG, tmp_path / "model", cluster=cluster, checkpoints=state, onnx=False
    )
    killer.join()
    assert killer.killed == 1
    here = fit_model(larger.dataset, CONFIG).rounds
    for name, rounds in trained.rounds.items():
        assert [each["round"] for each in rounds] == list(range(QUICK["epochs"]))  # none is missing, none came twice
        assert best(rounds) == pytest.approx(best(here[name]), rel=TOLERANCE.get(name, 0.005)), name


def test_what_a_worker_refuses_is_raised_once(larger: Small, cluster: Cluster, tmp_path: Path) -> None:
    config = validate(UrankConfig, {"ranker": "ranksvm", "baseline": {"examination": str(tmp_path / "none.json")}})
    with pytest.raises(DataError, match=r"none\.json"):
        train_on_ray(larger.dataset, config, tmp_path / "model", cluster=cluster, checkpoints=tmp_path / "state")
