"""Build the documentation site into build/site, offline and with warnings as errors (`make docs`).

The reference of the command line is generated from the commands themselves, and included by docs/cli.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from urank.cli import COMMANDS, load_command
from urank.cli.help import compact_name, usage

REPOSITORY = Path(__file__).resolve().parents[1]
CLI_REFERENCE = REPOSITORY / "build" / "cli-reference.md"


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name; those of a group one by one."""
    for name in COMMANDS:
        command = load_command(name)
        subcommands = getattr(command, "commands", {"": command})
        yield from ((f"urank {name} {each}".rstrip(), subcommand) for each, subcommand in subcommands.items())


def command_section(name: str, command: Any) -> str:
    """Return the section of one command in Markdown: usage, help, and a table for each group of options."""
    context = command.make_context(name, [], resilient_parsing=True)
    tables: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            names, meaning = (" ".join(text.split()) for text in record)
            names = compact_name(names)
            meaning = re.sub(r"\[default: \((.*?)\)", r"[default: \1", meaning).replace("|", "\\|")
            rows = tables.setdefault(getattr(parameter, "rich_help_panel", None) or kind, [])
            rows.append(f"| `{names}` | {meaning} |")
    parts = [f"## {name}", f"```text\n{usage(command, context)}\n```", command.help or ""]
    parts += ["\n".join([f"| {title} | |", "|---|---|", *rows]) for title, rows in tables.items()]
    return "\n\n".join(parts)


def cli_reference() -> str:
    """Return the reference of all commands in Markdown."""
    return "\n\n".join(command_section(name, command) for name, command in commands()) + "\n"


def main() -> int:
    CLI_REFERENCE.parent.mkdir(exist_ok=True)
    CLI_REFERENCE.write_text(cli_reference(), encoding="utf-8")
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(build, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)  # noqa: S603
    sys.stderr.write(done.stderr)
    return done.returncode or int("griffe:" in done.stderr)  # strict mode ignores warnings about docstrings


if __name__ == "__main__":
    sys.exit(main())
