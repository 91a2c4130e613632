"""From a request to a row and its components: a table of answers, and a table of refusals."""

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
    return replace(request, with_components=tuple(added.split()), without_components=tuple(removed.split()))


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
    targets = tuple(replace(row, version=version, cuda=cuda, base=base) for version, cuda, base in cells)
    return replace(facts, targets=targets)


@pytest.mark.parametrize(
    ("request_", "version", "base"),
    [
        pytest.param(ask("cu121"), "2.10.0", "debian12", id="the newest version, by number; the oldest Python"),
        pytest.param(ask("cu121", python="3.13"), "2.10.0", "debian13", id="--python 3.13 means trixie"),
        pytest.param(ask("cu121", version="2.9.1"), "2.9.1", "debian12", id="the version asked for"),
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


@pytest.mark.parametrize(
    ("request_", "message", "hints"),
    [
        pytest.param(
            replace(ask("cu121"), framework="pytroch"),
            "unknown framework 'pytroch'",
            ["did you mean pytorch? (available: mxnet, pytorch, tensorflow)"],
            id="framework",
        ),
        pytest.param(
            ask("cu112"),
            "unknown --cuda for pytorch: 'cu112'",
            ["available: cpu, cu121, cu124", "--list"],
            id="cuda",
        ),
        pytest.param(
            ask("cu121", version="2.4.2"),
            "unknown --framework-version for pytorch with cu121: '2.4.2'",
            ["available: 2.4.1"],
            id="version of another cell",
        ),
        pytest.param(
            ask("cu121", python="3.13"),
            "unknown --python for pytorch with cu121: '3.13'",
            ["available: 3.11"],
            id="python that the cell has not",
        ),
        pytest.param(
            ask("cu124", version="2.6.0", python="2.7"),
            "unknown --python for pytorch with cu124 2.6.0: '2.7'",
            ["available: 3.11, 3.13"],
            id="python that nothing has",
        ),
        pytest.param(
            replace(ask("cu113", version="1.11.0"), sources="vendor"),
            "unknown --framework-version for pytorch with cu113: '1.11.0'",
            ["available: 1.10.2", "--list"],
            id="a version that has no row",
        ),
    ],
)
def test_unknown_names_get_the_nearest_and_all_there_is(
    request_: Request, message: str, hints: list[str], facts: Facts
) -> None:
    with pytest.raises(UnknownNameError) as caught:
        select_row(request_, facts)
    assert caught.value.message == message
    assert [hint for hint in hints if hint not in caught.value.hint] == []


def chosen(request: Request, facts: Facts) -> list[str]:
    return [
        component.name for component in select_components(request, context_of(select_row(request, facts), facts), facts)
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
    assert more == [*usual[: usual.index("rmm") + 1], "rmm-python", *usual[usual.index("rmm") + 1 :]]
    less = chosen(with_and_without("cu121", removed="mpi4py ssh"), facts)
    assert less == [name for name in usual if name not in {"mpi4py", "ssh"}]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        pytest.param(
            with_and_without("cu121", added="mpi4pi"),
            [
                "unknown component in --with: 'mpi4pi'",
                "did you mean mpi4py?",
                "(available: libfabric-cuda, rmm-python, hug",
            ],
            id="unknown in --with",
        ),
        pytest.param(
            with_and_without("cu121", removed="open_mpi"),
            ["unknown component in --without: 'open_mpi'", "did you mean open-mpi?"],
            id="unknown in --without",
        ),
        pytest.param(
            with_and_without("cu121", added="gdrcopi"), ["did you mean gdrcopy?"], id="near to one of a vendor"
        ),
        pytest.param(
            with_and_without("cu121", added="efa-installer"),
            ["--with efa-installer: not with --sources packages", "it comes with --sources vendor"],
            id="only at its vendor",
        ),
        pytest.param(
            with_and_without("cpu", added="rmm"),
            ["--with rmm: needs CUDA, and the cell cpu has no CUDA"],
            id="CUDA on cpu",
        ),
        pytest.param(
            with_and_without("cu121", removed="torch"),
            ["--without torch: every image needs it", "it is PyTorch"],
            id="required",
        ),
        pytest.param(
            with_and_without("cu121", added="metis", removed="metis"), ["metis: both --with and --without"], id="both"
        ),
        pytest.param(
            with_and_without("cu121", removed="open-mpi"),
            ["mpi4py needs open-mpi, which is not in the image", "add --with open-mpi, or --without mpi4py"],
            id="needed by another",
        ),
        pytest.param(
            with_and_without("cu121", removed="smp"),
            ["smddp needs smp, which is not in the image", "--without smddp"],
            id="one of two in one distribution",
        ),
        pytest.param(
            with_and_without("cu121", added="rmm-python", removed="rmm"),
            ["rmm-python needs rmm"],
            id="needs the removed",
        ),
        pytest.param(
            with_and_without("cpu", added="nonsense rmm gdrcopy", removed="torch nothing"),
            [
                "unknown component in --with: 'nonsense'",
                "--with rmm: needs CUDA",
                "--with gdrcopy: needs CUDA",
                "--without torch: every image",
                "unknown component in --without: 'nothing'",
            ],
            id="several at once",
        ),
    ],
)
def test_components_that_cannot_be_chosen(request_: Request, said: list[str], facts: Facts) -> None:
    with pytest.raises(UnknownNameError) as caught:
        chosen(request_, facts)
    assert [words for words in said if words not in str(caught.value)] == []


def test_versions_are_ordered_by_number() -> None:
    versions = ["2.10.0", "2.9.1", "2.13.0+cpu", "2.4.1"]
    assert sorted(versions, key=version_key) == ["2.4.1", "2.9.1", "2.10.0", "2.13.0+cpu"]
