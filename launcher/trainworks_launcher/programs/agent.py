"""Started by mpirun on the leader to reach another host: ssh with the configuration and the keys of this job only.

A program of its own so that mpirun's command line, and with it the plan, does not hold the random name of the runtime
directory. Neither a user's ssh configuration nor any key in the image is read.
"""

from __future__ import annotations

import os
import sys

_RUNTIME_DIRECTORY = (
    "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE; this file imports nothing of ours
)


def main(arguments: list[str]) -> int:
    """Become ssh; returns only if that fails."""
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    try:
        with open(os.path.join(directory, "ssh_program"), encoding="utf-8") as opened:  # noqa: PTH118, PTH123
            program = opened.read()
        os.execv(program, [program, "-F", os.path.join(directory, "ssh_config"), *arguments])  # noqa: PTH118
    except OSError as error:
        sys.stderr.write(f"trainworks: cannot start ssh for the job in {directory!r}: {error}\n")
        return 70


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
