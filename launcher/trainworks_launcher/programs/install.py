"""Installs requirements with uv and keeps what the image was built around: one program, for a job
and for an extension.

Run as ``python -I install.py [--manifest FILE] [--strict] [--keep NAME==VERSION]... -- WORDS``,
with the Python that it installs for. ``--keep`` stands in for ``protected`` where an image has no
manifest. WORDS are those of ``pip install``: folders, ``-r FILE``, options that uv has too. The
image's manifest says what is kept (``protected``), what is compiled against that (``companions``),
what other builds of it need (``libraries``), what compiles with a component that the image lacks:
later (``compiled_by``), or while it is installed (``needs``); and what is built with the image's
packages in sight (``built_whole``).

Its parts are in ``installing``.
1. The files are read: those of pip's line by line, projects, locks and scripts by uv. What asks for
   an older or another build of what is kept is answered with what the image has, and printed; a
   newer one is refused.
2. uv gets the other lines, with what is kept as constraints and with pip's
   settings. It resolves and installs.
3. What of the image lost a requirement is asked for in a second call.
4. What must fit what is kept, or what went back, is imported once; what moved is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Sequence

# The user's Python runs this, and knows nothing of the launcher.
sys.path.insert(0, str(Path(__file__).parents[2]))

try:
    from trainworks_launcher.programs.installing.environment import (
        MANIFEST,
        MANIFEST_VARIABLE,
        RUNTIME_DIRECTORY,
        RefusedError,
        ThisPython,
    )
    from trainworks_launcher.programs.installing.installation import Task, for_uv, settings_of_pip
    from trainworks_launcher.programs.installing.inputs import refuse_python
except ModuleNotFoundError as error:
    if error.name not in ("packaging", "tomli"):
        raise
    sys.exit(
        f"trainworks: {sys.executable} has neither pip nor {error.name},"
        " so nothing can be installed for it;"
        " install pip in the image (python -m ensurepip, or python3-pip of the distribution)"
    )

sys.path.pop(0)

__all__ = ["RefusedError", "Task", "for_uv", "main", "refuse_python", "settings_of_pip"]
"""The builder uses these, too."""


def main(arguments: Sequence[str]) -> int:
    """Install; the installer's status, or 1 with one line on standard error."""
    split = list(arguments).index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--manifest", type=Path, default=Path(os.environ.get(MANIFEST_VARIABLE) or MANIFEST)
    )
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--keep", action="append", default=[], metavar="NAME==VERSION")
    given = parser.parse_args(arguments[:split])
    python = ThisPython()
    with tempfile.TemporaryDirectory(dir=os.environ.get(RUNTIME_DIRECTORY)) as folder:
        try:
            return Task(python, given, arguments[split + 1 :], Path(folder)).run()
        except RefusedError as error:
            python.say(str(error))
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
