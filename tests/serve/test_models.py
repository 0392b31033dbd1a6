"""The models in use: what they need together, and what each takes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.cases import candidates, lists_of, loaded, reader_of, saved
from urank.abtest.exposures import assign_arms
from urank.errors import ConfigError, DataError
from urank.serve.models import ActiveModels, ModelSources, UserSplit, load_models, load_served

NUMBERS = ("price", "emb[0]", "2nd rate")
TEXTS = ("shop", "if")


def test_what_is_needed_is_what_any_of_them_needs() -> None:
    alone, both = ActiveModels(loaded("numbers")), ActiveModels(loaded("numbers"), loaded("trees"))
    assert (alone.numeric, alone.categorical, alone.takes_value) == (NUMBERS, (), False)
    assert (both.numeric, both.categorical, both.takes_value) == (NUMBERS, TEXTS, True)
    assert [model.version for model in both.models] == [loaded("numbers").version, loaded("trees").version]


def other_features(folder: Path, target: Path, **names: str) -> Path:
    """A model with other names for its features."""
    shutil.copytree(folder, target)
    text = json.loads((target / "features.json").read_text())
    for feature in (*text["numeric"], *text["categorical"]):
        feature["name"] = names.get(feature["name"], feature["name"])
    (target / "features.json").write_text(json.dumps(text))
    return target


def test_each_takes_its_own_features(tmp_path: Path) -> None:
    """The second has other names, of which two are shared in another place."""
    folder = other_features(
        saved("trees"), tmp_path / "other", **{"price": "2nd rate", "2nd rate": "price", "if": "of"}
    )
    other = load_served(folder)
    served = ActiveModels(loaded("trees"), other)
    assert (served.numeric, served.categorical) == (NUMBERS, ("shop", "if", "of"))
    rng = np.random.default_rng(0)
    query = {"query_id": "q", "candidates": candidates(loaded("trees"), rng, 9)}
    for each in query["candidates"]:
        each["features"]["of"] = str(rng.choice(["d", "e", "f"]))
    items = lists_of(reader_of(served), [query]).items
    for model, renamed in ((loaded("trees"), {}), (other, {"price": "2nd rate", "2nd rate": "price", "if": "of"})):
        own = [
            {
                "item_id": each["item_id"],
                "value": each.get("value", 1.0),
                "features": {name: each["features"][renamed.get(name, name)] for name in (*NUMBERS, *TEXTS)},
            }
            for each in query["candidates"]
        ]
        wanted = lists_of(reader_of(loaded("trees")), [{"query_id": "q", "candidates": own}]).items
        found = served.inputs_of(model, items)
        np.testing.assert_array_equal(found.numeric, wanted.numeric)
        assert found.categorical.tolist() == wanted.categorical.tolist()
        np.testing.assert_array_equal(model.log_ctr(found), loaded("trees").log_ctr(wanted))
        np.testing.assert_array_equal(np.asarray(model.scores(found)), np.asarray(loaded("trees").scores(wanted)))


def test_a_feature_is_of_one_kind(tmp_path: Path) -> None:
    folder = other_features(saved("trees"), tmp_path / "other", shop="price", price="shop")
    with pytest.raises(
        DataError, match=r"the feature '(shop|price)' is numeric in one model and categorical in another"
    ):
        load_models(ModelSources(saved("trees"), shadow=folder))


def test_methods() -> None:
    served = ActiveModels(loaded("trees"), None, loaded("numbers"))
    assert served.method_of(served.main) == "score"
    assert served.method_of(loaded("numbers")) == "match"
    assert served.method_of(served.main, "ctr1") == "ctr1"
    assert ActiveModels(loaded("trees"), default_method="match").method_of(loaded("trees")) == "match"
    with pytest.raises(ConfigError, match="the model ranks by match, ctr1; got 'score'"):
        ActiveModels(loaded("trees"), loaded("numbers"), default_method="score")


def test_loading() -> None:
    served = load_models(
        ModelSources(saved("trees"), "match", saved("numbers"), UserSplit(saved("clicks"), 0.3, "name"))
    )
    assert served.main.version == loaded("trees").version
    assert served.shadow is not None
    assert served.shadow.version == loaded("numbers").version
    assert served.other is not None
    assert served.other.version == loaded("clicks").version
    assert (served.default_method, served.test) == ("match", UserSplit(saved("clicks"), 0.3, "name"))
    with pytest.raises(DataError, match="absent is not a urank model"):
        load_models(ModelSources(saved("trees"), shadow=Path("absent")))
    with pytest.raises(DataError, match="absent is not a urank model"):
        load_models(ModelSources(saved("trees"), test=UserSplit(Path("absent"))))


@given(st.floats(0.01, 0.99), st.text(min_size=1), st.lists(st.text(min_size=1, max_size=9), min_size=1))
def test_arms(share: float, name: str, users: list[str]) -> None:
    test = UserSplit(Path("other"), share, name)
    wanted = assign_arms(pl.Series(users, dtype=pl.String), {"A": 1 - share, "B": share}, salt=name).to_list()
    assert test.arms(users) == wanted
    assert test.arms(users[::-1]) == wanted[::-1]


@pytest.mark.parametrize(("share", "arm"), [(0.0, "A"), (1.0, "B")])
def test_a_share_of_none_or_all(share: float, arm: str) -> None:
    assert UserSplit(Path("other"), share).arms([str(number) for number in range(50)]) == [arm] * 50


def test_a_share_from_a_file(tmp_path: Path) -> None:
    """Raising it only moves users from A to B."""
    file, users = tmp_path / "share", [str(number) for number in range(1_000)]
    test = UserSplit(Path("other"), share_file=file)
    file.write_text("0.2\n")
    before = test.current().arms(users)
    file.write_text("0.4")
    after = test.current().arms(users)
    assert before == UserSplit(Path("other"), 0.2).arms(users)
    assert before.count("B") < after.count("B")
    assert all(new == "B" for old, new in zip(before, after, strict=True) if old == "B")
    for text in ("", "half", "nan", "1.5"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="share"):
            test.current()
    file.unlink()
    with pytest.raises(ConfigError, match=r"--arm-b-share .* must be a number, or a file"):
        test.current()


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(ConfigError, match="the share of the test must be from 0 to 1; got"):
        UserSplit(Path("other"), share)


def test_a_test_has_a_name() -> None:
    with pytest.raises(ConfigError, match="the test needs a name"):
        UserSplit(Path("other"), name="")
