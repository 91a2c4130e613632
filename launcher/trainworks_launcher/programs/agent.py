"""mpirun's agent on the leader, which runs words on another host: ``agent.py HOST WORDS...``.

The agent asks the launcher of this host, over a socket in the job's runtime directory. That
launcher asks the launcher of HOST to start the words, over the control channel. Under the
launcher's own mpirun the answer comes at once: HOST's launcher reports the end of the words. Under
a mpirun that a program calls the answer comes when the words have ended, with their status.

HOST is the job's name of a host, or another name or address of that host.

If an operator has mounted keys, and no launcher runs on the other hosts, the agent becomes ssh with
those keys.

A program of its own, so that mpirun's command line, and with it the plan, does not hold the random
name of the runtime directory. Neither a user's ssh configuration nor any key in the image is read.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

# As in contract/names.py, which this file does not import.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE
_SOCKET = "agents"  # mpirun_agents.SOCKET
_FAILED = 255  # as ssh's


def main(arguments: list[str]) -> int:
    """Request the start of words on a host; write the text of the answer to standard error.

    If an operator has mounted keys, this process becomes ssh instead.

    Args:
        arguments: HOST and the words.

    Returns:
        The status in the launcher's answer; 255, with a line on standard error, without one.
    """
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    try:
        configuration = os.path.join(directory, "ssh_config")  # noqa: PTH118
        if os.path.exists(configuration):  # noqa: PTH110
            with open(os.path.join(directory, "ssh_program"), encoding="utf-8") as opened:  # noqa: PTH118, PTH123
                program = opened.read()
            os.execv(program, [program, "-F", configuration, *arguments])
        host, line = arguments[0], " ".join(arguments[1:])
        answer = _ask(directory, host, line)
        # A launcher that does not know the host sends the job's own names.
        name = _name_of_host(host, answer.get("others") or {})
        if name:
            answer = _ask(directory, name, line)
    except (OSError, ValueError, IndexError) as error:
        sys.stderr.write(
            f"trainworks: mpirun's agent cannot reach {' '.join(arguments[:1])}: {error}\n"
        )
        return _FAILED
    sys.stderr.write(answer["text"])
    return int(answer["status"])


def _name_of_host(host: str, others: dict[str, str]) -> str:
    """Return the job's name for a host, by its addresses; "" for none.

    Args:
        host: Another name or an address of the host.
        others: The job's names -> addresses of their connections.
    """
    if not others:
        return ""
    addresses = _look_up(host)
    for name, address in others.items():
        if address in addresses:
            return name
    # Look-ups of all hosts take longer, so they come last.
    for name in others:
        if addresses & _look_up(name):
            return name
    return ""


def _look_up(host: str) -> set[str]:
    """Return the addresses of a host name or address; empty if it cannot be resolved."""
    try:
        return {str(row[4][0]) for row in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()


def _ask(directory: str, host: str, line: str) -> dict[str, Any]:
    """Send a request to the launcher of this host, and wait for the answer.

    Args:
        directory: The runtime directory.
        host: The host on which the command is started.
        line: The command for sh.

    Returns:
        ``status``, ``text``, and ``others`` if the host is not known.

    Raises:
        OSError: The launcher has ended, or cannot be reached.
        ValueError: The answer is not JSON.
    """
    runtime = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # Through the descriptor, because a socket's address holds at most 107 bytes of path.
        connection.connect(f"/proc/self/fd/{runtime}/{_SOCKET}")
        connection.sendall(json.dumps({"host": host, "line": line}).encode() + b"\n")
        with connection.makefile("rb") as answers:
            document = answers.readline()
    if not document:
        raise ConnectionError("the launcher of this host has ended")
    answer: dict[str, Any] = json.loads(document)
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
