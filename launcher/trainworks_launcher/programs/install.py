"""Install requirements with uv, and keep the packages for which the image was built: one program,
for a job and for an extension.

Run as ``python -I install.py [--manifest FILE] [--strict] [--keep NAME==VERSION]... -- WORDS``,
with the Python that gets the packages. ``--keep`` replaces ``protected`` for an image without a
manifest. WORDS are those of ``pip install``: folders, ``-r FILE``, options that uv has too. The
image's manifest lists packages that are kept (``protected``), that are compiled against those
(``companions``), or that only other builds of those need (``libraries``). It also lists packages
that compile with a component that the image lacks, later (``compiled_by``) or while they are
installed (``needs``), and packages that are built with the image's packages in sight
(``built_whole``).

The parts are in ``installing``.
1. Read the files: pip's line by line; projects, locks and scripts with uv. A line for an older or
   another build of a kept package is replaced by the image's own, and printed. A line for a newer
   one is refused.
2. Call uv with the other lines, with the kept packages as constraints, and with pip's settings. uv
   resolves and installs.
3. Call uv again for packages of the image that lost a requirement.
4. Import companions, and packages beside a downgraded one. Print the changes.
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
    from trainworks_launcher.programs.installing.inputs import refuse_python
    from trainworks_launcher.programs.installing.installation import Task, for_uv, settings_of_pip
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
    """Install packages for this Python.

    Args:
        arguments: Options, ``--``, and the words of ``pip install``, as above.

    Returns:
        The installer's status; 1, with one line on standard error, for a refusal.
    """
    split = list(arguments).index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--manifest", type=Path, default=Path(os.environ.get(MANIFEST_VARIABLE) or MANIFEST)
    )
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--keep", action="append", default=[], metavar="NAME==VERSION")
    options = parser.parse_args(arguments[:split])
    python = ThisPython()
    with tempfile.TemporaryDirectory(dir=os.environ.get(RUNTIME_DIRECTORY)) as folder:
        try:
            return Task(python, options, arguments[split + 1 :], Path(folder)).run()
        except RefusedError as error:
            python.say(str(error))
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
