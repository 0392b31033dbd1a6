"""Help of commands in two columns, and `urank help`: lists that are too long for each command that refers to them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand

from urank.errors import ConfigError

_WIDEST = 30
"""Width that the names of options may take; the help of a longer one begins on the next line."""

CLICK_MODELS: Mapping[str, str] = {
    "shrunk": "relevance from networks and trees, attention as item-specific as the log supports; the default",
    "monotone": "one falling curve, steeper or flatter by item",
    "factorised": "examination(item, k) · relevance(item), as in the paper's released code",
    "vector": "one output for each position; the paper's A1",
    "position": "the position as an input; the paper's A2",
    "deepfm": "a DeepFM with the position as a field",
    "gbdt": "LightGBM with the position as a feature",
    "pbm": "one falling curve for all items",
    "pal": "one free curve for all items",
}
RANKERS: Mapping[str, str] = {
    "network": "U-rank as a network; the default",
    "trees": "U-rank as LightGBM trees",
    "lambdarank": "LambdaRank as a network",
    "lambdarank-trees": "LambdaRank with LightGBM",
    "ranknet": "RankNet: every pair of items with different gains counts",
    "lambdaloss": "pairs weighted as in NDCG-Loss2++",
    "ranksvm": "a linear score and the pairwise hinge loss",
    "dla": "a ranker and its examination learned together",
    "unbiased-lambdamart": "LambdaRank trees whose pairs are weighted by learned ratios",
    "regression-em": "trees of relevance and one examination curve by EM",
    "none": "no scorer; the matching ranks",
}
METHODS: Mapping[str, str] = {
    "score": "by descending score of the ranker",
    "match": "by the exact matching of items to positions, with the highest expected utility under the click model",
    "ctr1": "by expected utility at position 1, as is common",
    "auto": "for training: match, or the method that earns significantly more on the validation split; score for "
    "rankers of other papers",
}
ESTIMATORS: Mapping[str, str] = {
    "refit": "networks trained on other queries and refitted on the clicks of these; the default, also called auto",
    "ratio": "Eq. 3: a click times P(click at the new position) / P(click at the logged one)",
    "self_normalised": "the ratio divided by its expectation under the click model",
    "direct": "the click model's expectation",
    "doubly_robust": "the click model's expectation, corrected by the clicks",
    "ips": "clicks of placements that were logged, weighted by the column propensity; not for a guard",
    "snips": "ips divided by the sum of its weights; not for a guard",
}


class CompactCommand(TyperCommand):
    """A command whose help has two columns without frames, so that it fits a small terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; nothing is left to the formatter."""
        console = Console(highlight=False)
        console.print(f"Usage: {usage(self, ctx)}", markup=False)
        console.print(Padding(Markdown(self.help or ""), (1, 0, 1, 0)))
        panels: dict[str, dict[str, str]] = {"Arguments": {}, "Options": {}}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, {})
                panel[compact_name(record[0])] = _compact_help(record[1])
        for name, words in panels.items():
            if words:
                console.print(f"{name}:", style="bold")
                _print_table(words, console)


def usage(command: Any, context: Any) -> str:
    """Return a command's name with placeholders of its arguments."""
    pieces = (re.sub(r"^\{(.*)\}(\.{3})?$", r"\1", piece) for piece in command.collect_usage_pieces(context))
    return " ".join([context.command_path, *pieces])


def compact_name(name: str) -> str:
    """Shorten the types that Typer writes after the names of an option.

    >>> compact_name("--valid <float range>"), compact_name("--split-by <hash|time>"), compact_name("LOG <str>")
    ('--valid FLOAT', '--split-by hash|time', 'LOG')
    """
    words, _, kind = name.partition(" <")
    kind = kind.removesuffix(">").removesuffix(" range")
    return (
        name if not kind else words if not words.startswith("-") else f"{words} {kind if '|' in kind else kind.upper()}"
    )


def _compact_help(text: str) -> str:
    """Shorten what Typer adds to the help of an option.

    >>> _compact_help("Share of the queries.  [default: (0.1); 0<=x<=1]"), _compact_help("Folder.  [required]")
    ('Share of the queries. [0.1]', 'Folder. [required]')
    """
    text, _, extra = text.partition("  [")
    notes = [note for note in extra.removesuffix("]").split("; ") if note and not re.search("[<>]=?", note)]
    shown = [re.sub(r"^default: \(?(.*?)\)?$", r"\1", note) for note in notes]
    return f"{text} [{'; '.join(shown)}]" if shown else text


@dataclass(frozen=True)
class Topic:
    """A help topic: a sentence, and tables of words and their meanings under headings."""

    summary: str
    tables: Mapping[str, Mapping[str, str]]


def topics() -> dict[str, Topic]:
    """Return all help topics by name."""
    from urank.abtest.exposures import EXPOSURE_ROLES  # Polars is slow to load
    from urank.log.candidates import CANDIDATE_ROLES
    from urank.log.columns import ROLES

    roles = {
        "Of a log; query_id, position and click are required, columns without a role are features": ROLES,
        "Of the candidates of urank rank; query_id is required": CANDIDATE_ROLES,
        "Of the exposures of urank abtest; user_id, arm and click are required": EXPOSURE_ROLES,
    }
    return {
        "columns": Topic("Roles of columns, as in `-c position=rank`.", roles),
        "click-models": Topic(
            "Families of click models, as in `--click-model monotone,vector`. Of several, the best by held-out log "
            "loss is kept, or their mean if it is better.",
            {"": CLICK_MODELS},
        ),
        "rankers": Topic("Rankers, as in `--ranker trees`.", {"": RANKERS}),
        "methods": Topic("How lists are ranked, as in `--method match`.", {"": METHODS}),
        "estimators": Topic("Estimators of an evaluation, as in `--estimator direct`.", {"": ESTIMATORS}),
    }


def complete_topic(incomplete: str) -> list[str]:
    """Complete the name of a topic."""
    return [name for name in topics() if name.startswith(incomplete)]


def help_command(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="Name of a topic.", show_default=False, autocompletion=complete_topic),
    ] = None,
) -> None:
    """Explain a topic: columns, click-models, rankers, methods or estimators.

    Example: `urank help columns`
    """
    known = topics()
    if topic is not None and topic not in known:
        raise ConfigError(
            f"the help topics are {', '.join(known)}; got '{topic}' (for a command: urank COMMAND --help)"
        )
    console = Console(highlight=False)
    if topic is None:
        _print_table({name: each.summary for name, each in known.items()}, console)
        console.print("\nurank help TOPIC explains one of these, urank COMMAND --help a command.", soft_wrap=True)
        return
    console.print(known[topic].summary.replace("`", ""), markup=False)
    for heading, words in known[topic].tables.items():
        console.print(f"\n{heading}:\n" if heading else "", markup=False)
        _print_table(words, console)


def _print_table(words: Mapping[str, str], console: Console) -> None:
    """Print words and their meanings in two columns; a long word has a line of its own."""
    width = max((len(word) for word in words if len(word) <= _WIDEST), default=0)
    for word, meaning in words.items():
        text = meaning.replace("`", "").replace("**", "")
        lines = textwrap.wrap(text, max(20, console.width - width - 4), break_on_hyphens=False) or [""]
        if len(word) > width:
            lines.insert(0, "")
        for number, line in enumerate(lines):
            head = word.ljust(width) if number == 0 else " " * width
            console.print(Text.assemble("  ", (head, "bold"), f"  {line}"), soft_wrap=True)
