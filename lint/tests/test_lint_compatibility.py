"""The rows of compatibility.toml say what they are meant to say."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from trainworks_lint.compatibility import PRESENT, REFERENCE, Incompatibility, holds, table

RULES = [
    pytest.param(rule, id=", ".join(f"{part} {allowed}" for part, allowed in {**rule.when, **rule.require}.items()))
    for rule in table().rules
]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_complete_and_can_be_read(rule: Incompatibility) -> None:
    names = {part.name for part in table().parts}
    assert rule.when
    assert {*rule.when, *rule.require} <= names
    assert rule.reason
    assert rule.instead
    assert rule.source
    for allowed in (*rule.when.values(), *rule.require.values()):
        assert set(REFERENCE.findall(allowed)) <= names
        for condition in REFERENCE.sub("1", allowed).split("|"):
            assert condition == PRESENT or re.fullmatch(r"\d+(\.\d+)*", condition) or SpecifierSet(condition)


def test_every_part_is_used_and_finds_a_version() -> None:
    parts = table().parts
    used = {name for rule in table().rules for name in (*rule.when, *rule.require)}
    assert {part.name for part in parts} == used
    assert [part.name for part in parts if any(pattern.groups == 0 for pattern in part.patterns)] == []


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ("12.1", True),
        ("12", True),
        ("12.11", False),
        ("11.8|12.1", True),
        (">=12.1,<12.2", True),
        (">=12.2|<11", False),
        ("<={other}", True),
        (">{other}", False),
        ("<{unknown}", None),
        (PRESENT, True),
    ],
)
def test_ranges(allowed: str, expected: bool | None) -> None:
    assert holds({"cuda": "12.1.1", "other": "12.4"}, "cuda", allowed) is expected


def test_what_is_not_named_is_not_known() -> None:
    assert holds({}, "cuda", "<12") is None
    assert holds({}, "cuda", PRESENT) is False
