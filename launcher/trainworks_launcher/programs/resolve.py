"""Become another program, with the host name in one variable replaced by its IPv4 address.

Run as ``python3 -I resolve.py NAME -- PROGRAM...``, for programs that listen at an address in a
variable. The address is known on the host, and not yet when the job is planned.
"""

from __future__ import annotations

import os
import socket
import sys


def main(arguments: list[str]) -> int:
    """Replace the name in a variable by its address, and become the program.

    Returns only if that fails, with a line on standard error: 64 for wrong words, 66 for a name
    without an IPv4 address, 126 or 127 as a shell.

    Args:
        arguments: NAME of the variable, ``--``, and the program with its arguments.
    """
    if len(arguments) < 3 or arguments[1] != "--":
        sys.stderr.write("usage: resolve.py NAME -- PROGRAM [ARGUMENT...]\n")
        return 64
    name, program = arguments[0], arguments[2:]
    host = os.environ.get(name, "")
    try:
        address = socket.getaddrinfo(host, None, family=socket.AF_INET)[0][4][0]
    except (OSError, UnicodeError) as error:
        # A UnicodeError (a part of the name is empty or too long) has no strerror.
        reason = getattr(error, "strerror", "") or error
        sys.stderr.write(f"trainworks: {name}={host}: cannot resolve this name: {reason}\n")
        return 66
    try:
        os.execvpe(program[0], program, {**os.environ, name: str(address)})
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot start {program[0]!r}: {error.strerror or error}\n")
        return 126 if isinstance(error, PermissionError) else 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
