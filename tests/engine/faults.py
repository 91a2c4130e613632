"""Engines that fail for real: a buildah whose kernel call is refused, a runtime of docker's that
ends before it starts.

Each fails a number of times and works from then on.
"""

from __future__ import annotations

import sys
from pathlib import Path

ALWAYS = 1000

BUILDAH = """\
#!{python}
# Runs the real buildah. Its next runs and builds end as they do when the kernel moves a page at the
# wrong moment: fcntl(F_ADD_SEALS) is refused with EBUSY, by a seccomp filter that buildah's
# processes inherit.
import ctypes, os, platform, struct, sys
from pathlib import Path

left = Path({left!r})
number = int(left.read_text())
if sys.argv[1] in ("run", "build") and number:
    left.write_text(str(number - 1))
    fcntl = {{"x86_64": 72, "aarch64": 25}}[platform.machine()]
    seals, refuse, allow = 1033, 0x00050000 | 16, 0x7FFF0000
    steps = [(0x20, 0, 0, 0), (0x15, 0, 3, fcntl), (0x20, 0, 0, 24), (0x15, 0, 1, seals)]
    steps += [(6, 0, 0, refuse), (6, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    packed = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    filter = ctypes.create_string_buffer(packed)
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(filter))) == 0
os.execv({program!r}, sys.argv)
"""

LOSING = """\
#!/bin/sh
# Runs the real buildah. Its next runs lose what the command printed, as they do on a busy machine:
# buildah's process that hands the output on ends before it has read it.
number=$(cat {left})
if [ "$1" = run ] && [ "$number" -gt 0 ]; then
    echo $((number - 1)) >{left}
    exec {program} "$@" >/dev/null 2>&1
fi
exec {program} "$@"
"""

FORGETFUL = """\
#!/bin/sh
# Runs the real buildah. Its next lists of images end as they do where another program removes an
# image meanwhile.
number=$(cat {left})
if [ "$1" = images ] && [ "$number" -gt 0 ]; then
    echo $((number - 1)) >{left}
    echo "Error: 0123abcd: image not known" >&2
    exit 125
fi
exec {program} "$@"
"""

RUNTIME = """\
#!/bin/sh
# Runs the real runtime; it is ended before that a few times.
number=$(cat {left})
case " $* " in
*" exec "*)
    if [ "$number" -gt 0 ]; then
        echo $((number - 1)) >{left}
        kill -KILL $$
    fi ;;
esac
exec {program} "$@"
"""


class Faulty:
    """A program that fails ``times`` times at running commands, and else is the real one."""

    def __init__(self, folder: Path, text: str, program: str) -> None:
        """Write the program into a folder, under the real program's name."""
        self._left = folder / "left"
        self.times = 0
        self.path = folder / Path(program).name
        values = {"left": str(self._left), "program": program, "python": sys.executable}
        self.path.write_text(text.format(**values))
        self.path.chmod(0o755)

    @property
    def times(self) -> int:
        """Return how many times the program will fail from now on."""
        return int(self._left.read_text())

    @times.setter
    def times(self, number: int) -> None:
        self._left.write_text(str(number))
