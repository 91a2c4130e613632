"""ssh's ProxyCommand, with a socket in place of ssh."""

from __future__ import annotations

import array
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

from launcher_support import LAUNCHER, TIME_OUT

CONNECT = LAUNCHER / "trainworks_launcher" / "programs" / "connect.py"


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
