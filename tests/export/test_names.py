"""Identifiers: valid, distinct, stable, and the name itself wherever that is possible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from urank.export.vespa import identifiers, is_identifier

names = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(["a b", "a.b", "A_b", "if", "IF", "f_if", "1", ""])), unique=True
)


@given(names, st.sets(st.sampled_from(["if", "value", "f_if", "a_b"])))
def test_all_are_valid_distinct_and_free(some: list[str], taken: set[str]) -> None:
    found = identifiers(some, taken)
    assert list(found) == some
    assert all(is_identifier(name) for name in found.values())
    lowered = [name.lower() for name in found.values()]
    assert len(set(lowered)) == len(lowered)
    assert not set(lowered) & taken
    assert identifiers(some, taken) == found


@given(st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True), unique=True))
def test_what_is_an_identifier_stays(some: list[str]) -> None:
    assert identifiers(some) == {name: name for name in some}


def test_a_name_that_can_stay_is_not_taken_away() -> None:
    assert identifiers(["emb[0]", "emb_0"]) == {"emb[0]": "emb_0_2", "emb_0": "emb_0"}
    assert identifiers(["Price", "price"]) == {"Price": "Price", "price": "f_price"}
