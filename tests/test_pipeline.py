"""The public face: read, fit, rank, evaluate, save; refusals in one sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from sklearn.base import clone
from sklearn.utils.estimator_checks import (
    check_estimator_cloneable,
    check_estimator_repr,
    check_estimator_tags_renamed,
    check_get_params_invariance,
    check_mixin_order,
    check_no_attributes_set_in_init,
    check_parameters_default_constructible,
    check_set_params,
    check_valid_tag_types,
)

import urank
from known_judges import QUICK_JUDGES as JUDGES
from simulated import Small, make
from urank.config import validate
from urank.errors import ConfigError, DataError
from urank.log.dataset import Dataset
from urank.pipeline import (
    ModelFit,
    best_method,
    fit_model,
    limited_threads,
    policies_of,
    policies_to_evaluate,
    prepared,
)
from urank.ranking.policies import ModelPolicy, Random
from urank.ranking.ranking_model import RankingModel
from urank.ranking.ranking_settings import UrankConfig
from urank.ranking.urank_network import NetworkScorer

TRAINING = {"epochs": 2, "batch_lists": 64}
SETTINGS: dict[str, Any] = {
    "clicks": {"families": ["monotone"], "hidden": [16], "training": TRAINING},
    "scorer": {"hidden": [16], "training": TRAINING},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make(tmp_path_factory.mktemp("tiny"), queries=400, sessions=2, features=4, candidates=5, positions=5, seed=2)


@pytest.fixture(scope="module")
def model(tiny: Small) -> urank.URank:
    return urank.URank(**SETTINGS).fit(urank.read(tiny.folder / "log.parquet"))


# The whole way


def test_read_fit_rank_evaluate(tiny: Small, model: urank.URank, tmp_path: Path) -> None:
    log = urank.read(tiny.folder / "log.parquet")
    assert isinstance(model.model_, RankingModel)
    assert model.model_.name == "network on monotone"
    assert model.model_.method in ("score", "match")
    candidates = tiny.simulation.candidates
    ranked = model.rank(candidates)
    assert ranked.height == candidates.height
    assert ranked["position"].max() == 5
    assert set(ranked["item_id"]) == set(candidates["item_id"])
    two = {"method": "ctr1", "top": 2}
    assert_frame_equal(model.rank(candidates, **two), model.model_.rank(candidates, **two))
    assert model.log_ctr(candidates).shape == (candidates.height, 5)
    np.testing.assert_array_equal(model.score(candidates), model.model_.score(candidates))
    found = urank.evaluate([model], log, config=JUDGES)
    assert [policy.name for policy in found.policies] == ["logged", "score", "match", "ctr1", "random"]
    assert found.splits == ["test"]
    model.save(tmp_path / "model", onnx=False)
    assert_frame_equal(urank.load_model(tmp_path / "model").rank(candidates), ranked)
    with pytest.raises(ConfigError, match="exists already"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model", onnx=False, overwrite=True)
    loaded = urank.evaluate([tmp_path / "model"], log, config=JUDGES)
    assert loaded.to_dict() == found.to_dict()


def test_how_it_came_about(model: urank.URank) -> None:
    fit = model.fit_
    assert fit.model is model.model_
    assert fit.clicks.model is fit.model.clicks
    assert fit.history is not None
    assert len(fit.history.rounds) <= 2
    assert fit.choice is not None
    assert fit.choice.splits == ["valid"]
    assert [policy.name for policy in fit.choice.policies] == ["logged", "score", "match", "ctr1"]
    better = [name for name in ("score", "ctr1") if fit.choice.compare(name, "match").low > 0]
    assert fit.model.method in (better or ["match"])
    assert "on the validation split" in fit.why
    assert len(fit.model.judges) == 2


@pytest.mark.parametrize("kind", ["path", "log", "dataset", "folder", "frame"])
def test_a_log_in_any_form(tiny: Small, model: urank.URank, kind: str) -> None:
    path = tiny.folder / "log.parquet"
    forms: dict[str, Any] = {
        "path": str(path),
        "log": urank.read(path),
        "dataset": tiny.dataset,
        "folder": tiny.dataset.folder,
        "frame": pl.read_parquet(path),
    }
    with prepared(forms[kind]) as dataset:
        assert sum(dataset.rows(split) for split in ("train", "valid", "test")) == tiny.simulation.log.height
        folder = dataset.folder
    assert folder.exists() == (kind in ("dataset", "folder"))  # what was prepared for the occasion is gone


def test_outcomes_are_kept_if_asked_for_or_read_by_a_policy(tiny: Small) -> None:
    log = tiny.simulation.log.with_columns(dwell=pl.col("click") * 2.5, paid=pl.col("click") * 9)
    asked = urank.URank(ranker="none", **SETTINGS).fit(log, keep=["dwell"])
    assert "dwell" in asked.model_.clicks.featurizer.names
    with prepared(log) as dataset:
        assert dataset.left_out == ["dwell", "paid"]
    with prepared(log, policies=policies_to_evaluate([asked])) as dataset:
        assert dataset.left_out == ["paid"]


def test_same_seed_same_model(tiny: Small) -> None:
    quick = {"method": "score", **SETTINGS}
    first, again, other = (urank.URank(seed=seed, **quick).fit(tiny.dataset) for seed in (3, 3, 4))
    candidates = tiny.simulation.candidates
    np.testing.assert_array_equal(first.score(candidates), again.score(candidates))
    np.testing.assert_array_equal(first.log_ctr(candidates), again.log_ctr(candidates))
    assert not np.array_equal(first.score(candidates), other.score(candidates))
    assert not np.array_equal(first.log_ctr(candidates), other.log_ctr(candidates))
    assert (first.config_.clicks.seed, first.config_.scorer.seed) == (3, 3)


@pytest.mark.parametrize(("wanted", "cores", "given"), [(4, 4, 2), (2, 8, 2), (1, 8, 1), (1, 1, 1)])
def test_threads_are_limited_and_given_back(
    monkeypatch: pytest.MonkeyPatch, wanted: int, cores: int, given: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        with pytest.raises(ConfigError), limited_threads():
            assert torch.get_num_threads() == given
            raise ConfigError("refused")
        assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)


def test_methods_and_rankers(tiny: Small) -> None:
    asked = fit_model(tiny.dataset, validate(UrankConfig, {"method": "ctr1", **SETTINGS}))
    assert (asked.model.method, asked.why, asked.choice) == ("ctr1", "asked for", None)
    assert asked.history is not None
    alone = fit_model(tiny.dataset, validate(UrankConfig, {"ranker": "none", **SETTINGS}))
    assert (alone.model.method, alone.history) == ("match", None)
    assert alone.model.scorer is None
    trees = {"ranker": "trees", "method": "score", "trees": {"trees": 3, "threads": 1}, **SETTINGS}
    grown = fit_model(tiny.dataset, validate(UrankConfig, trees))
    assert grown.model.name == "trees on monotone"


def test_too_few_queries_to_choose(tiny: Small, tmp_path: Path) -> None:
    """Then the matching is the default, and the reason is told."""
    log = tiny.simulation.log.filter(pl.col("query_id") < "q000030")
    urank.prepare(urank.read(log), tmp_path / "prepared", valid=0.05, test=0.1)
    dataset = Dataset(tmp_path / "prepared")
    assert len({q for block in dataset.blocks("valid", ["position"]) for q in block.lists["query_id"].to_pylist()}) <= 2
    fit = fit_model(dataset, validate(UrankConfig, SETTINGS))
    assert (fit.model.method, fit.choice) == ("match", None)
    assert fit.why == "there are too few queries to compare methods"


def test_the_test_split_is_not_looked_at(tiny: Small, tmp_path: Path) -> None:
    shutil.copytree(tiny.dataset.folder, tmp_path / "prepared")
    for path in (tmp_path / "prepared" / "test").iterdir():
        path.write_bytes(b"secret")
    blind = Dataset(tmp_path / "prepared")
    with pytest.raises(DataError, match="is not a readable Parquet file"):
        blind.groups("test")
    fit = fit_model(blind, validate(UrankConfig, SETTINGS))
    assert fit.choice is not None  # also the choice of the method


def test_a_checkpoint_is_of_its_settings(tiny: Small, tmp_path: Path) -> None:
    """The click model that is there is taken over; a scorer that was trained otherwise is not."""

    def fit(folder: Path | None, target: str) -> dict[str, torch.Tensor]:
        settings = {**SETTINGS, "method": "score", "scorer": {**SETTINGS["scorer"], "target": target}}
        scorer = fit_model(tiny.dataset, validate(UrankConfig, settings), checkpoints=folder).model.scorer
        assert isinstance(scorer, NetworkScorer)
        return scorer.network.state_dict()

    plain = {target: fit(None, target) for target in ("model", "counterfactual")}
    for target in ("model", "counterfactual", "model"):
        found = fit(tmp_path / "checkpoints", target)
        assert all(torch.equal(tensor, plain[target][name]) for name, tensor in found.items())
    assert len(list((tmp_path / "checkpoints").glob("scorer-*.safetensors"))) == 2


# Evaluations


def test_every_split(tiny: Small, model: urank.URank) -> None:
    found = urank.evaluate([model], tiny.dataset, split="all", config=JUDGES)
    assert found.splits == ["train", "valid", "test"]
    assert found.queries == 400
    assert found.rows == tiny.simulation.log.height
    assert urank.evaluate([], tiny.dataset, split="valid", config=JUDGES).splits == ["valid"]


def test_names_of_several_models(
    tiny: Small, model: urank.URank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/model", "b/model", "a/other"):
        model.save(tmp_path / name, onnx=False)
    monkeypatch.chdir(tmp_path)

    def names(*models: Any) -> list[str]:
        found = urank.evaluate(models, tiny.dataset, config=JUDGES)
        return [policy.name for policy in found.policies if policy.name.endswith(("match", "mine"))]

    assert names("a/model") == ["match"]
    assert names("a/model", Path("a/other")) == ["model match", "other match"]
    assert names("a/model", "b/model", model) == ["a/model match", "b/model match", "model 3 match"]
    assert names(model, model.model_) == ["model 1 match", "model 2 match"]
    assert names(ModelPolicy("mine", model.model_, "match")) == ["mine"]
    with pytest.raises(ConfigError, match="policies must have distinct names; 'a/model score' occurs twice"):
        names("a/model", "a/model")


def test_policies_of(fitted: ModelFit) -> None:
    assert [policy.name for policy in policies_of(fitted.model, prefix="mine ")] == [
        "mine score",
        "mine match",
        "mine ctr1",
    ]
    assert [policy.name for policy in policies_of(RankingModel(fitted.model.clicks))] == ["match", "ctr1"]
    assert [policy.name for policy in policies_of(fitted.model, methods=("match",))] == ["match"]


# Conventions of scikit-learn and of tables


def test_parameters_are_read_changed_and_cloned() -> None:
    first = urank.URank(ranker="none", seed=3)
    assert first.get_params()["ranker"] == "none"
    assert repr(first) == "URank(ranker='none', seed=3)"
    copy = clone(first).set_params(seed=4)
    assert (first.seed, copy.seed, copy.ranker) == (3, 4, "none")
    with pytest.raises(ConfigError, match=r"clicks\.seed in URank"):
        copy.set_params(seed=-1, ranker="trees")
    with pytest.raises(ConfigError, match="'colour'"):
        copy.set_params(colour="red")
    assert copy.get_params() == first.get_params() | {"seed": 4}


@pytest.mark.parametrize(
    "check",
    [
        check_estimator_cloneable,
        check_estimator_repr,
        check_estimator_tags_renamed,
        check_get_params_invariance,
        check_mixin_order,
        check_no_attributes_set_in_init,
        check_parameters_default_constructible,
        check_set_params,
        check_valid_tag_types,
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.filterwarnings("ignore:ConfigError occurred during set_params")  # settings are checked at once
def test_checks_of_scikit_learn_that_need_no_matrix(check: Any) -> None:
    """All but `check_do_not_raise_errors_in_init_or_set_params`: invalid settings are refused at once."""
    check("URank", urank.URank())


@pytest.mark.parametrize("kind", ["pandas", "arrow", "polars"])
def test_a_table_is_answered_by_a_table_of_its_kind(tiny: Small, model: urank.URank, kind: str) -> None:
    candidates = tiny.simulation.candidates.drop("table", strict=False)
    table: Any = {"pandas": candidates.to_pandas, "arrow": candidates.to_arrow, "polars": candidates.clone}[kind]()
    ranked = model.rank(table)
    assert type(ranked) is type(table)
    assert_frame_equal(pl.DataFrame(ranked), model.rank(candidates), check_dtypes=False)
    np.testing.assert_array_equal(model.log_ctr(table), model.log_ctr(candidates))
    np.testing.assert_array_equal(model.score(table), model.score(candidates))
    positions = model.predict(table)
    by_item = dict(zip(candidates["item_id"], positions, strict=True))
    assert [by_item[item] for item in pl.DataFrame(ranked)["item_id"]] == pl.DataFrame(ranked)["position"].to_list()


@pytest.mark.parametrize("kind", ["pandas", "arrow"])
def test_tables_are_inspected_and_evaluated_as_they_are(tiny: Small, model: urank.URank, kind: str) -> None:
    frame = pl.read_parquet(tiny.folder / "log.parquet")
    log = frame.to_pandas() if kind == "pandas" else frame.to_arrow()
    assert urank.inspect(log).facts.rows == len(log)
    evaluation = urank.evaluate(model, log, config=JUDGES)
    assert "match" in [policy.name for policy in evaluation.policies]


# Refusals


def test_what_is_not_fitted_is_refused(tiny: Small, tmp_path: Path) -> None:
    candidates = tiny.simulation.candidates
    for refused in (
        lambda: urank.URank().rank(candidates),
        lambda: urank.URank().score(candidates),
        lambda: urank.URank().log_ctr(candidates),
        lambda: urank.URank().save(tmp_path / "model"),
        lambda: urank.evaluate([urank.URank()], tiny.dataset),
    ):
        with pytest.raises(ConfigError, match=r"^this URank has not been fitted; call fit with a log first$"):
            refused()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ranker": "magic"}, "ranker in URank: input should be 'network', 'trees', 'lambdarank', "),
        ({"method": "magic"}, "method in URank: input should be 'auto', 'score', 'match' or 'ctr1'; got 'magic'"),
        ({"ranker": "none", "method": "score"}, "method score needs a ranker with scores; got ranker 'none'"),
        ({"clicks": {"colour": 1}}, r"clicks\.colour is not a key of URank"),
        ({"scorer": {"sigma": 0}}, r"scorer\.sigma in URank: input should be greater than 0; got 0"),
        ({"trees": {"leaves": 1}}, r"trees\.leaves in URank: input should be greater than or equal to 2; got 1"),
        ({"seed": -1}, r"clicks\.seed in URank: input should be greater than or equal to 0; got -1"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        urank.URank(**settings)
    assert "\n" not in str(refused.value)
    with pytest.raises(TypeError, match="colour"):
        urank.URank(colour="red")  # type: ignore[call-arg]


def test_evaluations_that_are_refused(tiny: Small, model: urank.URank, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split must be train, valid, test or all; got 'tset'"):
        urank.evaluate([model], tiny.dataset, split="tset")
    with pytest.raises(ConfigError, match="estimator must be auto, refit or one of"):
        urank.evaluate([model], tiny.dataset, estimator="magic")
    with pytest.raises(DataError, match="is not a urank model"):
        urank.evaluate([tmp_path], tiny.dataset)
    with pytest.raises(ConfigError, match="policies must have distinct names; 'random' occurs twice"):
        urank.evaluate([Random()], tiny.dataset)
    with pytest.raises(DataError, match="a log must be a path or a table of Polars, pandas or PyArrow; got builtins"):
        urank.evaluate([model], 17)


def test_a_log_without_features_is_refused(tiny: Small) -> None:
    log = tiny.simulation.log.select("query_id", "session_id", "item_id", "position", "click")
    with pytest.raises(DataError, match="has no features"):
        urank.URank().fit(log)


# Names


def test_importing_urank_is_cheap() -> None:
    script = (
        "import sys, urank\n"
        "assert not {'torch', 'polars', 'pyarrow', 'scipy'} & set(sys.modules)\n"
        "assert set(dir(urank)) == set(urank.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_constructing_an_estimator_is_cheap() -> None:
    """Settings are validated without the libraries that only training needs, which take seconds to import."""
    script = (
        "import sys, urank, urank.cli.train\n"
        "urank.URank()\n"
        "assert not {'torch', 'lightgbm', 'sklearn', 'scipy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_server_needs_neither_torch_nor_lightgbm() -> None:
    script = (
        "import sys, urank.cli.serve, urank.serve.app, urank.serve.processes\n"
        "assert not {'torch', 'lightgbm', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_every_public_name_is_there() -> None:
    assert all(hasattr(urank, name) for name in urank.__all__)
    with pytest.raises(AttributeError, match="'urank' has no attribute 'magic'"):
        urank.magic  # noqa: B018


# The choice of the method


@pytest.mark.parametrize(
    ("gains", "chosen"),
    [
        ({"match": 0.03, "score": 0.04, "ctr1": 0.01}, "match"),  # nothing is clearly better
        ({"match": 0.03, "score": 0.09, "ctr1": 0.01}, "score"),
        ({"match": 0.03, "score": 0.09, "ctr1": 0.12}, "ctr1"),
        ({"match": -0.05, "score": -0.02, "ctr1": -0.06}, "score"),  # match loses to the logged order
        ({"match": -0.05, "score": -0.07, "ctr1": -0.06}, "match"),  # all do
    ],
)
def test_the_best_method(gains: dict[str, float], chosen: str) -> None:
    """All differences, to the logged order and between methods, have intervals of ± 0.03."""

    class Known:
        def __getitem__(self, name: str) -> Any:
            return SimpleNamespace(difference=self.interval(gains[name]))

        def compare(self, one: str, other: str) -> Any:
            return self.interval(gains[one] - gains[other])

        @staticmethod
        def interval(mean: float) -> Any:
            return SimpleNamespace(mean=mean, low=mean - 0.03, high=mean + 0.03)

    found: Any = Known()
    assert best_method(found, ("score", "match", "ctr1")) == chosen


def test_the_columns_of_the_log_are_remembered(tiny: Small, tmp_path: Path) -> None:
    names = {"query_id": "request", "item_id": "article", "position": "shown_at", "click": "hit"}
    renamed = pl.read_parquet(tiny.folder / "log.parquet").rename(names)
    trained = urank.URank(**SETTINGS).fit(urank.read(renamed, columns=names))
    assert trained.model_.columns == names
    trained.save(tmp_path / "model", onnx=False)
    loaded = urank.load_model(tmp_path / "model")
    assert loaded.columns == names
    candidates = tiny.simulation.candidates.drop("table", strict=False)
    expected = loaded.rank(candidates)
    assert_frame_equal(loaded.rank(candidates.rename({"query_id": "request", "item_id": "article"})), expected)
    evaluation = urank.evaluate(loaded, renamed, config=JUDGES)
    assert evaluation.queries == urank.evaluate(loaded, tiny.folder / "log.parquet", config=JUDGES).queries
