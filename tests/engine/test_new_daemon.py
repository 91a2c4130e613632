"""Test a dockerd that never ran before, as on a fresh machine: the questions of the tests to Docker
have their answers there too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.daemons import own_daemon
from engine.helpers import BASE
from sdk.support import host_address

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(os.geteuid() != 0, reason="a dockerd needs root"),
]


def test_a_container_reaches_a_server_of_its_host(base_archive: Path, tmp_path: Path) -> None:
    (tmp_path / "word").write_text("from the host\n")
    with own_daemon(tmp_path / "data") as daemon:
        docker = ("docker", "--host", daemon.host)
        subprocess.run(
            (*docker, "load", "--input", str(base_archive)),
            check=True,
            capture_output=True,
            timeout=300,
        )
        host = host_address(BASE, docker=docker)
        # This daemon's host is the network that it is in, not this machine's.
        server = daemon.beside(
            sys.executable, "-u", "-m", "http.server", "--bind", host, "--directory", str(tmp_path)
        )
        with subprocess.Popen(
            (*server, "0"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as serving:
            try:
                assert serving.stdout is not None
                match = re.search(r"port (\d+)", serving.stdout.readline())
                assert match is not None, "the server did not start"
                fetch = ("busybox", "wget", "-q", "-O", "-", f"http://{host}:{match[1]}/word")
                words = (*docker, "run", "--rm", BASE, *fetch)
                done = subprocess.run(
                    words, capture_output=True, text=True, timeout=300, check=False
                )
            finally:
                serving.kill()
    assert (done.stdout, done.stderr) == ("from the host\n", "")
