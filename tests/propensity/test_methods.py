"""A saved estimate is the estimate; what is not one is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from simulated import Small
from urank.errors import ConfigError, DataError
from urank.propensity.cpbm import Contextual, CpbmConfig, build_contextual
from urank.propensity.examination import ExaminationCurve, Known
from urank.propensity.methods import fit_propensity, load_propensity, save_propensity


def test_curves_come_back(tmp_path: Path) -> None:
    for curve in (ExaminationCurve("randomised", (1.0, 0.1 + 0.2), (0.0, 0.01)), ExaminationCurve("em", (1.0, 0.5))):
        save_propensity(curve, tmp_path / "new" / "curve.json")
        assert load_propensity(tmp_path / "new" / "curve.json") == curve


@pytest.mark.parametrize("context", ["query", "item"])
def test_contextual_models_come_back(tmp_path: Path, small: Small, context: str) -> None:
    config = CpbmConfig.model_validate({"context": context, "hidden": [5, 4], "seed": 9})
    model = build_contextual(small.featurizer, small.dataset.positions, config)
    save_propensity(model, tmp_path / "model.safetensors")
    loaded = load_propensity(tmp_path / "model.safetensors")
    assert isinstance(loaded, Contextual)
    assert (loaded.featurizer, loaded.positions, loaded.config) == (small.featurizer, model.positions, config)
    block = next(small.dataset.blocks("test", model.columns))
    np.testing.assert_array_equal(loaded.examination(block), model.examination(block))


def test_other_files_are_refused(tmp_path: Path, small: Small) -> None:
    path = tmp_path / "file"
    with pytest.raises(DataError, match="cannot be read"):
        load_propensity(path)
    good = {"format": "urank propensity", "version": 1, "name": "em", "values": [1.0, 0.5], "errors": None}
    bad: list[object] = [
        {},
        {"format": "other"},
        good | {"values": []},
        good | {"values": [1.0, "x"]},
        good | {"values": [1.0, -0.5]},
        good | {"values": 3},
        good | {"errors": [0.1]},
    ]
    contents = [*(json.dumps(each).encode() for each in bad), b"", b"\x00\xff" * 40, b"{", b'{"format": \xff}', b"[1]"]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not an estimate of `urank examination`, or it is damaged"):
            load_propensity(path)
    path.write_text(json.dumps(good | {"version": 99}))
    with pytest.raises(DataError, match="newer version"):
        load_propensity(path)
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(DataError, match="is not an estimate"):
        load_propensity(path)
    save_propensity(build_contextual(small.featurizer, small.dataset.positions, CpbmConfig()), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="is not an estimate"):
        load_propensity(path)


def test_the_truth_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got ground truth"):
        save_propensity(Known(lambda block: np.ones((block.items.num_rows, 2))), tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_methods_by_name(small: Small) -> None:
    assert fit_propensity("none", small.dataset) is None
    found = fit_propensity("harvest", small.dataset)
    assert found is not None
    assert found.name == "harvest"
    with pytest.raises(ConfigError, match="method must be one of none, randomised, harvest, cpbm, em; got 'magic'"):
        fit_propensity("magic", small.dataset)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="--randomised can only be used with the method randomised; got the method 'em'"
    ):
        fit_propensity("em", small.dataset, policies=["a"])
