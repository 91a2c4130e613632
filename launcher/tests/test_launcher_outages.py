"""Outages of the network between two hosts, which are network namespaces:
packets are dropped for a while, or for good.

Marked ``engine``. Needs root, iproute2, util-linux and iptables. All outages happen at the same
time, to a job each.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
from launcher_network import Host, Network, call, job_on, need, network_of

from trainworks_testing.clock import assert_within

pytestmark = pytest.mark.engine

LIMIT = 12.0
"""The default of TRAINWORKS_HEARTBEAT_LIMIT_SECONDS."""

SCRIPT = """
import os, time
print("ready", flush=True)
while not os.path.exists(os.environ["SM_HP_END"]):
    time.sleep(0.1)
"""
BOTH, INPUT, OUTPUT = ("INPUT", "OUTPUT"), ("INPUT",), ("OUTPUT",)
OUTAGES = [
    *[(seconds, host, BOTH) for seconds in (8, 9, 11) for host in ("algo-1", "algo-2")],
    (11, "algo-2", INPUT),
    (11, "algo-2", OUTPUT),
]


def drop(network: Network, host: str, chains: tuple[str, ...], action: str) -> None:
    for chain in chains:
        call(*network.inside(host, "iptables", "-w", action, chain, "-j", "DROP"))


def test_an_outage_that_is_shorter_than_the_limit_ends_nothing(tmp_path: Path) -> None:
    """8, 9 and 11 s at the limit of 12 s, on the leader's side and on the
    worker's, and in one direction only.
    """
    need("iptables")
    mark = tmp_path / "end"
    with contextlib.ExitStack() as stack:
        jobs: list[tuple[Network, tuple[Host, ...]]] = []
        for number, _ in enumerate(OUTAGES):
            network = stack.enter_context(network_of(2))
            job_hosts = stack.enter_context(
                job_on(network, tmp_path / str(number), SCRIPT, {"end": str(mark)})
            )
            jobs.append((network, job_hosts))
        for _, job_hosts in jobs:
            for host in job_hosts:
                host.read_until("ready")

        def cut(network: Network, seconds: int, host: str, chains: tuple[str, ...]) -> None:
            drop(network, host, chains, "-A")
            time.sleep(seconds)  # the outage itself
            drop(network, host, chains, "-D")

        threads = [
            threading.Thread(target=cut, args=(network, *outage))
            for (network, _), outage in zip(jobs, OUTAGES, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(LIMIT / 2)  # a lost message would be known by then
        mark.touch()
        for outage, (_, job_hosts) in zip(OUTAGES, jobs, strict=True):
            assert [host.wait() for host in job_hosts] == [0, 0], (
                outage,
                job_hosts[0].text,
                job_hosts[1].text,
            )


@pytest.mark.parametrize("cut_off", ["algo-1", "algo-2"])
def test_an_outage_that_stays_ends_both_hosts(tmp_path: Path, cut_off: str) -> None:
    need("iptables")
    with (
        network_of(2) as network,
        job_on(network, tmp_path, SCRIPT, {"end": str(tmp_path / "end")}) as hosts,
    ):
        for host in hosts:
            host.read_until("ready")
        began = time.monotonic()
        drop(network, cut_off, BOTH, "-A")
        assert [host.wait() for host in hosts] == [66, 66]
        end_time = time.monotonic()
        assert end_time - began > LIMIT - 1
        assert_within(15, began, end_time, hosts[0].text)
    assert hosts[0].failure.startswith("lost host algo-2: no message from it for ")
    assert hosts[1].failure.startswith("lost host algo-1: no message from it for ")
