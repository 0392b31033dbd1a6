"""Birth certificates: every figure names the clean commit, the command and the date that made it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures
from benchmarks.docs import BLOCKS, FIGURE, PAGE, PAGES, certificate, uncertified, with_blocks
from benchmarks.figures import certificates, is_measured
from benchmarks.harness import REPRODUCTION, RESULTS, Bar, write_results
from lab.tiny import row, store_row
from urank.lab import provenance
from urank.lab.experiment_results import ArchitectureRow, Claim, Difference, Reproduction, SettingRows

ROOT = Path(__file__).parents[1]
MADE = {"commit": "abc1234", "command": "urank reproduce all --seeds 2", "date": "2026-11-18"}

EARLIER_RESULTS = {
    "abtest",
    "clicks",
    "judge",
    "letor",
    "log",
    "rank",
    "scale",
    "utility",
}
"""Results of earlier versions, without a certificate; `make figures` measures them again. Nothing is added here."""


def test_every_result_has_a_birth_certificate() -> None:
    for path in RESULTS.glob("*.json"):
        wrong = [defect for each in certificates(path) if (defect := provenance.defect(each))]
        assert bool(wrong) == (path.stem in EARLIER_RESULTS), f"{path.name}: {wrong[:1]}"


def test_every_figure_of_a_page_has_a_birth_certificate() -> None:
    """By section: where something looks measured, there is a certificate."""
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if path != PAGE and (sections := uncertified(path.read_text(encoding="utf-8"))):
            found[path.name] = set(sections)
    assert found == {}


def test_what_looks_measured_needs_a_certificate() -> None:
    section = "# Speed\n\nIt took 3.2 s.\n\n## Other\n\nNothing.\n"
    assert uncertified(section) == ["Speed"]
    assert uncertified(f"{section}<!-- measured: make demo | abc1234 | 2026-11-18 -->\n") == ["Speed"]  # of Other
    certified = section.replace("3.2 s.", "3.2 s. <!-- measured: make demo | abc1234 | 2026-11-18 -->")
    assert uncertified(certified) == []
    assert uncertified(certified.replace("abc1234", "abc1234+")) == ["Speed"]
    assert uncertified(section.replace("3.2 s.", f"+3 %. Measured {certificate(MADE)}.")) == []
    assert uncertified("# Example\n\n```sh\nsleep 3.5 s\n```\n") == []


def test_a_figure_without_a_certificate_is_not_kept(tmp_path: Path) -> None:
    bar = Bar("speed", 1.0, "rows/s").to_dict()
    for made in ({}, MADE | {"commit": "abc1234+"}, MADE | {"date": ""}):
        with pytest.raises(SystemExit, match=r"'speed' is not kept, since its (commit|date) is"):
            write_results("log", {"name": "log", "bars": [bar | made]}, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_results("log", {"name": "log", "bars": [bar | MADE]}, folder=tmp_path)
    assert not is_measured("log", tmp_path)  # but at another commit
    write_results("log", {"name": "log", "bars": [bar | MADE | {"commit": provenance.commit()[:7]}]}, folder=tmp_path)
    assert is_measured("log", tmp_path) == (not provenance.commit().endswith("+"))
    assert not is_measured("rank", tmp_path)


def test_figures_are_not_measured_with_changed_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "provenance", lambda command: MADE | {"commit": "abc1234+"})
    assert figures.measure_all() == 2


def test_make_figures_runs_the_command() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "figures"]  # make test is a make, too
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, last = done.stdout.splitlines()
    assert last.endswith("/python -m benchmarks figures")


def test_only_what_is_missing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """A failure stops nothing, and the next run measures what failed. Commands are replaced by what they write."""
    made = MADE | {"commit": "abc1234"}
    bar, run = Bar("speed", 1.0, "rows/s").to_dict() | made, []
    broken = {"log"}

    def finished(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        name = "reproduce" if "reproduce" in arguments else arguments[3]
        run.append(name)
        if name != "reproduce" and name not in broken:
            (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "bars": [bar]}))
        return subprocess.CompletedProcess(arguments, 0, json.dumps({"provenance": made}))

    monkeypatch.chdir(tmp_path)
    for name, value in {"RESULTS": tmp_path, "REPRODUCTION": tmp_path / "reproduce.json"}.items():
        monkeypatch.setattr(figures, name, value)
    for name, stub in {"commit": lambda: "abc1234", "provenance": lambda _: made, "write_docs": lambda: None}.items():
        monkeypatch.setattr(figures, name, stub)
    monkeypatch.setattr(figures.subprocess, "run", finished)
    monkeypatch.setattr("benchmarks.__main__.NAMES", ("log", "judge", "rank"))
    assert figures.measure_all() == 1
    assert run == ["reproduce", "log", "judge", "rank"]
    assert "Failed: log." in capfd.readouterr().err
    broken.clear()
    assert figures.measure_all() == 0
    assert run[4:] == ["log"]


def test_a_commit_is_clean_unless_sources_changed(tmp_path: Path) -> None:
    """In a repository of its own; results and pages, which measuring rewrites, do not count."""
    module = Path(provenance.__file__)
    package = tmp_path / "src" / "urank"
    (package / "lab").mkdir(parents=True)
    shutil.copy(module, package / "lab" / "provenance.py")
    for name in ("benchmarks/results/log.json", "benchmarks/log.py", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")

    def run(*arguments: str) -> str:
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit() -> str:
        script = f"import runpy; print(runpy.run_path({str(package / 'lab' / 'provenance.py')!r})['commit']())"
        return run(sys.executable, "-c", script)

    assert commit() == ""  # no repository
    run("git", "init", "--quiet")
    run("git", "add", ".")
    run("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "--quiet", "-m", "x")
    clean = run("git", "rev-parse", "--short=7", "HEAD")
    assert commit() == clean
    for name in ("benchmarks/results/log.json", "docs/page.md"):
        (tmp_path / name).write_text("2")
    assert commit() == clean
    (tmp_path / "benchmarks" / "log.py").write_text("2")
    assert commit() == f"{clean}+"
    run("git", "checkout", "--quiet", ".")
    (package / "new.py").touch()  # also if git does not know it yet
    assert commit() == f"{clean}+"


def reproduction() -> dict[str, Any]:
    columns = ("train", "test", "valid", "#Click", "CTR")
    rows = [row("lambdarank-none", 0.5), row("urank", 0.55, "ours", p_value={"#Click": 0.01}), row("km", 0.6, "oracle")]
    weak = [row("lambdarank-none", 0.5), row("urank", 0.51, "ours")]
    architectures = [
        ArchitectureRow(name, 0.7, 0.7, 0.7, 0.5, 0.05, {}, {}, dict.fromkeys(columns, values))
        for name, values in (("A1", (0.70, 0.72)), ("A2", (0.71, 0.75)))
    ]
    found = Reproduction(
        what=["all"],
        data="these documents",
        seeds=2,
        rows=rows,
        claims=[Claim("U-rank wins", True, "0.55 against 0.5")],
        architectures=architectures,
        differences=[Difference("a change", "x", "y", 0.5, 0.55, 1e-5)],
        sweeps={key: [SettingRows("η 1.5", rows, 4), SettingRows("η 0.3", weak, 4)] for key in ("attention", "users")},
        store=[store_row("store-urank", 1.5, "ours", 1.4, true_p_value={"#click": 0.01})],
        provenance=MADE,
    )
    told: dict[str, Any] = json.loads(json.dumps(found.to_dict()))
    return told


def block(name: str) -> list[str]:
    text = with_blocks(f"Before.\n\n<!-- figure: {name} -->\nold\n<!-- /figure -->\n\nAfter.\n", reproduction())
    assert with_blocks(text, reproduction()) == text
    assert text.startswith("Before.\n\n<!-- figure")
    assert text.endswith("<!-- /figure -->\n\nAfter.\n")
    facts = "4 seeds of each" if name in ("attention", "users") else "2 seeds; these documents"
    assert f"*Measured {certificate(MADE)}; {facts}.*" in text
    return [line for line in text.splitlines() if line.startswith("|")]


def test_tables_of_pages_are_made_of_the_reproduction() -> None:
    assert block("table1") == [
        "| row | MAP | nDCG@10 | #Click | CTR |",
        "|---|---|---|---|---|",
        "| lambdarank-none | 0.500 | 0.500 | 0.500 | 0.5000 |",
        "| urank | 0.550 | 0.550 | 0.550\\* | 0.5500 |",
        "| *km* | *0.600* | *0.600* | *0.600* | *0.6000* |",
    ]
    assert block("attention")[2:] == [
        "| best baseline | lambdarank-none: 0.500 | lambdarank-none: 0.500 |",
        "| lambdarank-none | +0.0 % | +0.0 % |",
        "| urank | +10.0 % | +2.0 % |",
        "| km | +20.0 % | – |",
    ]
    assert block("claims")[2] == "| Section 5.4 | U-rank wins | yes | 0.55 against 0.5 |"
    assert block("differences")[2] == "| a change | 0.500 | 0.550 | +10.00 % | 1e-05 |"
    assert block("table2")[3].startswith("| A2 | 0.7300 |")
    assert block("table2")[4].startswith("| A2 − A1, 95 % interval over seeds | -0.1071 to +0.1471 |")
    assert "1.500" in block("table3")[2]
    assert "1.400\\*" in block("table3-true")[2]
    for name in BLOCKS:
        assert len(block(name)) > 2
    with pytest.raises(SystemExit, match=r"a figure must be one of table1, .*; got 'table9'"):
        block("table9")


def test_pages_show_the_reproduction_that_is_there() -> None:
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        names = FIGURE.findall(text)
        assert names
        assert set(names) <= set(BLOCKS)
        if REPRODUCTION.is_file():
            assert with_blocks(text, json.loads(REPRODUCTION.read_text(encoding="utf-8"))) == text
