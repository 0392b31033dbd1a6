"""`urank abtest`: analyse, plan, simulate, and their refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.ab_visits import impressions_of, simulate_visits
from pages import Page
from urank.abtest.analysis import analyse
from urank.abtest.exposures import read_exposures
from urank.abtest.planning import plan
from urank.cli import app
from urank.lab.live_test import CONTROL, TREATMENT

START = "2020-05-09"
NUMBERS = ("--mean", 0.5, "--deviation", 2)
QUICK = "[{name}.training]\nepochs = 1\n"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three days before a test of five, in which users of B click half as much again."""
    path = tmp_path_factory.mktemp("abtest") / "exposures.parquet"
    visits = simulate_visits(1500, days=5, before=3, lift=0.5, rng=np.random.default_rng(0))
    impressions_of(visits, np.random.default_rng(1)).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a tiny test, whose rankers have hardly learned anything, and what was printed."""
    folder = tmp_path_factory.mktemp("abtest")
    parts = "".join(QUICK.format(name=name) for name in ("production", "clicks", "scorer"))
    (folder / "tiny.toml").write_text(f"arm_share = 0.4\nbefore = 9\n[market]\napps = 40\nusers = 9\n{parts}")
    flags = ["--users", 1500, "--before", 2, "--during", 2, "--after", 1, "--retrain", 1]
    threads = torch.get_num_threads()
    arguments = ["abtest", "simulate", "-o", folder / "test", "--config", folder / "tiny.toml", *flags]
    ended = CliRunner(env={"COLUMNS": "140"}).invoke(app, [str(each) for each in arguments])
    torch.set_num_threads(threads)
    assert ended.exit_code == 0, ended.output
    return folder / "test", ended.stdout


def said_on(page: Path) -> str:
    parsed = Page()
    parsed.feed(page.read_text())
    assert {"table", "svg"} <= set(parsed.tags)
    assert all(source.startswith("data:") for source in parsed.fetched)
    return page.read_text()


# analyse


def test_analyse(log: Path, tmp_path: Path, command: Any) -> None:
    page = tmp_path / "test.html"
    result = command("abtest", "analyse", log, "--start", START, "--halves", 50, "--html", page)
    assert result.code == 0, result.stderr
    said = " ".join(result.stdout.split())
    found = analyse(read_exposures(log), control="A", start=START, splits=50)
    assert " ".join(found.result("ctr").sentence.split()) in said
    assert said.endswith(f"The same as a page: {page}")
    said_on(page)


def test_analyse_for_machines(log: Path, command: Any) -> None:
    flags = ("--control", "B", "--treatment", "A", "--end", "2020-05-12", "--shares", "A=1,B=1", "--halves", 0)
    more = ("--alpha", 0.1, "--interval", "bootstrap", "--expected-lift", 0.3, "--seed", 4, "--json")
    result = command("abtest", "analyse", log, *flags, *more)
    assert (result.code, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    wanted = analyse(
        read_exposures(log),
        control="B",
        end="2020-05-12",
        alpha=0.1,
        interval="bootstrap",
        expected_lift=0.3,
        splits=0,
        seed=4,
    )
    assert content == wanted.to_dict()


def test_analyse_quietly_with_columns_of_other_names(log: Path, tmp_path: Path, command: Any) -> None:
    renamed = pl.read_parquet(log).rename({"user_id": "visitor", "arm": "bucket"})
    renamed = renamed.with_columns(bucket=pl.col("bucket").replace("A", "control"))
    renamed.write_csv(tmp_path / "log.csv")
    columns = ("-c", "user_id=visitor", "-c", "arm=bucket")
    result = command("abtest", "analyse", tmp_path / "log.csv", *columns, "-q", "--html", tmp_path / "page.html")
    assert (result.code, result.stdout, result.stderr) == (0, "", "")
    assert "B against control" in said_on(tmp_path / "page.html")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--control", "X"), "control must be an arm of LOG, A, B; got 'X'"),
        (("--start", "2020-06-01"), "start must be a day of LOG, from '2020-05-06' to '2020-05-13'; got '2020-06-01'"),
        (("--shares", "A:0.5"), "--shares takes ARM=SHARE"),
        (("--shares", "A=0.5,B=0"), "--shares takes ARM=SHARE"),
        (("--shares", "A=0.5,B=inf"), "--shares takes ARM=SHARE"),
        (("--shares", "A=0.5,C=0.5"), "--shares must name arms of LOG, A, B; got 'C'"),
        (("--shares", "A=0.5"), "shares must give each arm a share above 0; got 0 for 'B'"),
        (("--shares", "A=0.5,A=0.6,B=.1"), "--shares must name each arm once; got 'A' twice"),
        (("--interval", "wald"), "interval must be delta or bootstrap; got 'wald'"),
        (("--alpha", 1.5), "alpha must be between 0 and 1; got 1.5"),
        (("--expected-lift", 0), "expected_lift must be above −1 and not 0; got 0.0"),
        (("-c", "user_id"), "--column takes ROLE=NAME"),
        (("-c", "user_id=visitor"), "LOG has no column 'visitor'"),
    ],
)
def test_analyse_refuses(log: Path, tmp_path: Path, command: Any, flags: tuple[object, ...], sentence: str) -> None:
    page = tmp_path / "page.html"
    refusal = command("abtest", "analyse", log, *flags, "--html", page).refusal
    assert sentence in refusal.replace(str(log), "LOG")
    assert list(tmp_path.iterdir()) == []


def test_analyse_asks_for_the_control(log: Path, tmp_path: Path, command: Any) -> None:
    named = pl.read_parquet(log).with_columns(pl.col("arm").replace({"A": "old", "B": "new"}))
    named.write_parquet(tmp_path / "log.parquet")
    refusal = command("abtest", "analyse", tmp_path / "log.parquet").refusal
    assert refusal.startswith("--control must")
    assert refusal.endswith("one of new, old")
    named.drop("click").write_parquet(tmp_path / "log.parquet")
    assert "has no column 'click'" in command("abtest", "analyse", tmp_path / "log.parquet").refusal
    assert "absent.parquet" in command("abtest", "analyse", "absent.parquet").refusal


# plan


def test_plan_from_a_log(log: Path, tmp_path: Path, command: Any) -> None:
    page = tmp_path / "plan.html"
    result = command("abtest", "plan", log, "--lift", 0.2, "--metric", "revenue", "--html", page)
    assert result.code == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == ["+10", "+20", "+40"]
    meant = plan(read_exposures(log, arms=False), lift=0.2, metric="revenue")
    assert meant.sentence in said
    assert said.endswith(f"The same with a plot: {page}")
    assert "revenue per user" in said_on(page)


@pytest.mark.parametrize(("name", "number", "halved"), [("days", 7, 4), ("users", 1001, 500)])
def test_plan_the_other_way_round(log: Path, command: Any, name: str, number: int, halved: int) -> None:
    flags = ("--power", 0.9, "--alpha", 0.1, "--share", 0.5, "--expected-lift", 0.1, "--json")
    flag = {"days": "--days", "users": "--users-per-arm"}[name]
    result = command("abtest", "plan", log, flag, number, *flags)
    assert (result.code, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    exposures = read_exposures(log, arms=False)
    numbers: dict[str, Any] = {"power": 0.9, "alpha": 0.1, "share": 0.5, "expected_lift": 0.1}
    for found, wanted in zip(content["plans"], (halved, number, 2 * number), strict=True):
        assert found == plan(exposures, **{name: wanted}, **numbers).to_dict()
    assert content["once"] == content["plans"][1]["once"]


def test_plan_without_a_log(tmp_path: Path, command: Any) -> None:
    numbers = ("--mean", 0.5, "--deviation", 2, "--metric", "cvr")
    content = json.loads(command("abtest", "plan", "--lift", 0.1, *numbers, "--json").stdout)
    halved = plan(lift=0.05, mean=0.5, variance=4.0, metric="cvr", expected_lift=0.1)
    assert content["plans"][0] == halved.to_dict()  # made for the lift that was asked for
    result = command("abtest", "plan", "--lift", 0.1, *numbers, "--users-per-day", 3000, "--html", tmp_path / "p.html")
    assert "days, daily" in result.stdout
    assert ">days<" in said_on(tmp_path / "p.html")
    result = command("abtest", "plan", "--users-per-arm", 5000, *numbers, "-q", "--html", tmp_path / "u.html")
    assert (result.code, result.stdout) == (0, "")
    assert "users in each arm" in said_on(tmp_path / "u.html")


def test_plan_for_what_has_no_double(log: Path, tmp_path: Path, command: Any) -> None:
    content = json.loads(command("abtest", "plan", log, "--lift", -0.6, "--json").stdout)
    assert [each["once"]["lift"] for each in content["plans"]] == [-0.3, -0.6]
    content = json.loads(command("abtest", "plan", log, "--days", 1, "--json").stdout)
    assert [each["once"]["days"] for each in content["plans"]] == [1, 2]
    result = command("abtest", "plan", log, "--lift", 0.0001, "--html", tmp_path / "page.html")
    assert "> 10 years" in result.stdout
    assert ">days<" in said_on(tmp_path / "page.html")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("LOG",), "give one of lift, users per arm and days; got None, None and None"),
        (
            ("LOG", "--lift", 0.1, "--days", 7),
            "give one of lift, users per arm and days; got 0.1, None and 7",
        ),
        (("--lift", 0.1), "--mean and --deviation"),
        (("--lift", 0.1, "--mean", 1), "--mean and --deviation"),
        (("--days", 7, "--mean", 1, "--deviation", 1), "--days needs a LOG, or --users-per-day"),
        (("--lift", 0.1, "--mean", 1, "--deviation", -1), "--mean and --deviation must be above 0; got 1 and -1"),
        (("LOG", "--lift", 0.1, "--users-per-day", 9), "--users-per-day is for a plan without a log"),
        (("LOG", "--lift", 0.1, "--metric", "profit"), "metric must be one of ctr, cvr, revenue for LOG; got 'profit'"),
        (("LOG", "--lift", -1), "lift must be above −1 and not 0; got -1.0"),
        (("LOG", "--days", 0), "days must be a whole number from 1 to 3,660; got 0"),
        ((*NUMBERS, "--lift", "1e308"), "lift must be "),
        ((*NUMBERS, "--lift", "nan"), "lift must be "),
        ((*NUMBERS, "--users-per-arm", 10**400), "users must be a whole number from 1 to 1,000,000,000,000"),
        ((*NUMBERS, "--lift", 0.1, "--mean", "1e-200"), "--mean must be from 1e-12 to 1e+12; got 1e-200"),
        ((*NUMBERS, "--lift", 0.1, "--deviation", "1e200"), "--deviation must be from 1e-06 to 1e+06 times --mean"),
        ((*NUMBERS, "--lift", 0.1, "--users-per-day", "inf"), "--users-per-day must be above 0 and at most"),
        ((*NUMBERS, "--lift", 0.1, "--power", 0.01), "power must be above alpha, which is 0.05; got 0.01"),
    ],
)
def test_plan_refuses(log: Path, tmp_path: Path, command: Any, flags: tuple[object, ...], sentence: str) -> None:
    arguments = [log if flag == "LOG" else flag for flag in flags]
    refusal = command("abtest", "plan", *arguments, "--html", tmp_path / "page.html").refusal
    assert sentence in refusal.replace(str(log), "LOG")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--lift", 0.1, "--alpha", "1e-20"),
        ("--lift", 1e-6),
        ("--lift", 1000),
        ("--users-per-arm", 1),
        ("--users-per-arm", 10**12),
        ("--days", 3660, "--users-per-day", 5),
        ("--users-per-arm", 5, "--expected-lift", 1e-6, "--mean", 1e-5, "--deviation", 9),
        ("--lift", 1e-6, "--mean", 1e-5, "--deviation", 9),
    ],
)
def test_plan_at_the_ends_of_what_it_takes(tmp_path: Path, command: Any, flags: tuple[object, ...]) -> None:
    result = command("abtest", "plan", *NUMBERS, *flags, "--html", tmp_path / "page.html")
    assert (result.code, result.stderr) == (0, "")
    json.loads(command("abtest", "plan", *NUMBERS, *flags, "--json").stdout)


def test_plan_of_days_leaves_out_those_of_which_nothing_is_known(tmp_path: Path, command: Any) -> None:
    visits = simulate_visits(150, days=9, rng=np.random.default_rng(0))
    impressions_of(visits, np.random.default_rng(1)).write_parquet(tmp_path / "few.parquet")
    refusal = command("abtest", "plan", tmp_path / "few.parquet", "--days", 1).refusal
    first = int(refusal.partition("days must be at least ")[2].partition(",")[0])
    flags = ("--days", first, "--html", tmp_path / "page.html", "--json")
    content = json.loads(command("abtest", "plan", tmp_path / "few.parquet", *flags).stdout)
    assert [each["once"]["days"] for each in content["plans"]] == [first, 2 * first]


# simulate


def test_simulate(simulated: tuple[Path, str]) -> None:
    folder, printed = simulated
    names = {"abtest.toml", "analysis.json", "exposures.parquet", "report.html", "truth.parquet"}
    assert {path.name for path in folder.iterdir()} == names
    content = json.loads((folder / "analysis.json").read_text())
    assert [each["period"] for each in content["verdicts"]] == ["A/A before"] * 2 + ["A/B"] * 2 + ["A/A after"] * 2
    learned = [(each["day"], each["arm"]) for each in content["learned"]]
    assert learned == [(day, arm) for day in (3, 4) for arm in (CONTROL, TREATMENT)]
    truth = pl.read_parquet(folder / "truth.parquet")[2:4]
    assert content["true_lift"] == pytest.approx(truth[TREATMENT].sum() / truth[CONTROL].sum() - 1)
    assert content["aa_before"]["end"] == "2020-05-07"
    said = " ".join(printed.split())
    assert " ".join(content["sentence"].split()) in said
    assert said.endswith(f"The report is {folder / 'report.html'}")
    said_on(folder / "report.html")


def test_its_log_can_be_analysed(simulated: tuple[Path, str], command: Any) -> None:
    folder, _ = simulated
    days = ("--start", "2020-05-08", "--end", "2020-05-09")
    result = command("abtest", "analyse", folder / "exposures.parquet", "--control", CONTROL, *days, "--json")
    content = json.loads((folder / "analysis.json").read_text())["ab"]
    assert json.loads(result.stdout) == content


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--arm-share", 0.6), "arm_share in the test: input should be less than or equal to 0.5; got 0.6"),
        (("--users", 1), "market.users in the test: input should be greater than or equal to 2; got 1"),
        (("--method", "guess"), "method in the test: input should be 'score' or 'match'; got 'guess'"),
        (("--config", "absent.toml"), "absent.toml cannot be read: No such file or directory"),
    ],
)
def test_simulate_refuses(tmp_path: Path, command: Any, flags: tuple[object, ...], sentence: str) -> None:
    assert sentence in command("abtest", "simulate", "-o", tmp_path / "out", *flags).refusal
    assert list(tmp_path.iterdir()) == []


def test_simulate_replaces_only_on_request(simulated: tuple[Path, str], command: Any) -> None:
    folder, _ = simulated
    before = (folder / "report.html").read_bytes()
    assert "exists already" in command("abtest", "simulate", "-o", folder).refusal
    assert (folder / "report.html").read_bytes() == before
