"""The measurement between hosts, in network namespaces whose speed ``tc`` limits. Marked ``engine``: root, iproute2."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from launcher_network import call, engine_manifest, job_on, need, network_of
from launcher_support import TIME_OUT

pytestmark = pytest.mark.engine

BANDWIDTH = {"TRAINWORKS_CHECK": "bandwidth"}


def test_a_slow_host_is_measured_and_named(tmp_path: Path) -> None:
    if not shutil.which("tc"):
        pytest.skip("not here: tc")
    with network_of(3) as network:
        limit = ("rate", "40mbit", "burst", "16kb", "latency", "100ms")
        call("tc", "-n", network.space("algo-3"), "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        with job_on(network, tmp_path, "print('it ran')", {}, variables=BANDWIDTH) as hosts:
            assert [host.wait() for host in hosts] == [0, 0, 0]
    log = hosts[0].text
    rate = re.search(r"TCP to algo-1: (\d+) Mbit/s from algo-3, the slowest of 2 host\(s\)", log)
    assert rate, log
    assert 20 <= int(rate.group(1)) <= 48
    assert "trainworks: warning: algo-3 sends " in log
    assert "warning: algo-2" not in log
    assert all("it ran" in host.text for host in hosts)


def test_an_all_reduce_of_torch_is_timed_between_the_hosts(tmp_path: Path) -> None:
    need("torchrun")
    with network_of(2) as network:
        image = engine_manifest(tmp_path)
        document = json.loads(image.read_text(encoding="utf-8"))
        document["components"]["torch"] = {"version": "2"}
        image.write_text(json.dumps(document), encoding="utf-8")
        with job_on(network, tmp_path, "print('it ran')", {}, manifest=image, variables=BANDWIDTH) as hosts:
            assert [host.wait() for host in hosts] == [0, 0]
    assert re.search(r"all-reduce \(gloo, 2 ranks, 16 MiB\): [\d.]+ [GM]bit/s per rank", hosts[0].text)
    assert max(host.seconds for host in hosts) < TIME_OUT


def test_a_port_that_is_closed_between_the_hosts_ends_the_job(tmp_path: Path) -> None:
    """The control channel is let through, and nothing else."""
    if not shutil.which("iptables"):
        pytest.skip("not here: iptables")
    with network_of(2) as network:
        rule = ("iptables", "-A", "INPUT", "-p", "tcp", "--dport", "7777", "-j", "DROP")
        call(*network.inside("algo-1", *rule))
        variables = {**BANDWIDTH, "TRAINWORKS_JOIN_LIMIT_SECONDS": "3"}
        with job_on(network, tmp_path, "print('it ran')", {}, variables=variables) as hosts:
            assert [host.wait() for host in hosts] == [67, 67]
    for host in hosts:
        assert "port 7777, cannot be measured" in host.failure
        assert "security group" in host.failure
        assert "it ran\n" not in host.text
