"""Started by mpirun on the leader to run words on another host: ``agent.py HOST WORDS...``.

It asks the launcher of this host, over a socket in the job's runtime directory. That one asks the
launcher of HOST to start the words, over the channel between them. Under the launcher's own mpirun
it answers at once: HOST's launcher tells what becomes of them. Under a mpirun that a program calls
it answers when they have ended, with their status.

HOST is a name that the job has for a host, or another name or address of it.

Where an operator has mounted keys, and no launcher runs on the other hosts, it
becomes ssh with those keys.

A program of its own so that mpirun's command line, and with it the plan, does not hold the random
name of the runtime directory. Neither a user's ssh configuration nor any key in the image is read.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

# The names stand in contract/names.py, too: this file imports nothing of ours.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE
_SOCKET = "agents"  # agents.SOCKET
_FAILED = 255  # as ssh's


def main(arguments: list[str]) -> int:
    """Ask for the words to be started.

    Returns the status that the launcher answers, or 255 where none does.
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
        known = _same(host, answer.get("others") or {})
        if known:
            answer = _ask(directory, known, line)
    except (OSError, ValueError, IndexError) as error:
        sys.stderr.write(
            f"trainworks: mpirun's agent cannot reach {' '.join(arguments[:1])}: {error}\n"
        )
        return _FAILED
    sys.stderr.write(answer["text"])
    return int(answer["status"])


def _same(host: str, others: dict[str, str]) -> str:
    """Return the name of the one with an address to which the host's name
    leads, "" if there is none.
    """
    asked = _addresses(host) if others else set()
    spoken = (name for name, address in others.items() if address in asked)
    return next(spoken, "") or next((name for name in others if asked & _addresses(name)), "")


def _addresses(host: str) -> set[str]:
    try:
        return {str(row[4][0]) for row in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()


def _ask(directory: str, host: str, line: str) -> dict[str, Any]:
    """Return the launcher's answer. Raises OSError or ValueError if there is none."""
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # By way of the descriptor: a path of more than 107 bytes does not fit
        # into a socket's address.
        connection.connect(f"/proc/self/fd/{place}/{_SOCKET}")
        connection.sendall(json.dumps({"host": host, "line": line}).encode() + b"\n")
        with connection.makefile("rb") as answers:
            said = answers.readline()
    if not said:
        raise ConnectionError("the launcher of this host has ended")
    answer: dict[str, Any] = json.loads(said)
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
