"""ssh's ProxyCommand: connect to a host that may start later, and hand ssh the connection.

``python3 -I connect.py SECONDS HOST PORT``. On Kubernetes a pod's name resolves only once the pod
runs, and its sshd listens later still; ssh itself gives up on a name at once. The connection goes
to ssh over standard output (``ProxyUseFdpass``, ssh_config(5)), so no process stays in between.
"""

from __future__ import annotations

import select
import socket
import sys
import time

# Seconds between two tries: each pause is longer by the factor.
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_FACTOR = 0.1, 2.0, 1.5
_CONNECT_SECONDS = 10.0
"""Limit of one try."""

_INT_BYTES = 4
_SSH = 1
"""Standard output, which is a socket to ssh (``ProxyUseFdpass``)."""


def main(arguments: list[str]) -> int:
    """Connect to a host within a limit, and hand the connection to ssh.

    Args:
        arguments: SECONDS, HOST and PORT.

    Returns:
        0; 1 if the host cannot be reached, with the reason on standard error, or if ssh has ended.
    """
    seconds, host, port = float(arguments[0]), arguments[1], int(arguments[2])
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    is_reported = False  # the line that this program waits, which is printed once
    while True:
        try:
            with socket.create_connection((host, port), _CONNECT_SECONDS) as connection:
                # ssh shares the mode of the socket, and expects one that blocks.
                connection.setblocking(True)
                _hand_to_ssh(connection)
                return 0
        except (OSError, UnicodeError) as error:
            # A UnicodeError (a part of the name is empty or too long) has no strerror.
            reason = str(getattr(error, "strerror", "") or error)
        if time.monotonic() + pause >= deadline:
            sys.stderr.write(
                f"trainworks: cannot reach sshd on {host},"
                f" port {port}, within {seconds:g} s: {reason}\n"
            )
            return 1
        if not is_reported:
            is_reported = True
            sys.stderr.write(f"trainworks: waiting for sshd on {host}, port {port}: {reason}\n")
        # The socket to ssh can be read only when ssh was stopped, and has closed its end.
        if select.select([_SSH], [], [], pause)[0]:
            return 1
        pause = min(pause * _PAUSE_FACTOR, _LONGEST_PAUSE)


def _hand_to_ssh(connection: socket.socket) -> None:
    """Send ssh the descriptor of a connection. Raises OSError if ssh has ended."""
    ssh = socket.socket(fileno=_SSH)
    try:
        # A C int, as SCM_RIGHTS has it (unix(7)); the one byte only carries it.
        descriptor = connection.fileno().to_bytes(_INT_BYTES, sys.byteorder)
        ssh.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
    finally:
        # Standard output stays open, and shows whether ssh still waits.
        ssh.detach()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
