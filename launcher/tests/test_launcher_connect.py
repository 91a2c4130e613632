"""ssh's ProxyCommand, with a socket in place of ssh, and other programs that look up a host."""

from __future__ import annotations

import array
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from launcher_support import LAUNCHER, TIME_OUT

PROGRAMS = LAUNCHER / "trainworks_launcher" / "programs"
CONNECT = PROGRAMS / "connect.py"


@contextlib.contextmanager
def connecting(port: int) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Run the program, and give it with ssh's end of its standard output."""
    ssh, output = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = (sys.executable, "-I", str(CONNECT), "20", "127.0.0.1", str(port))
    with (
        ssh,
        subprocess.Popen(command, stdout=output.fileno(), stderr=subprocess.PIPE) as program,
    ):
        output.close()
        yield program, ssh


def test_ssh_gets_the_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        connecting(server.getsockname()[1]) as (program, ssh),
    ):
        accepted, _ = server.accept()
        ssh.settimeout(TIME_OUT)
        _, control, _, _ = ssh.recvmsg(1, socket.CMSG_SPACE(4))
        ((_, kind, data),) = control
        assert kind == socket.SCM_RIGHTS
        with accepted, socket.socket(fileno=array.array("i", data)[0]) as connection:
            connection.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
        assert program.wait(TIME_OUT) == 0


def test_without_ssh_it_ends_without_a_traceback() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        connecting(server.getsockname()[1]) as (program, ssh),
    ):
        ssh.close()
        _, errors = program.communicate(timeout=TIME_OUT)
    assert program.returncode == 1
    assert b"Traceback" not in errors


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("connect.py", "0", "HOST", "22"), 1),
        (("resolve.py", "LEADER", "--", "true"), 66),
        (("ray_node.py", "HOST", "6379", "0", "worker", "--", "true"), 66),
    ],
)
def test_a_name_that_dns_cannot_have_is_an_error_in_one_line(
    words: tuple[str, ...], status: int, host: str
) -> None:
    """Python refuses such a name with a UnicodeError, which is no OSError."""
    program, *arguments = [host if word == "HOST" else word for word in words]
    done = subprocess.run(
        (sys.executable, "-I", str(PROGRAMS / program), *arguments),
        env={"LEADER": host, "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIME_OUT,
        check=False,
    )
    assert done.returncode == status
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("trainworks: ")
    assert "label" in line
