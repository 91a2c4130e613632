"""The simulation of the matrix: bounds that any schedule keeps, and what a shared stage saves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainworks.facts.rows import Facts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from matrix import Work, outcomes, simulate, works_of

WORK = st.builds(
    Work,
    name=st.text("abc", max_size=3),
    own=st.floats(1, 100),
    stages=st.dictionaries(st.sampled_from("xyz"), st.floats(0, 100), max_size=3),
)


@given(st.lists(WORK, min_size=1, max_size=8), st.integers(1, 5))
def test_no_schedule_beats_its_bounds(works: list[Work], builders: int) -> None:
    ends = simulate(works, builders)
    least = sum(work.own for work in works)
    most = sum(work.seconds(set()) for work in works)
    assert least - 1e-6 <= sum(ends) <= most + 1e-6
    assert max(ends) >= max(work.own for work in works) - 1e-6
    assert len(ends) <= min(builders, len(works))


def test_a_stage_is_built_once_on_each_builder() -> None:
    works = [Work(name=name, own=10, stages={"torch": 60}) for name in "abcd"]
    assert simulate(works, 1) == [60 + 4 * 10]
    assert simulate(works, 2) == [80, 80]
    assert simulate(works, 2, start_seconds=5) == [85, 85]


def test_more_builders_cost_what_their_caches_lack() -> None:
    works = [Work(name=name, own=60, stages={"torch": 60}) for name in "abcd"]
    one, four = outcomes(works, [1, 4], price=2, start_seconds=0)
    assert (one.seconds, one.minutes, one.cost, one.speedup) == (300, 5, 10, 1)
    assert (four.seconds, four.minutes, four.cost, four.speedup) == (120, 8, 16, 2.5)


def test_a_target_that_was_built_takes_what_its_row_says(facts: Facts) -> None:
    works = {work.name: work.seconds(set()) for work in works_of(facts)}
    built = {record.target: record.seconds for record in facts.built if record.seconds}
    assert {name: works[name] for name in built} == pytest.approx(built)
    assert all(seconds > 0 for seconds in works.values())
