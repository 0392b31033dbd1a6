"""As much of Vespa as the exported texts need: blocks, tensors of attributes, and what a document gives for them.

Written by Vespa's grammar of schemas, not by the code under test, so that a slip in one of the texts is seen.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "parse", "tensor"]

IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"


@dataclass
class Block:
    """What stands between braces."""

    head: str
    lines: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def __getitem__(self, head: str) -> Block:
        (found,) = [block for block in self.blocks if block.head == head]
        return found

    def starting(self, word: str) -> list[Block]:
        return [block for block in self.blocks if block.head.startswith(word + " ")]

    @property
    def expression(self) -> str:
        """The ranking expression of a function or a phase, in either of its two forms."""
        single = [line.partition(":")[2] for line in self.lines if re.match(r"expression *:", line)]
        several = ["".join(block.lines) for block in self.blocks if block.head == "expression"]
        (found,) = [*single, *several]
        return found.strip()


def parse(text: str) -> Block:
    """The outermost block of a text: a line opens a block, closes one, or is one statement of it."""
    stack = [Block("")]
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line.endswith("{"):
            stack.append(Block(line.removesuffix("{").strip()))
        elif line == "}":
            done = stack.pop()
            stack[-1].blocks.append(done)
        elif line:
            assert "{" not in line
            assert "}" not in line
            stack[-1].lines.append(line)
    (root,) = stack
    assert not root.lines
    (outermost,) = root.blocks
    return outermost


def tensor(expression: str, document: dict[str, float], query: dict[str, float]) -> NDArray[np.float64]:
    """The value of a tensor whose cells are features; a field that the document leaves out is not a number."""
    found = re.fullmatch(r"tensor<float>\((d0\[1\](?:,d1\[(\d+)\])?)\):\[(.*)\]", expression)
    assert found is not None, expression
    body = found[3].strip()
    if found[2] is not None:
        assert body.startswith("[")
        assert body.endswith("]")
        body = body[1:-1]
    cells = [_cell(text.strip(), document, query) for text in _split(body)]
    shape = (1,) if found[2] is None else (1, int(found[2]))
    return np.array(cells).reshape(shape)


def _split(text: str) -> list[str]:
    """At the commas that no parentheses enclose."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _cell(text: str, document: dict[str, float], query: dict[str, float]) -> float:
    guarded = re.fullmatch(r"if\(isNan\((.*)\) == 1, (\d+), \1\)", text)
    if guarded is not None:
        value = _cell(guarded[1], document, query)
        return float(guarded[2]) if math.isnan(value) else value
    feature: Any = re.fullmatch(rf"(attribute|query)\(({IDENTIFIER})\)", text)
    assert feature is not None, text
    return query[feature[2]] if feature[1] == "query" else document.get(feature[2], math.nan)
