"""Test how mpirun's daemons fail to start on another host, under both lines of Open MPI: the same
end on both hosts.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_network import BECOME_HOST, OWN, Host, Network, call, network_of
from launcher_support import write_inputs, write_manifest
from test_launcher_mpirun_engine import DIALECTS, called, mpirun

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.mpirun.dialects import Dialect

pytestmark = pytest.mark.engine

MPI: dict[str, Json] = {"sagemaker_mpi_enabled": "true"}
PORT = "7999"
NO_DAEMON = r"mpirun's daemon on host algo-2 ended before it had started a rank: exit status [0-9]+"
NO_PATH = (
    r"the data path to algo-1 does not work: algo-2 tried \S+ port [0-9]+ .*Connection refused"
)


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(2) as new_network:
        yield new_network


def fail(
    network: Network, tmp_path: Path, dialect: Dialect, cause: str, *, before: str = ""
) -> None:
    """Run a job of both hosts, which cannot start.

    Args:
        network: The hosts.
        tmp_path: A folder for the job.
        dialect: The mpirun.
        cause: A pattern of the failure.
        before: A command that sh runs on algo-2 first.
    """
    path, version = mpirun(dialect)
    programs = {"mpirun": path, "python": sys.executable}
    manifest = write_manifest(
        tmp_path / "image.json", programs, components={"open-mpi": {"version": version}}
    )
    variables = {"TRAINWORKS_IMAGE_MANIFEST": str(manifest), "TRAINWORKS_CONTROL_PORT": PORT}
    with contextlib.ExitStack() as stack:
        hosts = []
        for name in network.hosts:
            base = tmp_path / name
            config: dict[str, Json] = {"hosts": list(network.hosts), "current_host": name}
            write_inputs(
                base, "print('trained')", MPI, {**config, "network_interface_name": "eth0"}
            )
            first = before if name == "algo-2" else ""
            begin = ("sh", "-c", f'{first}\nexec "$@"', "sh")
            own = (*OWN, "sh", "-c", BECOME_HOST, "sh", name, str(tmp_path))
            hosts.append(Host(base, variables=variables, prefix=network.inside(name, *own, *begin)))
            stack.enter_context(hosts[-1])
        assert [host.wait() for host in hosts] == [66, 66], hosts[0].text + hosts[1].text

    assert hosts[0].failure == hosts[1].failure
    assert re.match(cause, hosts[0].failure), hosts[0].text
    assert "trained" not in hosts[0].text + hosts[1].text


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_a_host_without_the_daemon_is_named(
    network: Network, tmp_path: Path, dialect: Dialect
) -> None:
    program = Path(mpirun(dialect)[0]).resolve().parent / (
        "prted" if dialect.major >= 5 else "orted"
    )
    hide = f"mount --bind /dev/null {program.resolve()}"
    fail(network, tmp_path, dialect, NO_DAEMON, before=hide)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_a_host_that_reaches_the_control_port_only_is_named(
    network: Network, tmp_path: Path, dialect: Dialect
) -> None:
    if not shutil.which("iptables"):
        pytest.skip("not here: iptables")
    closed = (
        "iptables",
        "-A",
        "INPUT",
        "-i",
        "eth0",
        "-p",
        "tcp",
        "--syn",
        "!",
        "--dport",
        PORT,
        "-j",
        "REJECT",
    )
    call(*network.inside("algo-1", *closed))
    fail(network, tmp_path, dialect, NO_PATH)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: f"open-mpi-{dialect.major}")
def test_a_programs_mpirun_says_which_host_lacks_the_daemon(
    network: Network, tmp_path: Path, dialect: Dialect
) -> None:
    """Run a program's own mpirun: it names the host and ends, and the program goes on."""
    path = Path(mpirun(dialect)[0])
    program = path.resolve().parent / ("prted" if dialect.major >= 5 else "orted")
    statuses, texts = called(tmp_path, network, dialect, hidden=str(program))
    assert statuses == [5, 5], texts
    assert "trainworks: what mpirun started on algo-2 ended: exit status 12" in texts[0], texts
