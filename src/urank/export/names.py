"""Names of features as another system can spell them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

__all__ = ["identifiers", "is_identifier"]


def is_identifier(name: str) -> bool:
    """Whether it is letters, digits and underscores of ASCII, not starting with a digit."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def identifiers(names: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """An identifier for each name, the name itself where it is one; no two differ in case alone.

    Args:
        names: distinct.
        taken: identifiers that none of them may have.

    >>> identifiers(["price", "emb[0]", "2nd", "Größe", "if"], taken=["if"])
    {'price': 'price', 'emb[0]': 'emb_0', '2nd': 'f_2nd', 'Größe': 'Gr_e', 'if': 'f_if'}
    >>> identifiers(["a b", "a.b", "A_B"])
    {'a b': 'a_b_2', 'a.b': 'a_b_3', 'A_B': 'A_B'}
    """
    refused = {each.lower() for each in taken}
    kept: dict[str, str] = {}
    for name in names:  # names that can stay come first, so that no other takes them away
        if is_identifier(name) and name.lower() not in refused:
            kept[name] = name
            refused.add(name.lower())
    for name in names:
        if name not in kept:
            kept[name] = _free(name, refused)
            refused.add(kept[name].lower())
    return {name: kept[name] for name in names}


def _free(name: str, refused: Collection[str]) -> str:
    """An identifier like the name that is not refused."""
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    if not is_identifier(plain) or plain == name:
        plain = f"f_{plain}".rstrip("_")
    found, number = plain, 2
    while found.lower() in refused:
        found, number = f"{plain}_{number}", number + 1
    return found
