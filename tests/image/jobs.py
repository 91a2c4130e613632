"""Share a job's /opt/ml, the files of a job that trained, and two hosts on a network among the
tests of training jobs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from image.support import ROOT
from trainworks_testing.clock import PATIENCE

LOSS = re.compile(r"epoch (\d+) world (\d+) loss ([0-9.]+)")


def prepare(
    folder: Path, mode: str, *, processes: int = 2, host: str = "algo-1", hosts: str = "algo-1"
) -> Path:
    """Lay out /opt/ml for the digits example with the example's own command."""
    command = (sys.executable, str(ROOT / "examples" / "digits" / "prepare.py"), str(folder))
    options = ("--mode", mode, "--processes", str(processes), "--host", host, "--hosts", hosts)
    subprocess.run((*command, *options), check=True, capture_output=True, timeout=300)
    return folder


def losses(output: str, world: int) -> list[float]:
    """Return the loss of each epoch, as the script printed it for a world of this size."""
    return [float(match[3]) for match in LOSS.finditer(output) if int(match[2]) == world]


def assert_trained(output: str, world: int, folder: Path) -> None:
    """Assert that a job trained: five epochs, a falling loss, a model, a
    success file and no failure file.
    """
    seen = losses(output, world)
    assert len(seen) == 5, output[-4000:]
    assert seen[-1] < seen[0] / 2, seen
    assert (folder / "model" / "model.pt").stat().st_size > 10_000
    assert (folder / "output" / "success").exists()
    assert not (folder / "output" / "failure").exists()


RESTRICTED: Mapping[str, Any] = {
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "read_only": True,
    "tmpfs": {"/tmp": "exec,mode=1777"},  # as an emptyDir of Kubernetes
}
"""Settings that Kubernetes' level "restricted" demands of a container, beside a user who is not
root, and a read-only root.
"""


@contextmanager
def started_hosts(
    reference: str,
    network: Any,
    folders: Mapping[str, Path],
    settings: Mapping[str, Any] = {},
) -> Iterator[list[Any]]:
    """Start a job in one container for each host, on a private network; give the containers, which
    are removed afterwards.

    Args:
        reference: The image.
        network: The private network.
        folders: /opt/ml of each host, by the host's name.
        settings: More of each container, as docker's client has them.
    """
    import docker

    client = docker.from_env()
    with ExitStack() as stack:
        stack.callback(client.close)
        containers = []
        for host, folder in folders.items():
            # As on the platform: the name resolves on the network, and the
            # container's own hostname is another.
            container = client.containers.create(
                reference,
                ["train"],
                volumes={str(folder): {"bind": "/opt/ml", "mode": "rw"}},
                **settings,
            )
            stack.callback(container.remove, force=True)
            client.networks.get("bridge").disconnect(container)
            network.connect(container, aliases=[host])
            containers.append(container)
        for container in containers:
            container.start()
        yield containers


def wait_for_hosts(containers: Sequence[Any]) -> tuple[list[int], list[str]]:
    """Wait until the containers of a job have ended; return the status and the log of each."""
    statuses = [container.wait(timeout=PATIENCE)["StatusCode"] for container in containers]
    logs = [container.logs().decode(errors="replace") for container in containers]
    return statuses, logs


def wait_for_line(container: Any, words: str) -> None:
    """Wait until a line of the container's log has these words; fail if the container ends."""
    following = ("docker", "logs", "--follow", container.id)
    with subprocess.Popen(
        following, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as log:
        assert log.stdout is not None
        assert any(words in line for line in log.stdout), container.logs().decode()
        log.kill()


def run_on_hosts(
    reference: str,
    network: Any,
    folders: Mapping[str, Path],
    status: int = 0,
    settings: Mapping[str, Any] = {},
) -> str:
    """Run a job in one container for each host, on a private network; return the output of all.

    Args:
        reference: The image.
        network: The private network.
        folders: /opt/ml of each host, by the host's name.
        status: How each host is to end.
        settings: More of each container, as docker's client has them.
    """
    with started_hosts(reference, network, folders, settings) as containers:
        statuses, logs = wait_for_hosts(containers)
    assert statuses == [status] * len(folders), "\n".join(log[-3000:] for log in logs)
    return "".join(logs)


def train_on_two_hosts(
    reference: str, network: Any, mode: str, folder: Path, user: str = ""
) -> None:
    """Train the digits example on two hosts, and assert that both end well.
    user: of a restricted pod.
    """
    hosts = ("algo-1", "algo-2")
    folders = {
        host: prepare(folder / host, mode, processes=1, host=host, hosts=",".join(hosts))
        for host in hosts
    }
    if user:
        subprocess.run(("chown", "-R", user, str(folder)), check=True)
    settings = {**RESTRICTED, "user": user} if user else {}
    assert_trained(
        run_on_hosts(reference, network, folders, settings=settings), 2, folder / "algo-1"
    )
    assert (folder / "algo-2" / "output" / "success").exists()
    # The one model is the leader's: only rank 0 writes a model.
    assert not any((folder / "algo-2" / "model").iterdir())
