"""`urank abtest simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from urank.cli.options import Json, Overwrite, Quiet, json_text, print_json
from urank.config import build, laid_over, read_toml
from urank.progress import bars

if TYPE_CHECKING:  # torch is slow to load
    from urank.simulate.abtest import AbTestRun
    from urank.simulate.judged import JudgedTest

__all__ = ["simulate_command"]


# The words are those of `AbTestConfig`, which would load torch (a test holds them together).
def simulate_command(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write the log, the truth and the report.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML with any of the keys below, and the tables market (users among them), production, clicks and "
            "scorer; flags come before it.",
        ),
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of users.", show_default="60000")] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of the users in each of the two arms.", show_default="0.15")
    ] = None,
    before: Annotated[int | None, typer.Option(help="Days of the first A/A test.", show_default="7")] = None,
    during: Annotated[int | None, typer.Option(help="Days of the A/B test.", show_default="10")] = None,
    after: Annotated[int | None, typer.Option(help="Days of the second A/A test.", show_default="7")] = None,
    retrain: Annotated[
        int | None, typer.Option(help="Days after which the arms' rankers are learned anew.", show_default="5")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Days of an arm's log that its ranker learns from.", show_default="7")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="score|match", help="How U-rank ranks: by score, or by the matching.", show_default="score"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Added to all other seeds.", show_default="0")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate the live test of the paper's Section 6.2: A/A, then U-rank against DeepFM, then A/A again.

    Users of an app store come back day after day. Both arms are served by a DeepFM at first; then each has a ranker of
    its own, learned every few days from the log of that arm; then one serves both again. Writes `exposures.parquet`,
    which `urank abtest analyse` reads; `truth.parquet`, the true lift of each day; `abtest.toml`; and what came out,
    `report.html` and `analysis.json`. The same seed gives the same log.

    Example: `urank abtest simulate -o test --users 20000`
    """
    given: dict[str, Any] = {
        "share": share,
        "before": before,
        "during": during,
        "after": after,
        "retrain": retrain,
        "window": window,
        "method": method,
        "seed": seed,
    }
    flags = {key: value for key, value in given.items() if value is not None}
    flags |= {} if users is None else {"market": {"users": users}}
    values = laid_over(read_toml(config) if config is not None else {}, flags)
    import torch  # slow to load, as all that needs it

    from urank.report.abtest_simulated import print_judged, write_judged
    from urank.simulate.abtest import AbTestConfig, simulate_abtest
    from urank.simulate.judged import judge_abtest

    checked = build(AbTestConfig, values, str(config) if config is not None else "the test")
    torch.set_num_threads(1)  # sums in another order could end with other bits
    found: list[JudgedTest] = []

    def finish(run: AbTestRun) -> None:
        judged = judge_abtest(run, name=str(output / "exposures.parquet"), report=report)
        report("write the report", 0, None)
        text = json_text(judged.to_dict()) + "\n"
        (run.folder / "analysis.json").write_text(text, encoding="utf-8")
        write_judged(judged, run.folder / "report.html")
        found.append(judged)

    with bars(quiet=quiet or json) as report:
        simulate_abtest(checked, output, overwrite=overwrite, finish=finish, report=report)
    [judged] = found
    if json:
        print_json({"folder": str(output), **judged.to_dict(), "config": checked.model_dump(mode="json")})
    elif not quiet:
        console = Console()
        print_judged(judged, console)
        page = output / "report.html"
        console.print(f"\nThe report is {page}", highlight=False, markup=False, emoji=False, soft_wrap=True)
