"""Two hosts as two network namespaces with a cable between them: what the engine tests of the launcher share."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_support import TIME_OUT, Launcher, write_inputs

from trainworks_launcher.values import Json

NAMES = ("algo-1", "algo-2")


def call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=TIME_OUT)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, in which algo-1 and algo-2 can be resolved."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [name for name in ("ip", "unshare") if not shutil.which(name)]
    if missing:
        pytest.skip(f"not here: {', '.join(missing)}")
    spaces = (f"tw{os.getpid()}a", f"tw{os.getpid()}b")
    hosts = "127.0.0.1 localhost\n10.77.0.1 algo-1\n10.77.0.2 algo-2\n"
    with contextlib.ExitStack() as stack:
        for space in spaces:
            call("ip", "netns", "add", space)
            stack.callback(call, "ip", "netns", "delete", space)
            directory = Path("/etc/netns", space)
            directory.mkdir(parents=True)
            stack.callback(shutil.rmtree, directory)
            (directory / "hosts").write_text(hosts, encoding="ascii")
        call(
            "ip", "link", "add", "eth0", "netns", spaces[0], "type", "veth", "peer", "name", "eth0", "netns", spaces[1]
        )
        for number, space in enumerate(spaces, 1):
            call("ip", "-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "eth0", "up")
            call("ip", "-n", space, "link", "set", "lo", "up")
        yield spaces


@contextlib.contextmanager
def two_hosts(
    tmp_path: Path, network: tuple[str, str], manifest: Path, script: str, hyperparameters: dict[str, Json]
) -> Iterator[tuple[Launcher, Launcher]]:
    """Two launchers, each in its namespace, with the same wrong hostname and an interface that does not exist."""
    made = []
    with contextlib.ExitStack() as stack:
        for host, space in zip(NAMES, network, strict=True):
            base = tmp_path / host
            config: dict[str, Json] = {
                "hosts": list(NAMES),
                "current_host": host,
                "network_interface_name": "ethwe",
            }
            write_inputs(base, script, hyperparameters, config)
            rename = 'hostname aws && exec "$@"'
            # Process 1 of a PID namespace, as in a container: with it everything on that host is gone.
            own = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
            prefix = ("ip", "netns", "exec", space, *own, "sh", "-c", rename, "sh")
            variables = {"TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
            made.append(stack.enter_context(Launcher(base, variables=variables, prefix=prefix)))
        yield made[0], made[1]
