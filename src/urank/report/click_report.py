"""Click curves of a model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from urank.clicks.item_curves import ItemCurve
from urank.config import to_jsonable
from urank.errors import ConfigError
from urank.evaluation.click_quality import Quality, Reliability
from urank.log.inspection import wilson_interval
from urank.report.style import COLOURS
from urank.report.tables import Table, bar, terminal_table
from urank.storage import new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from urank.report.page import Section

__all__ = [
    "FitReport",
    "curve_figure",
    "curve_table",
    "fit_sections",
    "fit_tables",
    "loss_curves",
    "print_fit",
    "rates_by_position",
    "reliability_plot",
    "save_curves",
    "write_fit",
]


def loss_curves(history: Sequence[Mapping[str, float]]) -> Figure:
    """Train and validation loss over the rounds, the best round marked."""
    figure, axes = _axes("round", "log loss")
    rounds = [entry["round"] for entry in history]
    losses = {
        name: np.array([entry.get(f"{name}_loss") for entry in history], dtype=float) for name in ("train", "valid")
    }
    for colour, (name, loss) in zip(COLOURS, losses.items(), strict=False):
        if np.isfinite(loss).any():
            axes.plot(rounds, loss, color=colour, marker="o", markersize=3, linewidth=1.5, label=name)
    if np.isfinite(losses["valid"]).any():
        best = int(np.nanargmin(losses["valid"]))
        axes.axvline(rounds[best], color="#57606a", linestyle=":", linewidth=1, label="best")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize="small")
    return figure


def reliability_plot(reliabilities: Mapping[str, Reliability]) -> Figure:
    """Observed against predicted rates; a calibrated model stays on the diagonal."""
    figure, axes = _axes("predicted click rate", "observed click rate", size=(4.6, 4.2))
    top = 0.0
    for colour, (name, bins) in zip(COLOURS, reliabilities.items(), strict=False):
        observed, low, high = np.array(bins.observed), np.array(bins.low), np.array(bins.high)
        # Rounding can put an interval without clicks a hair beyond its rate, and a length must not be negative.
        lengths = np.maximum([observed - low, high - observed], 0.0)
        axes.errorbar(
            bins.predicted, observed, lengths, color=colour, marker="o", markersize=3, linewidth=1.2, label=name
        )
        top = max([top, *bins.predicted, *bins.high])
    axes.plot([0, top], [0, top], color="#57606a", linestyle=":", linewidth=1, zorder=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize="small")
    return figure


def rates_by_position(qualities: Mapping[str, Quality]) -> Figure:
    """Predicted click rates by position, a line for each model, and the observed ones with their 95 % interval."""
    figure, axes = _axes("position", "click rate")
    first = next(iter(qualities.values()))
    shown = [k for k, each in enumerate(first.by_position) if each.rows > 0]
    rows = np.array([first.by_position[k].rows for k in shown], dtype=np.int64)
    clicks = np.array([first.by_position[k].clicks for k in shown], dtype=np.int64)
    low, high = wilson_interval(clicks, rows)
    observed = clicks / rows
    lengths = np.maximum([observed - low, high - observed], 0.0)
    position = [k + 1 for k in shown]
    axes.errorbar(
        position, observed, lengths, color="#1f2328", marker="o", markersize=3, linestyle="none", label="observed"
    )
    for colour, (name, each) in zip(COLOURS, qualities.items(), strict=False):
        axes.plot(position, [each.by_position[k].predicted for k in shown], color=colour, linewidth=1.3, label=name)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize="small")
    return figure


def _axes(x: str, y: str, size: tuple[float, float] = (6.4, 3.4)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size)
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    return figure, axes


_IN_WORDS = {
    "constant": "the constant",
    "oracle": "the oracle",
    "mean_absolute_error": "mean absolute error of the table",
    "oracle_share": "share of the oracle's log loss reached",
}

_FIGURES = (
    "Log loss: what training lowers; lower is better. AUC: how often a clicked row scores above one that was not. "
    "ECE: how far predicted rates are from observed ones, on average over 15 bins of about equally many rows. "
    "Predicted and observed: mean click rates."
)


@dataclass(frozen=True)
class FitReport:
    """What a person should know of a click model after its fit.

    Attributes:
        name: of the model; the contender of that name is the one reported on.
        settings: what it was fitted with, in words.
        qualities: split -> contender -> its quality there. The last split is the one that counts (the test split, or
            the validation split when there is no other). "constant" is the click rate of the training split for every
            row, "oracle" the truth of a simulation.
        history: of the training, a mapping for each round: `round`, `train_loss` and `valid_loss`.
        reliability: contender -> predicted against observed rates on the last split.
        truth: what only a simulation can tell: `mean_absolute_error` and `by_position` as `table_error` gives them, and
            any other figures by name, such as `oracle_share`, the oracle's log loss divided by the model's.
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
                raise ValueError(f"qualities must hold '{self.name}' for every split; got none for '{split}'")
        if not self.qualities:
            raise ValueError("qualities must hold at least one split; got none")

    @property
    def split(self) -> str:
        """The split that counts: the last one."""
        return list(self.qualities)[-1]

    @property
    def quality(self) -> Quality:
        """That of the model on the split that counts."""
        return self.qualities[self.split][self.name]

    @property
    def sentence(self) -> str:
        """The figure that counts, and how it stands to the others'."""
        loss = self.quality.log_loss
        others = {name: other for name, other in self.qualities[self.split].items() if name != self.name}
        against = [f"{_difference(loss, other.log_loss)} {_IN_WORDS.get(name, name)}" for name, other in others.items()]
        return ", ".join([f"{self.name}: log loss {loss:.4f} on the {self.split} split", *against])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with null for what is not a finite number."""
        return {
            "name": self.name,
            "settings": dict(self.settings),
            "qualities": {
                split: {name: each.to_dict() for name, each in contenders.items()}
                for split, contenders in self.qualities.items()
            },
            "history": [{name: to_jsonable(value) for name, value in entry.items()} for entry in self.history],
            "reliability": {name: asdict(bins) for name, bins in self.reliability.items()},
            "truth": None if self.truth is None else dict(self.truth),
        }


def fit_tables(report: FitReport) -> Iterator[Table]:
    """Everything there is to tell, in order."""
    yield settings_table(report)
    yield position_table(report)
    if report.truth is not None:
        yield truth_table(report.truth)
    yield from split_tables(report)


def write_fit(report: FitReport, path: str | Path) -> None:
    """Write the page with the plots."""
    from urank.report.page import write_page  # matplotlib is slow to load

    title = f"Click model: {report.name}"
    write_page(path, title, f"{report.sentence}.", fit_sections(report), footer="urank train")


def fit_sections(report: FitReport) -> list[Section]:
    """What the page tells, in order."""
    from urank.report.page import Chart, Section

    contenders = {name: each for name, each in report.qualities[report.split].items() if name != "constant"}
    by_position = Chart(
        rates_by_position({report.name: report.quality, **contenders}),
        f"Predicted and observed click rate by position on the {report.split} split; a bar is the 95 % interval.",
    )
    sections = [
        Section("Against the others", paragraphs=[_FIGURES], tables=list(split_tables(report))),
        Section("By position", charts=[by_position], tables=[position_table(report)]),
    ]
    if report.reliability:
        caption = "Predicted and observed click rate of bins of about equally many rows; a bar is the 95 % interval."
        sections.append(Section("Calibration", charts=[Chart(reliability_plot(report.reliability), caption)]))
    if report.truth is not None:
        sections.append(Section("Against the truth", tables=[truth_table(report.truth)]))
    rounds = [Chart(loss_curves(report.history), "Log loss over the rounds of training.")] if report.history else []
    sections.append(Section("The fit", charts=rounds, tables=[settings_table(report)]))
    return sections


def settings_table(report: FitReport) -> Table:
    """What the model was fitted with, how the training went, and what it was judged on."""
    rows = list(report.settings.items())
    known = [entry for entry in report.history if isfinite(_valid_loss(entry))]
    if known:
        best = min(known, key=_valid_loss)
        rows.append(("rounds", f"{len(report.history)}, best {best['round']:g} (valid loss {_valid_loss(best):.4f})"))
    for split, contenders in report.qualities.items():
        each = contenders[report.name]
        rows.append((f"{split} split", f"{each.rows:,} rows, {each.clicks:,} clicks"))
    return Table(("model", report.name), rows, words=("", report.name))


def split_tables(report: FitReport) -> Iterator[Table]:
    """The contenders side by side, best first, a table for each split."""
    for split, contenders in report.qualities.items():
        constant = contenders.get("constant")
        ranked = sorted(contenders.items(), key=lambda entry: entry[1].log_loss)
        head = (f"{split} split", "log loss", "to constant", "AUC", "ECE", "predicted", "observed")
        yield Table(head, [(name, *_against(each, constant)) for name, each in ranked])


def _against(each: Quality, constant: Quality | None) -> tuple[str, ...]:
    log_loss, *others = _cells(each)
    change = "–" if constant is None or each is constant else _number(_change(each.log_loss, constant.log_loss), "+.2%")
    return log_loss, change, *others


def position_table(report: FitReport) -> Table:
    """The figures of the model by position, on the split that counts.

    A last column shows the observed rates as bars, or, where the truth is known, the error of the table.
    """
    places = report.quality.by_position
    top = max((each.observed for each in places if each.rows > 0), default=0.0) or 1.0
    last = [bar(each.observed / top, width=8) if each.rows > 0 else "" for each in places]
    errors = (report.truth or {}).get("by_position")
    if errors is not None:
        last = [_number(error, ".4f") for error in errors]
    head = ("position", "rows", "log loss", "AUC", "ECE", "predicted", "observed", "" if errors is None else "error")
    rows = [
        (str(k), f"{each.rows:,}", *_cells(each), cell)
        for k, (each, cell) in enumerate(zip(places, last, strict=True), start=1)
    ]
    return Table(head, rows)


def _cells(each: Quality) -> tuple[str, ...]:
    figures = [_number(value, ".4f") for value in (each.log_loss, each.auc, each.ece)]
    return (*figures, _number(each.predicted, ".2%"), _number(each.observed, ".2%"))


def truth_table(truth: Mapping[str, Any]) -> Table:
    """What only a simulation can tell."""
    single = {name: value for name, value in truth.items() if isinstance(value, int | float)}
    rows = [(_IN_WORDS.get(name, name.replace("_", " ")), _number(value, ".4f")) for name, value in single.items()]
    return Table(("against the truth", ""), rows)


def _valid_loss(entry: Mapping[str, float | None]) -> float:
    loss = entry.get("valid_loss")
    return float("nan") if loss is None else loss


def _difference(loss: float, other: float) -> str:
    change = _change(loss, other)
    if isnan(change):
        return "not comparable with"
    return f"{abs(change):.2%} {'below' if change < 0 else 'above'}"


def _change(loss: float, other: float) -> float:
    """By what share a loss is above the other; NaN when there is none to compare with."""
    return loss / other - 1 if other > 0 else float("nan")


def _number(value: float, pattern: str) -> str:
    return "–" if isnan(value) else format(value, pattern)


def print_fit(report: FitReport, console: Console) -> None:
    """Print everything there is to tell, the figure that counts last, where the eye is when it ends."""
    for table in fit_tables(report):
        console.print(terminal_table(table))
        console.print()
    console.print(report.sentence, style="bold", highlight=False, markup=False)


def curve_table(curves: Sequence[ItemCurve], by: str) -> Table:
    """Rates at a few positions, and how fast they fall."""
    K = len(curves[0].rate)
    places = [k for k in (1, 2, 3, 5, 10, 20, 50) if k <= K]
    steepest = max(max(curve.decay for curve in curves), 1e-9)
    rows = [
        (
            curve.name,
            f"{curve.rows:,}",
            *(f"{curve.rate[k - 1]:.2%}" for k in places),
            f"{curve.decay:.2f}",
            bar(curve.decay / steepest, 8),
        )
        for curve in curves
    ]
    return Table((by, "shown", *(f"at {k}" for k in places), "decay", ""), rows)


def curve_figure(curves: Sequence[ItemCurve]) -> Figure:
    """Click probability by position, a line for each (the paper's Figure 1, right)."""
    from matplotlib.figure import Figure  # slow to load

    from urank.report.style import COLOURS, plain_axes, plain_label

    figure = Figure(figsize=(6.4, 3.4))
    axes = plain_axes(figure, "position", "P(click | item, position)")
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        places = range(1, len(curve.rate) + 1)
        axes.plot(
            places, curve.rate, color=colour, marker="o", markersize=3, linewidth=1.5, label=plain_label(curve.name)
        )
    axes.legend(frameon=False, fontsize="small")
    return figure


def save_curves(curves: Sequence[ItemCurve], path: Path) -> None:
    """Write the picture; it appears when it is complete."""
    from urank.report.style import svg

    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"a picture must be named .svg or .png; got {path}")
    figure = curve_figure(curves)
    with new_file(path) as working:
        if path.suffix == ".svg":
            working.write_text(svg(figure) + "\n", encoding="utf-8")
        else:
            figure.savefig(working, format="png", dpi=150, bbox_inches="tight")
