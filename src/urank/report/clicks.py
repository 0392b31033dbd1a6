"""The report of a fitted click model: what it was fitted with, how good it is, and against what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from urank.evaluate.quality import Quality, Reliability
from urank.plain import plain
from urank.report.tables import Table, bar

if TYPE_CHECKING:
    from urank.report.page import Section

__all__ = ["FitReport", "fit_sections", "fit_tables", "write_fit"]

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
            "history": [{name: plain(value) for name, value in entry.items()} for entry in self.history],
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
    from urank.report import click_figures as figures
    from urank.report.page import Chart, Section

    contenders = {name: each for name, each in report.qualities[report.split].items() if name != "constant"}
    by_position = Chart(
        figures.rates_by_position({report.name: report.quality, **contenders}),
        f"Predicted and observed click rate by position on the {report.split} split; a bar is the 95 % interval.",
    )
    sections = [
        Section("Against the others", paragraphs=[_FIGURES], tables=list(split_tables(report))),
        Section("By position", charts=[by_position], tables=[position_table(report)]),
    ]
    if report.reliability:
        caption = "Predicted and observed click rate of bins of about equally many rows; a bar is the 95 % interval."
        sections.append(Section("Calibration", charts=[Chart(figures.reliability_plot(report.reliability), caption)]))
    if report.truth is not None:
        sections.append(Section("Against the truth", tables=[truth_table(report.truth)]))
    rounds = (
        [Chart(figures.loss_curves(report.history), "Log loss over the rounds of training.")] if report.history else []
    )
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
