"""The estimate of a pull: what a host does with layers, in round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainworks.facts.rows import Facts, Pull
from trainworks.inspect.pull_time import pull_seconds, pull_text, pull_times

HOST = Pull(
    name="host",
    connections=2,
    connection_megabytes_per_second=50,
    unpacks=1,
    unpack_megabytes_per_second=100,
    packed_percent=50,
    source="a test",
)
"""100 MB take 1 s to download, on one of two connections, and 1 s to unpack."""


@pytest.mark.parametrize(
    ("megabytes", "seconds"),
    [
        pytest.param((), 0, id="nothing"),
        pytest.param((100,), 2, id="one layer: downloaded, then unpacked"),
        pytest.param((100, 100), 3, id="two downloads at a time, unpacked one after the other"),
        pytest.param((100, 100, 100), 4, id="the third download is done before it is unpacked"),
        pytest.param((400, 100), 9, id="a small layer waits for the large one below it"),
        pytest.param((100, 400), 8, id="a large layer is waited for"),
        pytest.param((100, 200, 200), 6, id="the same bytes in layers of similar size"),
    ],
)
def test_layers_are_downloaded_together_and_unpacked_in_turn(megabytes: tuple[int, ...], seconds: float) -> None:
    assert pull_seconds([size * 1_000_000 for size in megabytes], HOST) == pytest.approx(seconds)


def test_layers_that_are_unpacked_together_wait_for_the_largest() -> None:
    host = replace(HOST, connections=4, unpacks=4)
    assert pull_seconds([400_000_000, 100_000_000], host) == pytest.approx(8)
    assert pull_seconds([200_000_000, 200_000_000, 100_000_000], host) == pytest.approx(4)


def test_the_rows_are_possible_and_the_text_has_every_assumption(facts: Facts) -> None:
    for host in facts.pulls:
        numbers = (
            host.connections,
            host.connection_megabytes_per_second,
            host.unpacks,
            host.unpack_megabytes_per_second,
        )
        assert min(numbers) > 0, host.name
        assert 0 < host.packed_percent <= 100, host.name
        (line,) = pull_text(pull_times([10**9], [host]))
        assert all(str(number) in line for number in (host.name, *numbers, host.packed_percent))
