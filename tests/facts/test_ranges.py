"""Test ranges: their members, properties of their order, and texts that are not ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainworks.facts.ranges import (
    Value,
    compare,
    problem_of,
    references,
    satisfies,
    version_key_of,
)

IN_RANGE: tuple[tuple[Value | None, str], ...] = (
    ("11.3.1", "11.3"),
    ("11.3", "11.3"),
    ("1.22.0amzn4.0", ">=1.22.0"),
    ("1.22.0amzn1.0", "==1.22.0"),
    ("1.22.0amzn4.0", ">=1.22.0amzn4.0"),
    ("1.23.0", ">=1.22.0amzn4.0"),
    ("2.1.0amzn1.0", ">=1.22.0amzn4.0"),
    ("v1.7.4-aws", ">=1.7.4,<1.8"),
    ("1.10.0", ">1.9.2"),
    ("1.22", "==1.22.0"),
    ("1.20.0", "<1.18|>=1.20"),
    ("580.65.06", ">=580.65.06"),
    ("3.18.2.post1", ">=3.18,<4"),
    ("ubuntu20.04", "ubuntu22.04|ubuntu20.04"),
    ("debian12", "!ubuntu20.04,!ubuntu22.04"),
    (None, "absent"),
    (None, "!70"),
    ("anything", "present"),
    (frozenset({"--disable-ngc"}), "--disable-ngc"),
    (frozenset({"80", "90"}), "!70,80"),
    (frozenset(), "present"),
    ("cu121", "{cell}"),
    ("cuda12.1", "cuda{release}"),
    ("12.1.105", "{release}"),
)

OUT_OF_RANGE: tuple[tuple[Value | None, str], ...] = (
    ("11.30", "11.3"),
    ("1.22.0amzn3.0", ">=1.22.0amzn4.0"),
    ("1.22.0", ">=1.22.0amzn4.0"),
    ("1.9.2", ">=1.10"),
    ("1.18.0", "<1.18|>=1.20"),
    ("1.18.0amzn2", "!=1.18.0"),
    ("ubuntu20.04", "!ubuntu20.04"),
    (None, ">=1"),
    (None, "!=1.18.0"),
    (None, "present"),
    ("1", "absent"),
    (frozenset({"70", "80"}), "!70"),
    (frozenset(), "--disable-ngc"),
    (frozenset({"80"}), ">=80"),
    ("cu118", "{cell}"),
    ("cu118", "{nothing}"),
    ("cu118", "{set}"),
)

OTHERS: dict[str, Value] = {"cell": "cu121", "release": "12.1", "set": frozenset({"cu118"})}


@pytest.mark.parametrize(("value", "allowed"), IN_RANGE)
def test_in_range(value: Value | None, allowed: str) -> None:
    assert satisfies(value, allowed, OTHERS)
    assert problem_of(allowed) == ""


@pytest.mark.parametrize(("value", "allowed"), OUT_OF_RANGE)
def test_out_of_range(value: Value | None, allowed: str) -> None:
    assert not satisfies(value, allowed, OTHERS)
    assert problem_of(allowed) == ""


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ("", "a condition is empty"),
        (">=1,", "a condition is empty"),
        ("1||2", "a condition is empty"),
        (">=", ">= needs a version, for example >=1.22"),
        (">=abc", ">= needs a version"),
        (">=1.2.x", ">= needs a version"),
        (">=1.2 <2", ">= needs a version"),
        ("=>1.2", "'=>1.2' is not a condition; write one of: >= <= == != > < and a version"),
        ("~=1.2", "is not a condition"),
        ("=1.2", "is not a condition"),
        ("11.3 or 11.4", "is not a condition"),
        ("{cell", "is not a condition"),
    ],
)
def test_what_is_no_range_is_said(allowed: str, message: str) -> None:
    assert message in problem_of(allowed)


def test_references() -> None:
    assert references("cuda{cell.cuda}|{aws-ofi-nccl}") == ("cell.cuda", "aws-ofi-nccl")


# Properties.

RELEASES = st.lists(st.integers(0, 2000), min_size=1, max_size=4).map(
    lambda numbers: ".".join(map(str, numbers))
)
VENDORS = st.sampled_from(["", "amzn1.0", "amzn2.0", "amzn10.0", "-aws", "-1", "+cu113", ".post1"])
VERSIONS = st.builds("".join, st.tuples(st.sampled_from(["", "v"]), RELEASES, VENDORS))
RANGES = st.lists(
    st.lists(
        st.tuples(st.sampled_from([">=", "<=", "==", "!=", ">", "<"]), RELEASES),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)


@given(VERSIONS, VERSIONS, VERSIONS)
def test_the_order_is_total(one: str, two: str, three: str) -> None:
    first, second, third = version_key_of(one), version_key_of(two), version_key_of(three)
    assert (first < second) + (first == second) + (first > second) == 1
    assert not (first <= second <= third) or first <= third


@given(VERSIONS, RELEASES)
def test_comparators_agree_with_each_other(version: str, bound: str) -> None:
    def holds(comparator: str) -> bool:
        return satisfies(version, comparator + bound, {})

    assert holds("<") + holds("==") + holds(">") == 1
    assert holds(">=") == (holds(">") or holds("=="))
    assert holds("<=") == (holds("<") or holds("=="))
    assert holds("!=") != holds("==")


@given(RELEASES, VENDORS, VENDORS)
def test_a_vendors_suffix_counts_for_nothing_where_the_bound_has_none(
    release: str, one: str, two: str
) -> None:
    assert compare(release + one, release) == compare(release + two, release) == 0


@given(RELEASES, st.integers(1, 50), st.integers(1, 50))
def test_a_vendors_number_counts_where_the_bound_has_one(release: str, one: int, two: int) -> None:
    assert compare(f"{release}amzn{one}.0", f"{release}amzn{two}.0") == (one > two) - (one < two)
    assert compare(release, f"{release}amzn{two}.0") == -1


@given(VERSIONS, RANGES)
def test_comma_is_and_and_bar_is_or(
    version: str, alternatives: list[list[tuple[str, str]]]
) -> None:
    texts = []
    for conditions in alternatives:
        texts.append(",".join(comparator + bound for comparator, bound in conditions))
    text = "|".join(texts)
    expected = False
    for conditions in alternatives:
        if all(satisfies(version, comparator + bound, {}) for comparator, bound in conditions):
            expected = True
    assert satisfies(version, text, {}) is expected
    assert satisfies(version, text.replace(",", " , ").replace("|", " | "), {}) is expected
    assert problem_of(text) == ""


@given(RELEASES, RELEASES)
def test_a_text_alone_means_itself_and_what_continues_it(release: str, more: str) -> None:
    assert satisfies(f"{release}.{more}", release, {})
    assert not satisfies(f"{release}{more}", release, {})
    assert satisfies(release, f"!{release}", {}) is False


@given(st.text(max_size=20))
def test_any_text_is_a_range_or_has_a_problem_that_is_said(text: str) -> None:
    if not problem_of(text):
        satisfies("1.0", text, {})
