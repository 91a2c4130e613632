"""Test the way from a request to a row and its components.

``tests/cli/test_refusals.py`` has the refusals.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainworks.errors import UnknownNameError
from trainworks.facts.rows import Facts
from trainworks.plan.model import Request
from trainworks.plan.select import request_for, select_components, select_row, version_key
from trainworks.plan.target import context_of


def ask(cuda: str, *, version: str | None = None, python: str | None = None) -> Request:
    return Request(framework="pytorch", cuda=cuda, version=version, python=python)


def with_and_without(cuda: str, added: str = "", removed: str = "") -> Request:
    request = ask(cuda)
    return replace(
        request, with_components=tuple(added.split()), without_components=tuple(removed.split())
    )


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("keras", "\nhint: available: pytorch, tensorflow;"),
        ("mxnte", "'mxnte'; did you mean mxnet? (available: pytorch, tensorflow)\n"),
    ],
)
def test_an_unknown_framework_is_answered_by_those_with_a_target_that_can_be_built(
    name: str, answer: str, facts: Facts
) -> None:
    """MXNet has targets of vendors' sources only: the project's machine cannot build them."""
    with pytest.raises(UnknownNameError) as refused:
        select_row(Request(framework=name, cuda="cpu"), facts)
    assert answer in str(refused.value)


@pytest.fixture
def matrix(facts: Facts) -> Facts:
    """Give a small matrix with a choice in every direction."""
    row = next(row for row in facts.targets if row.framework == "pytorch")
    cells = (
        ("2.9.1", "cu121", "debian12"),
        ("2.10.0", "cu121", "debian13"),
        ("2.10.0", "cu121", "debian12"),
        ("2.10.0", "cu124", "debian13"),
    )
    targets = tuple(
        replace(row, version=version, cuda=cuda, base=base) for version, cuda, base in cells
    )
    return replace(facts, targets=targets)


@pytest.mark.parametrize(
    ("request_", "version", "base"),
    [
        pytest.param(
            ask("cu121"),
            "2.10.0",
            "debian12",
            id="the newest version, by number; the oldest Python",
        ),
        pytest.param(
            ask("cu121", python="3.13"), "2.10.0", "debian13", id="--python 3.13 means trixie"
        ),
        pytest.param(
            ask("cu121", version="2.9.1"), "2.9.1", "debian12", id="the version asked for"
        ),
        pytest.param(ask("cu124"), "2.10.0", "debian13", id="the only row of its cell"),
    ],
)
def test_one_row_is_meant(request_: Request, version: str, base: str, matrix: Facts) -> None:
    row = select_row(request_, matrix)
    assert (row.version, row.base) == (version, base)


def test_the_order_of_rows_means_nothing(matrix: Facts) -> None:
    turned = replace(matrix, targets=matrix.targets[::-1])
    assert select_row(ask("cu121"), turned) == select_row(ask("cu121"), matrix)


def test_every_row_of_the_matrix_can_be_asked_for(facts: Facts) -> None:
    for row in facts.targets:
        assert select_row(request_for(row, facts), facts) == row


def chosen(request: Request, facts: Facts) -> list[str]:
    return [
        component.name
        for component in select_components(
            request, context_of(select_row(request, facts), facts), facts
        )
    ]


def test_defaults_of_a_cuda_target_in_the_order_of_their_layers(facts: Facts) -> None:
    assert chosen(ask("cu121"), facts) == [
        row.name
        for row in context_of(select_row(ask("cu121"), facts), facts).fitting.values()
        if row.required or row.default
    ]


def test_a_cpu_target_has_nothing_that_needs_cuda(facts: Facts) -> None:
    needing = {row.name for row in facts.components if row.needs_cuda and "packages" in row.sources}
    names = set(chosen(ask("cpu"), facts))
    assert needing
    assert names.isdisjoint(needing)
    assert names == set(chosen(ask("cu121"), facts)) - needing


def test_with_adds_in_its_place_and_without_takes_away(facts: Facts) -> None:
    usual = chosen(ask("cu121"), facts)
    more = chosen(with_and_without("cu121", added="rmm-python"), facts)
    assert more == [
        *usual[: usual.index("rmm") + 1],
        "rmm-python",
        *usual[usual.index("rmm") + 1 :],
    ]
    less = chosen(with_and_without("cu121", removed="mpi4py ssh"), facts)
    assert less == [name for name in usual if name not in {"mpi4py", "ssh"}]


def test_versions_are_ordered_by_number() -> None:
    versions = ["2.10.0", "2.9.1", "2.13.0+cpu", "2.4.1"]
    assert sorted(versions, key=version_key) == ["2.4.1", "2.9.1", "2.10.0", "2.13.0+cpu"]
