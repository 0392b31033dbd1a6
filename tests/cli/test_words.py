"""One word, one meaning: a flag means the same in all commands, and help stays short and complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from urank.cli import COMMANDS, app, load_command
from urank.cli.help import CLICK_MODELS, ESTIMATORS, METHODS, RANKERS, complete_topic

DIFFERS = {"-o", "--output"}
"""Flags whose help says what each command writes."""


def commands() -> Iterator[tuple[str, Any]]:
    for name in COMMANDS:
        loaded = load_command(name)
        yield from ((f"{name} {sub}", each) for sub, each in getattr(loaded, "commands", {"": loaded}).items())


def meaning(option: Any) -> tuple[str, str, bool]:
    """The metavar unless it has choices, the first clause of the help, and whether the option may be repeated."""
    metavar = option.metavar or ""
    return "" if "|" in metavar else metavar, re.split(r"[.:;(]", option.help or "")[0].strip(), option.multiple


def test_a_flag_has_one_meaning_in_all_commands() -> None:
    found: dict[str, dict[tuple[str, str, bool], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command in commands():
        for option in command.params:
            for flag in (*option.opts, *option.secondary_opts):
                if flag.startswith("-"):
                    found[flag][meaning(option)].append(name)
    assert len(found) > 100
    ambiguous = {flag: dict(meanings) for flag, meanings in found.items() if len(meanings) > 1 and flag not in DIFFERS}
    assert ambiguous == {}


def test_topics_have_every_name() -> None:
    from urank.clicks.fitting import ClickFamily
    from urank.evaluation import estimators
    from urank.ranking.ranking_settings import UrankConfig

    assert set(CLICK_MODELS) == set(get_args(ClickFamily))
    assert set(RANKERS) == names(UrankConfig.model_fields["ranker"].annotation)
    assert set(METHODS) == names(UrankConfig.model_fields["method"].annotation)
    assert set(ESTIMATORS) == {"refit", *estimators.ESTIMATORS}


def names(literal: Any) -> set[str]:
    return {name for each in get_args(literal) for name in (names(each) or {each})}


@pytest.mark.parametrize(("name", "screens"), [("run", 2.3), ("inspect", 1.5), ("prepare", 2.2), ("rank", 2.3)])
def test_help_is_short(command: Any, monkeypatch: pytest.MonkeyPatch, name: str, screens: float) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = command(name, "--help")
    assert shown.code == 0
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24 * screens


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_help_shows_neither_braces_nor_none(command: Any, name: str) -> None:
    usage, *lines = command(*name.split(), "--help").stdout.splitlines()
    assert usage.startswith(f"Usage: urank {name}")
    assert not {*usage} & {*"{}"}
    assert not any("[None]" in line for line in lines)


@pytest.mark.parametrize("topic", complete_topic(""))
def test_every_topic_that_help_refers_to(command: Any, topic: str) -> None:
    assert command("help", topic).code == 0
    refers = [name for name, each in commands() if any(f"urank help {topic}" in str(p.help) for p in each.params)]
    assert refers


def test_help_without_a_topic_and_with_an_unknown_one(command: Any) -> None:
    assert all(topic in command("help").stdout for topic in complete_topic(""))
    assert command("help", "colours").refusal.startswith("the help topics are columns, ")


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words, by the protocol of its completion script."""
    line = {
        "COMP_WORDS": " ".join(["urank", *words]),
        "COMP_CWORD": str(len(words)),
        "_URANK_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-m", "urank"], env={**os.environ, **line}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_completion_in_bash() -> None:
    assert completed("ex") == ["export", "examination"]
    assert completed("rank", "model", "--met") == ["--method"]
    assert completed("rank", "model", "--method", "") == ["score", "match", "ctr1"]
    assert completed("simulate", "--scaling", "m") == ["minmax"]
    assert completed("help", "c") == ["columns", "click-models"]
    assert completed("train", "log.parquet", "--ranker", "lambdarank-") == ["lambdarank-trees"]


def test_the_completion_script_of_bash() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "urank"],
        env={**os.environ, "_URANK_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
    )
    assert "complete -o default -F" in shown.stdout
    assert subprocess.run(["/bin/bash", "-n"], input=shown.stdout, text=True, check=False).returncode == 0
    assert "--install-completion" in [flag for option in get_root().params for flag in option.opts]


def get_root() -> Any:
    import typer

    return typer.main.get_command(app)
