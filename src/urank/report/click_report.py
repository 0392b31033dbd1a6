"""The report of a click model after its fit, and of the click curves of items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from urank.config import to_jsonable
from urank.errors import ConfigError
from urank.log.inspection import wilson_interval
from urank.report.page import Chart, Section, Summary, notebook_html, write_page
from urank.report.style import COLOURS, GREY, INK, legend, new_axes, plain_label, position_axes, svg
from urank.report.tables import UNKNOWN, Table, bar, print_tables
from urank.storage import new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from rich.console import Console

    from urank.clicks.item_curves import ItemCurve
    from urank.evaluation.click_quality import Quality, Reliability


_IN_WORDS = {
    "constant": "the constant",
    "oracle": "the oracle",
    "mean_absolute_error": "mean absolute error of the table",
    "oracle_share": "share of the oracle's log loss reached",
}
_CONTENDERS = {
    "shrunk": "one falling position curve, steeper or flatter by item as far as the log supports that; the default",
    "monotone": "one falling position curve, steeper or flatter by item",
    "factorised": "the item's relevance times an examination that differs by item",
    "vector": "a network with an output for each position",
    "position": "a network of the item and its position",
    "deepfm": "a DeepFM with the position as a field",
    "gbdt": "trees of the item's features and its position, never rising with position",
    "pbm": "the position-based model: one falling position curve for all items, the classical baseline",
    "pal": "one position curve for all items, which may also rise",
    "constant": "the mean click rate of the training split, for every row",
    "oracle": "the true click probabilities of a simulation",
}
_FIGURES = (
    "Log loss: the training objective; lower is better. AUC: the probability that a clicked row scores above one that "
    "was not clicked. ECE: mean distance between predicted and observed rates over 15 bins of about equally many rows. "
    "Predicted and observed: mean click rates."
)


@dataclass(frozen=True)
class FitReport:
    """The quality of a click model after its fit.

    Attributes:
        name: of the model; the contender of that name is the one reported on.
        qualities: split -> contender -> its quality there. The last split counts (the test split, or the validation
            split if there is no other). "constant" is the click rate of the training split for every row, "oracle" the
            truth of a simulation.
        history: of the training, a mapping for each round: `round`, `train_loss` and `valid_loss`.
        reliability: contender -> predicted against observed rates on the last split.
        truth: known in a simulation only: `mean_absolute_error` and `by_position` as returned by `table_error`, and
            other figures by name, such as `oracle_share`, the oracle's log loss divided by the model's.
    """

    name: str
    settings: Mapping[str, str]
    qualities: Mapping[str, Mapping[str, Quality]]
    history: Sequence[Mapping[str, float]] = ()
    reliability: Mapping[str, Reliability] = field(default_factory=dict)
    truth: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for split, contenders in self.qualities.items():
            if self.name not in contenders:
                raise ValueError(f"qualities must include '{self.name}' for every split; got none for '{split}'")
        if not self.qualities:
            raise ValueError("qualities must have at least one split; got none")

    @property
    def split(self) -> str:
        """The split that counts: the last one."""
        return list(self.qualities)[-1]

    @property
    def quality(self) -> Quality:
        """The quality of the model on the split that counts."""
        return self.qualities[self.split][self.name]

    @property
    def sentence(self) -> str:
        """The log loss of the model, compared with the others."""
        loss = self.quality.log_loss
        clauses = [f"{self.name}: log loss {loss:.4f} on the {self.split} split"]
        for name, other in self.qualities[self.split].items():
            if name != self.name:
                change = _relative_change(loss, other.log_loss)
                size = f"{abs(change):.2%} {'below' if change < 0 else 'above'}"
                clauses.append(f"{'not comparable with' if isnan(change) else size} {_IN_WORDS.get(name, name)}")
        return ", ".join(clauses)

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each split and contender."""
        rows = [
            {"split": split, "model": name, **{key: value for key, value in vars(each).items() if key != "by_position"}}
            for split, contenders in self.qualities.items()
            for name, each in contenders.items()
        ]
        return pl.DataFrame(rows)

    def _repr_html_(self) -> str:
        """Return the view in a notebook."""
        return notebook_html(fit_summary(self), fit_sections(self)[:2])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict, with null for numbers that are not finite."""
        qualities = {split: {name: each.to_dict() for name, each in of.items()} for split, of in self.qualities.items()}
        return {
            "name": self.name,
            "settings": dict(self.settings),
            "qualities": qualities,
            "history": [to_jsonable(dict(entry)) for entry in self.history],
            "reliability": {name: asdict(bins) for name, bins in self.reliability.items()},
            "truth": None if self.truth is None else dict(self.truth),
        }


def print_fit(report: FitReport, console: Console) -> None:
    """Print the tables, then the sentence."""
    print_tables(console, fit_tables(report))
    console.print(report.sentence, style="bold", highlight=False, markup=False)


def write_fit(report: FitReport, path: str | Path) -> None:
    """Write the page with plots."""
    write_page(path, f"Click model: {report.name}", fit_summary(report), fit_sections(report))


def fit_summary(report: FitReport) -> Summary:
    """Return in plain words whether the click model learned anything."""
    constant = report.qualities[report.split].get("constant")
    change = nan if constant is None else _relative_change(report.quality.log_loss, constant.log_loss)
    answer, tone = "The click model is trained.", ""
    if change < 0:
        answer, tone = "The click model predicts clicks better than their mean rate does.", "good"
    elif change >= 0:
        answer, tone = "The click model predicts clicks no better than their mean rate does: do not use it.", "bad"
    evaluate = "`urank evaluate MODEL LOG` estimates what its ranking would earn."
    return Summary(answer, f"{report.sentence}.", evaluate, tone)


def fit_sections(report: FitReport) -> list[Section]:
    """Return the sections of the page."""
    contenders = {name: each for name, each in report.qualities[report.split].items() if name != "constant"}
    by_position = Chart(
        partial(rates_by_position, {report.name: report.quality, **contenders}),
        f"Predicted and observed click rate by position on the {report.split} split; a bar is the 95 % interval.",
    )
    names = report.qualities[report.split]
    terms = {name: meaning for name, meaning in _CONTENDERS.items() if name in names}
    sections = [
        Section("Against the others", paragraphs=[_FIGURES], terms=terms, tables=list(_split_tables(report))),
        Section("By position", charts=[by_position], tables=[_quality_by_position(report)]),
    ]
    if report.reliability:
        caption = "Predicted and observed click rate of bins of about equally many rows; a bar is the 95 % interval."
        sections.append(Section("Calibration", charts=[Chart(partial(reliability_plot, report.reliability), caption)]))
    if report.truth is not None:
        sections.append(Section("Against the truth", tables=[_truth_table(report.truth)]))
    rounds = [loss_chart(report.history)] if report.history else []
    sections.append(Section("The fit", charts=rounds, tables=[_settings_table(report)]))
    return sections


def loss_chart(history: Sequence[Mapping[str, float]]) -> Chart:
    """Return the chart of `loss_curves`."""
    return Chart(partial(loss_curves, history), "Log loss by training round.")


def fit_tables(report: FitReport) -> Iterator[Table]:
    """Yield the tables in reading order."""
    yield _settings_table(report)
    yield _quality_by_position(report)
    if report.truth is not None:
        yield _truth_table(report.truth)
    yield from _split_tables(report)


def _settings_table(report: FitReport) -> Table:
    """Settings of the fit, rounds of training, and sizes of the splits."""
    rows = list(report.settings.items())
    losses = {entry["round"]: entry.get("valid_loss") for entry in report.history}
    known = {number: loss for number, loss in losses.items() if loss is not None and isfinite(loss)}
    if known:
        best = min(known, key=lambda number: known[number])
        rows.append(("rounds", f"{len(report.history)}, best {best:g} (valid loss {known[best]:.4f})"))
    for split, contenders in report.qualities.items():
        each = contenders[report.name]
        rows.append((f"{split} split", f"{each.rows:,} rows, {each.clicks:,} clicks"))
    return Table(("model", report.name), rows, words=("", report.name))


def _split_tables(report: FitReport) -> Iterator[Table]:
    """Compare the contenders, best first, in a table for each split."""
    for split, contenders in report.qualities.items():
        constant = contenders.get("constant")
        rows = []
        for name, each in sorted(contenders.items(), key=lambda entry: entry[1].log_loss):
            change = nan if constant is None or each is constant else _relative_change(each.log_loss, constant.log_loss)
            log_loss, *others = _quality_cells(each)
            rows.append((name, log_loss, _formatted(change, "+.2%"), *others))
        yield Table((f"{split} split", "log loss", "to constant", "AUC", "ECE", "predicted", "observed"), rows)


def _quality_by_position(report: FitReport) -> Table:
    """The quality of the model by position, on the split that counts.

    The last column shows the observed rates as bars or, if the truth is known, the error of the predicted table.
    """
    places = report.quality.by_position
    errors = (report.truth or {}).get("by_position")
    if errors is not None:
        last = [_formatted(error, ".4f") for error in errors]
    else:
        top = max((each.observed for each in places if each.rows > 0), default=0.0) or 1.0
        last = [bar(each.observed / top, width=8) if each.rows > 0 else "" for each in places]
    head = ("position", "rows", "log loss", "AUC", "ECE", "predicted", "observed", "" if errors is None else "error")
    rows = [
        (str(k), f"{each.rows:,}", *_quality_cells(each), cell)
        for k, (each, cell) in enumerate(zip(places, last, strict=True), start=1)
    ]
    return Table(head, rows)


def _quality_cells(each: Quality) -> list[str]:
    """Log loss, AUC, ECE, predicted and observed rate."""
    losses = [_formatted(value, ".4f") for value in (each.log_loss, each.auc, each.ece)]
    return losses + [_formatted(value, ".2%") for value in (each.predicted, each.observed)]


def _truth_table(truth: Mapping[str, Any]) -> Table:
    """Comparison with the truth of a simulation."""
    single = {name: value for name, value in truth.items() if isinstance(value, int | float)}
    rows = [(_IN_WORDS.get(name, name.replace("_", " ")), _formatted(value, ".4f")) for name, value in single.items()]
    return Table(("against the truth", ""), rows)


def _relative_change(loss: float, other: float) -> float:
    return loss / other - 1 if other > 0 else nan


def _formatted(value: float, pattern: str) -> str:
    return UNKNOWN if isnan(value) else format(value, pattern)


def loss_curves(history: Sequence[Mapping[str, float]]) -> Figure:
    """Plot train and validation loss by round, with the best round marked."""
    figure, axes = new_axes("round", "log loss", integer_x=True)
    rounds = [entry["round"] for entry in history]
    names = ("train", "valid")
    losses = {name: np.array([entry.get(f"{name}_loss") for entry in history], dtype=float) for name in names}
    for colour, (name, loss) in zip(COLOURS, losses.items(), strict=False):
        if np.isfinite(loss).any():
            axes.plot(rounds, loss, color=colour, marker="o", markersize=3, linewidth=1.5, label=name)
    if np.isfinite(losses["valid"]).any():
        best = int(np.nanargmin(losses["valid"]))
        axes.axvline(rounds[best], color=GREY, linestyle=":", linewidth=1, label="best")
    legend(axes)
    return figure


def reliability_plot(reliabilities: Mapping[str, Reliability]) -> Figure:
    """Plot observed against predicted rates; a calibrated model lies on the diagonal."""
    figure, axes = new_axes("predicted click rate", "observed click rate", height=4.2)
    top = 0.0
    for colour, (name, bins) in zip(COLOURS, reliabilities.items(), strict=False):
        lengths = _bar_lengths(*map(np.array, (bins.observed, bins.low, bins.high)))
        look: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.2, "label": name}
        axes.errorbar(bins.predicted, bins.observed, lengths, **look)
        top = max([top, *bins.predicted, *bins.high])
    axes.plot([0, top], [0, top], color=GREY, linestyle=":", linewidth=1, zorder=0)
    axes.set(ylim=(0, None), xlim=(0, None))
    legend(axes)
    return figure


def rates_by_position(qualities: Mapping[str, Quality]) -> Figure:
    """Plot predicted click rates by position for each model, and the observed ones with their 95 % intervals."""
    places = next(iter(qualities.values())).by_position
    figure, axes = position_axes("click rate", len(places))
    shown = [k for k, each in enumerate(places) if each.rows > 0]
    rows, clicks = np.array([(places[k].rows, places[k].clicks) for k in shown], dtype=np.int64).reshape(-1, 2).T
    observed, position = clicks / rows, [k + 1 for k in shown]
    lengths = _bar_lengths(observed, *wilson_interval(clicks, rows))
    axes.errorbar(position, observed, lengths, color=INK, marker="o", markersize=3, linestyle="none", label="observed")
    for colour, (name, each) in zip(COLOURS, qualities.items(), strict=False):
        axes.plot(position, [each.by_position[k].predicted for k in shown], color=colour, linewidth=1.3, label=name)
    axes.set_ylim(bottom=0)
    legend(axes)
    return figure


def _bar_lengths(value: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.float64]:
    """Return the lengths of error bars below and above; rounding must not make them negative."""
    return np.maximum([value - low, high - value], 0.0)


# Click curves of items


def curve_table(curves: Sequence[ItemCurve], by: str) -> Table:
    """Click rates at a few positions, and how fast they decay."""
    places = [k for k in (1, 2, 3, 5, 10, 20, 50) if k <= len(curves[0].rate)]
    steepest = max(max(curve.decay for curve in curves), 1e-9)
    rows = []
    for curve in curves:
        rates = [f"{curve.rate[k - 1]:.2%}" for k in places]
        rows.append((curve.name, f"{curve.rows:,}", *rates, f"{curve.decay:.2f}", bar(curve.decay / steepest, 8)))
    return Table((by, "shown", *(f"at {k}" for k in places), "decay", ""), rows)


def curve_figure(curves: Sequence[ItemCurve]) -> Figure:
    """Plot click probability by position, a line for each curve (the paper's Figure 1, right)."""
    figure, axes = position_axes("P(click | item, position)", max(len(curve.rate) for curve in curves))
    for index, curve in enumerate(curves):
        places, colour, label = range(1, len(curve.rate) + 1), COLOURS[index % len(COLOURS)], plain_label(curve.name)
        axes.plot(places, curve.rate, color=colour, marker="o", markersize=3, linewidth=1.5, label=label)
    legend(axes)
    return figure


def save_curves(curves: Sequence[ItemCurve], path: Path) -> None:
    """Write the plot of `curve_figure` as SVG or PNG, atomically."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"a picture must be named .svg or .png; got {path}")
    figure = curve_figure(curves)
    with new_file(path) as working:
        if path.suffix == ".svg":
            working.write_text(svg(figure) + "\n", encoding="utf-8")
        else:
            figure.savefig(working, format="png", dpi=150)
