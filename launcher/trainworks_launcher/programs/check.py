"""Check this host before the job starts: ``check.py CHECKS``, a JSON object with the fields of
``checks.Checks``.

A process of its own, because a driver may never answer, while the launcher's heartbeats and stop
signals go on. Findings are lines on standard error. The status is names.EXIT_CHECK if one of them
failed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))  # noqa: PTH100, PTH120

from trainworks_launcher.checks import FAILED, Checks
from trainworks_launcher.checks.run import line_of, run_checks
from trainworks_launcher.contract import names


def main(document: str) -> int:
    """Run the checks, and print each finding as a line on standard error.

    Args:
        document: The fields of ``checks.Checks`` as a JSON object.

    Returns:
        0, or ``names.EXIT_CHECK`` if a check failed.
    """
    fields: dict[str, Any] = json.loads(document)
    for name, value in fields.items():
        # JSON has no tuples.
        if isinstance(value, list):
            fields[name] = tuple(value)
    status = 0
    for finding in run_checks(Checks(**fields)):
        sys.stderr.write(f"trainworks: {line_of(finding)}\n")
        sys.stderr.flush()
        if finding.severity == FAILED:
            status = names.EXIT_CHECK
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
