"""Numbers as people read them: few digits, a real minus sign, a dash for what is not known."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf, isfinite, isnan, log10, nan

__all__ = ["UNKNOWN", "Units", "counted", "number", "p_text", "percent"]

UNKNOWN = "–"
_LEAST_P = 1e-16
"""Below it, a p-value says no more than that it is small."""


def number(value: float, decimals: int, *, sign: bool = False) -> str:
    """A number with so many decimals; with its sign also when it is not negative, if asked.

    >>> number(1234.5, 1), number(-0.061, 3), number(0.061, 3, sign=True), number(float("nan"), 3)
    ('1,234.5', '−0.061', '+0.061', '–')
    """
    if isnan(value):
        return UNKNOWN
    if not isfinite(value):
        return "−∞" if value < 0 else "+∞" if sign else "∞"
    return format(value, f"{'+' if sign else ''}z,.{decimals}f").replace("-", "−")


def percent(share: float, *, sign: bool = False, decimals: int | None = None) -> str:
    """A share in percent; two decimals below one percent and one above, unless told.

    >>> percent(0.0724), percent(-0.0724, sign=True), percent(0.004, sign=True)
    ('7.2 %', '−7.2 %', '+0.40 %')
    """
    shown = number(100 * share, percent_decimals(share) if decimals is None else decimals, sign=sign)
    return shown if shown == UNKNOWN else f"{shown} %"


def percent_decimals(*shares: float) -> int:
    """As many decimals as the largest of the shares needs."""
    return 2 if all(abs(share) < 0.01 for share in shares) else 1


def p_text(p_value: float) -> str:
    """A p-value with the digits that mean something.

    >>> p_text(0.4123), p_text(2.2e-5), p_text(0.0)
    ('0.41', '2e-05', '<1e-16')
    """
    if isnan(p_value):
        return UNKNOWN
    if p_value < _LEAST_P:
        return f"<{_LEAST_P:g}"
    return f"{p_value:.2g}" if p_value >= 0.001 else f"{p_value:.0e}"


def counted(n: int, one: str, many: str) -> str:
    """How many there are.

    >>> counted(1, "query", "queries"), counted(1012, "query", "queries")
    ('1 query', '1,012 queries')
    """
    return f"{n:,} {one if n == 1 else many}"


@dataclass(frozen=True)
class Units:
    """How amounts and differences of one evaluation are written: all with the same decimals, differences in percent.

    Attributes:
        base: what differences are percents of; where it is not above 0 they have none, and are told as they are.
        decimals: of amounts.
    """

    base: float
    decimals: int

    @classmethod
    def of(cls, base: float) -> Units:
        """With at least three digits of the base.

        >>> [Units.of(base).decimals for base in (0.0123, 0.845, 4.2, 42.0, 42000.0, 0.0)]
        [4, 3, 3, 2, 0, 3]
        """
        size = floor(log10(abs(base))) if isfinite(base) and base != 0 else 0
        return cls(base, max(0, 3 - size) if size >= 0 else 2 - size)

    @property
    def in_percent(self) -> bool:
        """Whether a difference can be told in percent."""
        return 0 < self.base < inf

    def share(self, difference: float) -> float:
        """Of the base; NaN when there is none."""
        return difference / self.base if self.in_percent else nan

    def amount(self, value: float) -> str:
        """A utility."""
        return number(value, self.decimals)

    def within(self, low: float, high: float) -> str:
        """An interval of a utility."""
        return UNKNOWN if isnan(low) or isnan(high) else f"{self.amount(low)} – {self.amount(high)}"

    def change(self, difference: float) -> str:
        """A difference, in percent if it can be.

        >>> Units.of(0.8).change(0.04), Units.of(0.0).change(0.04)
        ('+5.0 %', '+0.040')
        """
        if not self.in_percent:
            return number(difference, self.decimals, sign=True)
        return percent(self.share(difference), sign=True)

    def changes(self, low: float, high: float) -> str:
        """An interval of a difference, for a table.

        >>> Units.of(0.8).changes(-0.04, 0.08), Units.of(0.0).changes(-0.04, 0.08)
        ('−5.0 to +10.0 %', '−0.040 to +0.080')
        """
        if isnan(low) or isnan(high):
            return UNKNOWN
        if not self.in_percent:
            return " to ".join(number(end, self.decimals, sign=True) for end in (low, high))
        ends = [self.share(low), self.share(high)]
        return " to ".join(number(100 * end, percent_decimals(*ends), sign=True) for end in ends) + " %"

    def size(self, difference: float) -> str:
        """How large a difference is, whichever way."""
        return self.change(abs(difference)).removeprefix("+")

    def sizes(self, low: float, high: float) -> str:
        """An interval of a difference, for a sentence.

        >>> Units.of(0.8).sizes(-0.04, 0.08)
        '−5.0 % to 10.0 %'
        """
        if not self.in_percent:
            return f"{self.amount(low)} to {self.amount(high)}"
        ends = [self.share(low), self.share(high)]
        return " to ".join(percent(end, decimals=percent_decimals(*ends)) for end in ends)
