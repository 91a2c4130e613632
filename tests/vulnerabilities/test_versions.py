"""Versions and ranges: dpkg itself says what is newer, PEP 440 and OSV's schema what a table has."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainworks.vulnerabilities.versions import (
    UnreadableVersionError,
    compare_debian,
    compare_python,
    in_range,
    next_fix,
)

DPKG = shutil.which("dpkg")
VERSIONS = st.from_regex(
    r"([0-2]:)?[0-9][0-9a-cz.+~]{0,5}[0-9a-cz](-[0-9][0-9az.+~]{0,4}[0-9az])?(\+deb12u[0-9])?", fullmatch=True
)


def dpkg_says(left: str, relation: str, right: str) -> bool:
    assert DPKG is not None
    return subprocess.run((DPKG, "--compare-versions", left, relation, right), check=False).returncode == 0


@pytest.mark.skipif(DPKG is None, reason="NOT TESTED: no dpkg here to compare with")
@settings(max_examples=80, deadline=None)
@given(left=VERSIONS, right=VERSIONS)
@example(left="1.0~rc1", right="1.0")
@example(left="1:1.0", right="2.0")
@example(left="1.0", right="1.0-0")
@example(left="1.0-1", right="1.0-1+deb12u1")
@example(left="2.36-9+deb12u10", right="2.36-9+deb12u9")
@example(left="1.0-1", right="1.0-1~deb12u1")
@example(left="1.0.a", right="1.0a")
def test_debian_versions_are_ordered_as_dpkg_does(left: str, right: str) -> None:
    order = compare_debian(left, right)
    assert dpkg_says(left, "lt" if order < 0 else "gt" if order > 0 else "eq", right)
    assert compare_debian(right, left) == -order


@pytest.mark.parametrize(
    ("installed", "named", "order"),
    [
        ("2.0rc1", "2.0", -1),
        ("2.0.dev1", "2.0a1", -1),
        ("2.0.post1", "2.0", 1),
        ("1!1.0", "2.0", 1),
        ("1.10", "1.9", 1),
        ("1.0", "1.0.0", 0),
        ("1.0-1", "1.0.post1", 0),
        ("v1.0", "1.0", 0),
        # A build of a release is that release, unless the advisory is about builds.
        ("2.6.0+cpu", "2.6.0", 0),
        ("2.6.0+cpu", "2.6.0+cu121", -1),
        ("2.5.1+cu121", "2.6.0", -1),
    ],
)
def test_python_versions_are_ordered_as_pep_440_does(installed: str, named: str, order: int) -> None:
    assert compare_python(installed, named) == order


@pytest.mark.parametrize(("compare", "version"), [(compare_python, "1.0-final-really"), (compare_debian, "one")])
def test_what_is_no_version_is_said(compare: object, version: str) -> None:
    with pytest.raises(UnreadableVersionError, match=version):
        compare(version, "1.0")  # type: ignore[operator]


def events(*written: str) -> list[tuple[str, str]]:
    return [(kind, version) for kind, _, version in (each.partition("=") for each in written)]


@pytest.mark.parametrize(
    ("written", "inside", "outside"),
    [
        (("introduced=0",), ("0.dev0", "0", "99"), ()),
        (("introduced=0", "fixed=1.5"), ("0.1", "1.5rc1"), ("1.5", "1.5+cpu", "2")),
        (("introduced=1.0", "last_affected=1.5"), ("1.0", "1.5", "1.5+cpu"), ("0.9", "1.5.1")),
        (("introduced=2.0", "fixed=2.0.3", "introduced=0", "fixed=1.2.5"), ("1.2.4", "2.0"), ("1.2.5", "1.9", "2.0.3")),
        (("introduced=1.0", "last_affected=1.0"), ("1.0",), ("0.9", "1.1")),
        (("introduced=0", "fixed=1.0", "introduced=1.0", "fixed=2.0"), ("0.5", "1.0", "1.9"), ("2.0",)),
        (("introduced=0", "limit=3.0"), ("2.9",), ("3.0", "4")),
        (("introduced=0", "limit=*"), ("2.9",), ()),
        (("fixed=1.0",), (), ("0.9", "1.0")),
    ],
)
def test_ranges(written: tuple[str, ...], inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    assert [each for each in inside if not in_range(each, events(*written), compare_python)] == []
    assert [each for each in outside if in_range(each, events(*written), compare_python)] == []


def test_in_debian_too_nothing_is_older_than_the_beginning() -> None:
    assert in_range("0~alpha-1", events("introduced=0"), compare_debian)


@given(
    bounds=st.lists(st.integers(1, 30), unique=True, max_size=8).map(sorted),
    version=st.integers(0, 31),
    order=st.randoms(use_true_random=False),
)
def test_ranges_are_intervals_in_whatever_order_they_are_written(
    bounds: list[int], version: int, order: object
) -> None:
    kinds = ("introduced", "fixed")
    written = [(kinds[number % 2], str(bound)) for number, bound in enumerate(bounds)]
    starts, ends = bounds[::2], [*bounds[1::2], 99]
    expected = any(start <= version < end for start, end in zip(starts, ends, strict=False))
    order.shuffle(written)  # type: ignore[attr-defined]
    assert in_range(str(version), written, compare_python) == expected
    later = [end for end in ends if end > version and end != 99]
    assert next_fix(str(version), written, compare_python) == (str(min(later)) if later else "")
