"""The report of an evaluation: every figure by arithmetic, the sentence in all its turns, the terminal and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from io import StringIO
from math import inf, nan
from pathlib import Path

import pytest
from rich.console import Console

from pages import Page
from report.evaluations import K, cell, comparison, evaluation, policy, without_intervals
from urank.evaluation.estimators import ESTIMATORS
from urank.evaluation.policy_evaluation import Evaluation
from urank.report.evaluation_report import (
    ReferenceValues,
    calibration_table,
    cutoffs_plot,
    differences_plot,
    estimates_plot,
    estimator_table,
    evaluation_headline,
    evaluation_sections,
    evaluation_sentence,
    policy_table,
    print_evaluation,
    support_table,
    write_evaluation,
)
from urank.report.style import svg
from urank.report.tables import Table

ODD = ["<b>a & b</b>", "$10_$20", "_hidden", "[red]x[/]", ":smile:", "模型"]


@pytest.fixture
def found() -> Evaluation:
    """Match gains 0.056 ± 0.008 of 0.8, score does not differ significantly, and random loses."""
    return evaluation(
        policy("random", 0.6, comparison(-0.2)),
        policy("score", 0.804, comparison(0.004, p_value=0.412)),
        policy("match", 0.856, comparison(0.056), warnings=("hardly any placement was logged",)),
    )


@pytest.fixture
def known() -> ReferenceValues:
    """Known utilities of all of them."""
    utility = {"logged": 0.8, "match": 0.864, "score": 0.82, "random": 0.61}
    gains = {name: value - 0.8 for name, value in utility.items() if name != "logged"}
    return ReferenceValues("outcome", "measured", utility, gains, "The outcome was measured afterwards.")


def column(table: Table, head: str) -> dict[str, str]:
    """The cells of a column by those of the first."""
    return {row[0]: row[list(table.head).index(head)] for row in table.rows}


def shown(found: Evaluation, width: int = 80, reference: ReferenceValues | None = None) -> str:
    out = StringIO()
    print_evaluation(found, Console(force_terminal=True, color_system=None, file=out, width=width), reference=reference)
    return out.getvalue()


def drawn(text: str) -> str:
    """What a figure says, without its styles."""
    return re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)


def test_policies_by_arithmetic(found: Evaluation, known: ReferenceValues) -> None:
    table = policy_table(found, known)
    assert [row[0] for row in table.rows] == ["logged", "match", "score", "random"]
    assert column(table, "clicks@10")["match"] == "0.856"
    assert column(table, "clicks@3")["match"] == f"{0.856 * 3 / K:.3f}"
    assert column(table, "vs logged")["match"] == f"+{100 * 0.056 / 0.8:.1f} % (+0.056)"
    assert column(table, "vs logged")["random"] == f"−{100 * 0.2 / 0.8:.1f} % (−0.200)"
    assert column(table, "95 % interval")["match"] == f"+{100 * 0.048 / 0.8:.1f} to +{100 * 0.064 / 0.8:.1f} %"
    assert column(table, "95 % interval")["score"] == f"−{100 * 0.004 / 0.8:.1f} to +{100 * 0.012 / 0.8:.1f} %"
    assert column(table, "p") == {"logged": "–", "match": "2e-16", "score": "0.41", "random": "2e-16"}
    assert column(table, "measured@10")["match"] == "0.864"
    assert column(table, "measured gain")["match"] == f"+{100 * 0.064 / 0.8:.1f} %"
    for head in ("vs logged", "95 % interval", "measured gain"):
        assert column(table, head)["logged"] == "–"
    assert not any("measured" in head for head in policy_table(found).head)


def test_estimators_begin_with_the_chosen_one(found: Evaluation) -> None:
    table = estimator_table(found)
    assert list(table.head[1:]) == ["ratio", "direct", "self_normalised", "doubly_robust", "ratio, bootstrap"]
    assert column(table, "ratio")["match"] == f"{0.856 + 0.001:.3f} ± 0.030"
    assert column(table, "ratio, bootstrap")["match"] == f"{0.856 - 0.015:.3f} – {0.856 + 0.025:.3f}"


def test_support_shows_coverage_where_propensities_are_known(found: Evaluation) -> None:
    table = support_table(found)
    assert list(table.rows[1]) == ["match", "10,120", "25.4 %", "5,123", "0.40 %", "0.31 %"]
    covered = [
        replace(each, support=replace(each.support, coverage=0.987, coverage_error=0.01, effective_ips=123.4))
        for each in found.policies
    ]
    table = support_table(replace(found, policies=covered))
    assert column(table, "coverage")["match"] == "98.7 %"
    assert column(table, "effective by IPS")["match"] == "123"


def test_calibration_shows_the_groups_that_are_off() -> None:
    table = calibration_table(evaluation(cells=(cell(3, p_value=0.003), cell(2, p_value=2e-5))).specification)
    assert table is not None
    assert [list(row) for row in table.rows] == [
        ["2", "2 of 3", "12.00%", "15.00%", "3,400", "+4.8", "2e-05"],
        ["3", "2 of 3", "12.00%", "15.00%", "3,400", "+4.8", "0.003"],
    ]
    assert calibration_table(evaluation().specification) is None
    assert "none of 1 groups of rows is off" in evaluation_sections(evaluation())[-2].paragraphs[0]
    nothing = replace(evaluation(), specification=replace(evaluation().specification, cells=[]))
    assert "no clicks to compare" in evaluation_sections(nothing)[-2].paragraphs[0]


def test_sentence_of_a_gain() -> None:
    sentence = evaluation_sentence(evaluation(policy("match", 0.856, comparison(0.056)), policy("random", 0.9)))
    assert sentence == (
        f"match would earn 0.856 clicks per list, {100 * 0.056 / 0.8:.1f} % more than the logged order "
        f"(95 % interval {100 * 0.048 / 0.8:.1f} % to {100 * 0.064 / 0.8:.1f} %, p = 2e-16), "
        "estimated by Eq. 3 on 1,012 held-out queries"
    )


def test_sentence_of_a_loss() -> None:
    sentence = evaluation_sentence(evaluation(policy("match", 0.744, comparison(-0.056, p_value=0.0))))
    assert (
        f", {100 * 0.056 / 0.8:.1f} % less than the logged order (95 % interval −8.0 % to −6.0 %, p < 1e-16),"
        in sentence
    )


def test_sentence_when_it_cannot_be_told() -> None:
    sentence = evaluation_sentence(evaluation(policy("score", 0.804, comparison(0.004, p_value=0.412))))
    assert sentence.startswith(
        "score would earn 0.804 clicks per list, not significantly different from the logged order "
        f"({100 * 0.004 / 0.8:.2f} % more, 95 % interval −0.5 % to {100 * 0.012 / 0.8:.1f} %, p = 0.41), estimated by"
    )


def test_sentence_of_one_query() -> None:
    logged, match = (
        without_intervals(each) for each in (policy("logged", 0.8), policy("match", 0.856, comparison(0.056)))
    )
    one = replace(evaluation(match, logged=logged), queries=1)
    sentence = evaluation_sentence(one)
    assert "not significantly different from the logged order (7.0 % more, but one query has no interval)" in sentence
    assert sentence.endswith("on 1 held-out query")
    table, estimators = policy_table(one), estimator_table(one)
    assert column(table, "95 % interval")["match"] == "–"
    assert column(table, "p")["match"] == "–"
    assert column(estimators, "ratio")["match"] == "0.857 ± –"
    assert column(estimators, "ratio, bootstrap")["match"] == "–"
    assert "nan" not in shown(one) + drawn(svg(estimates_plot(one)) + svg(differences_plot(one)))


def test_sentence_of_the_same_order() -> None:
    same = comparison(0.0, half=0.0, p_value=1.0)
    assert evaluation_sentence(evaluation(policy("ctr1", 0.8, same))).startswith(
        "ctr1 would earn 0.800 clicks per list, the same as the logged order, estimated"
    )


def test_sentence_with_reference_values(found: Evaluation, known: ReferenceValues) -> None:
    assert evaluation_sentence(found, reference=known).endswith("on 1,012 held-out queries; the outcome is 0.864")


def test_sentence_of_a_named_policy(found: Evaluation) -> None:
    assert evaluation_sentence(found, "score").startswith("score would earn 0.804 clicks per list, not")


def test_sentence_without_a_policy_to_tell_of() -> None:
    alone = "the logged order earns 0.800 clicks per list (95 % interval 0.780 – 0.820), estimated by Eq. 3 on"
    assert evaluation_sentence(evaluation()).startswith(alone)
    assert evaluation_sentence(evaluation(policy("random", 0.6, comparison(-0.2)))).startswith(alone)


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        (["test"], "1,012 held-out queries"),
        (["valid"], "1,012 queries of the valid split"),
        (["valid", "test"], "1,012 queries of the valid and test splits"),
        (["train", "valid", "test"], "1,012 queries"),
    ],
)
def test_sentence_says_by_which_queries(splits: list[str], words: str) -> None:
    assert evaluation_sentence(replace(evaluation(), splits=splits)).endswith(f"by Eq. 3 on {words}")


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_every_estimator_has_words(estimator: str, tmp_path: Path) -> None:
    each = replace(
        evaluation(
            policy("match", 0.856, comparison(0.056), estimators=ESTIMATORS),
            logged=policy("logged", 0.8, estimators=ESTIMATORS),
        ),
        estimator=estimator,
    )
    assert ", estimated by " in evaluation_sentence(each)
    write_evaluation(each, tmp_path / "page.html")
    assert f"By the estimator {estimator}, " in (tmp_path / "page.html").read_text()


def test_value_is_told_with_its_own_digits() -> None:
    worth = replace(
        evaluation(policy("match", 1320.4, comparison(120.0)), logged=policy("logged", 1200.4)), measure="value"
    )
    table = policy_table(worth)
    assert column(table, "value@10")["match"] == "1,320"
    assert column(table, "vs logged")["match"] == "+10.0 % (+120)"
    assert evaluation_sentence(worth).startswith("match would earn a value of 1,320 per list, 10.0 % more than")


@pytest.mark.parametrize("base", [0.0, -0.2])
def test_no_percents_of_what_is_not_above_nothing(base: float, tmp_path: Path) -> None:
    none = evaluation(policy("match", base + 0.056, comparison(0.056)), logged=policy("logged", base))
    table = policy_table(none)
    assert column(table, "vs logged")["match"] == "+0.056"
    assert column(table, "95 % interval")["match"] == "+0.048 to +0.064"
    assert "0.056 more than the logged order (95 % interval 0.048 to 0.064, p" in evaluation_sentence(none)
    write_evaluation(none, tmp_path / "page.html")


def test_an_estimate_that_cannot_be_made(tmp_path: Path) -> None:
    lost = policy("match", nan, comparison(nan, p_value=nan))
    both = evaluation(lost, policy("score", 0.82, comparison(0.02)))
    assert [row[0] for row in policy_table(both).rows] == ["logged", "score", "match"]
    assert evaluation_sentence(evaluation(lost)) == (
        "the utility of match cannot be estimated by Eq. 3 on 1,012 held-out queries"
    )
    assert "nan" not in shown(both)
    write_evaluation(both, tmp_path / "page.html")


def test_an_interval_without_end() -> None:
    endless = policy("match", 0.856, comparison(0.056))
    endless = replace(endless, bootstrap=replace(endless.bootstrap, high=inf))
    assert column(estimator_table(evaluation(endless)), "ratio, bootstrap")["match"] == "0.841 – ∞"


def test_terminal_at_80_columns_shows_what_matters(found: Evaluation, known: ReferenceValues) -> None:
    text = shown(found, reference=replace(known, adjective="true"))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for head in ("policy", "clicks@10", "vs logged", "95 % interval", "true@10", "true gain", "ratio", "doubly_robust"):
        assert head in text
    assert re.search(r"beware +match: hardly any placement was logged", text)
    assert " ".join(text.split()).startswith(evaluation_headline(found))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_terminal_keeps_the_first_columns(width: int) -> None:
    names = ["a model with a rather long name match", *ODD]
    text = shown(evaluation(*(policy(name, 0.856, comparison(0.056)) for name in names)), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("0.856") >= len(names)
    for name in names:
        assert all(word in text for word in name.split())
    assert "+7.0 % (+0.056)" in text
    assert ("clicks@5" in text) == (width == 200)


def test_page_is_self_contained_and_escaped(found: Evaluation, tmp_path: Path) -> None:
    odd = [policy(name, 0.81 + 0.01 * n, comparison(0.01)) for n, name in enumerate(ODD)]
    many = replace(found, policies=[*found.policies, *odd])
    write_evaluation(many, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page()
    page.feed(text)
    assert text.startswith("<!doctype html>")
    assert page.tags.count("figcaption") == 3
    assert not {"script", "link", "b", "img", "nav"} & set(page.tags)
    assert page.fetched == []
    assert not re.search(r"url\((?!#)", text)
    for name in ODD:
        assert f"<td>{escape(name)}</td>" in text
    for title in ("Policies side by side", "Beware", "By cutoff", "By estimator", "How these numbers are made"):
        assert f"<h2>{title}</h2>" in text
    assert "<li>match: hardly any placement was logged</li>" in text
    assert escape(evaluation_sentence(many)) in text
    write_evaluation(many, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == text


def test_page_warns_only_when_there_is_a_reason() -> None:
    assert "Beware" not in [section.title for section in evaluation_sections(evaluation())]
    assert len(evaluation_sections(evaluation())[0].charts) == 1  # nothing differs from the logged order
    off = evaluation_sections(evaluation(cells=(cell(2, p_value=2e-5),)))
    assert off[1].bullets == ["the click model is off"]
    assert "1 of 2 groups of rows is off" in off[-2].paragraphs[0]
    assert len(off[-2].tables) == 1


def test_names_in_figures_are_shown_as_they_are() -> None:
    many = evaluation(*(policy(name, 0.81, comparison(0.01)) for name in ODD))
    for draw in (estimates_plot, differences_plot, cutoffs_plot):
        text = drawn(svg(draw(many)))
        for name in ODD:
            assert escape(name, quote=False) in text
        assert svg(draw(many)) == svg(draw(many))


def test_figures_hold_the_estimates(found: Evaluation, known: ReferenceValues) -> None:
    axes = estimates_plot(found, known).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["logged order"].get_xdata()) == [0.8, 0.8]
    assert list(lines["outcome"].get_xdata()) == pytest.approx([0.8, 0.864, 0.82, 0.61])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["logged", "match", "score", "random"]
    bars = [bar.get_segments()[0][:, 0].tolist() for bar in axes.collections]
    assert bars[1] == pytest.approx([0.856 - 0.02, 0.856 + 0.02])
    axes = differences_plot(found, known).axes[0]
    bars = [bar.get_segments()[0][:, 0].tolist() for bar in axes.collections]
    assert bars[0] == pytest.approx([100 * 0.048 / 0.8, 100 * 0.064 / 0.8])
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["outcome"].get_xdata()) == pytest.approx(
        [100 * (true - 0.8) / 0.8 for true in (0.864, 0.82, 0.61)]
    )


def test_many_policies_can_be_drawn() -> None:
    many = evaluation(*(policy(f"model {n} with a long name", 0.8 + n / 100, comparison(n / 100)) for n in range(30)))
    for draw in (estimates_plot, differences_plot, cutoffs_plot):
        assert "model 29" in drawn(svg(draw(many)))


def test_the_sentence_tells_of_the_policy_that_is_named(found: Evaluation) -> None:
    out = StringIO()
    print_evaluation(found, Console(file=out, width=400), "score")
    first = out.getvalue().splitlines()[0]
    assert first == evaluation_headline(found, "score")
    assert "score" in first
    assert "match" not in first


def test_the_headline_by_significance() -> None:
    gains = {
        "New ranking (match): +7.0 %": (0.056, 2e-16),
        "No clear gain": (0.004, 0.412),
        "Keep the logged": (-0.056, 0.0),
    }
    for start, (mean, p_value) in gains.items():
        said = evaluation_headline(evaluation(policy("match", 0.8 + mean, comparison(mean, p_value=p_value))))
        assert said.startswith(start)
        assert "estimated on 1,012 held-out queries" in said


def test_alarms_are_part_of_the_headline() -> None:
    """A random order that seems to earn more than the logged one, and estimators that contradict each other."""
    lucky = policy("random", 0.856, comparison(0.056))
    match = policy("match", 0.856, comparison(0.056))
    said = evaluation_headline(evaluation(match, lucky), "match")
    assert said.endswith("But do not trust this: a random order seems to earn more than the logged one.")
    apart = replace(match.estimates["ratio"], mean=2.0, low=1.9, high=2.1)
    torn = replace(match, estimates={**match.estimates, "doubly_robust": apart})
    assert "estimators ratio and doubly_robust contradict each other on match" in evaluation_headline(evaluation(torn))
    assert "do not trust" not in evaluation_headline(evaluation(match))
