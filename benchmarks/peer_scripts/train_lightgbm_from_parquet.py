"""Train LightGBM's `lambdarank` on a prepared log as its user would, and save the trees: PREPARED OUTPUT."""

import sys
from pathlib import Path

import lightgbm
import polars as pl

NOT_FEATURES = {"query_id", "session_id", "item_id", "position", "click", "value", "policy", "timestamp"}


def main(folder: Path, output: Path) -> None:
    lists = pl.read_parquet(folder / "train" / "*.parquet")
    flat = lists.explode(
        [name for name, kind in lists.schema.items() if isinstance(kind, pl.List)], empty_as_null=False
    )
    features = [name for name in flat.columns if name not in NOT_FEATURES and flat[name].dtype.is_numeric()]
    settings = {"objective": "lambdarank", "num_leaves": 31, "learning_rate": 0.1, "num_threads": 1, "verbose": -1}
    data = lightgbm.Dataset(
        flat.select(pl.col(features).cast(pl.Float32)).to_numpy(),
        flat["click"].to_numpy(),
        group=lists["click"].list.len().to_numpy(),
    )
    lightgbm.train(settings, data, num_boost_round=100).save_model(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
