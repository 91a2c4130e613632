"""The job's secret: where it comes from, and how this process keeps it from others.

The secret is in a variable or in a file that the platform mounts. A process of the same user could
read it in ``/proc/PID/environ`` or ``/proc/PID/mem``, and a program that the launcher starts would
inherit the variable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping

from trainworks_launcher.contract import files, names
from trainworks_launcher.contract.errors import Problem

_PR_SET_DUMPABLE = 4  # linux/prctl.h


def take_variables() -> Mapping[str, str]:
    """Return this process's environment.

    From now on no other process of the same user can read the job's secret.

    The kernel then gives this process's files in /proc to root (proc(5), PR_SET_DUMPABLE in
    prctl(2)). A program that is started becomes readable again with its exec, so ranks can be
    debugged; it does not inherit the secret.
    """
    variables = dict(os.environ)
    if variables.get(names.JOB_SECRET_VARIABLE) or _is_file_given(variables):
        _forbid_reading()
    os.environ.pop(names.JOB_SECRET_VARIABLE, None)
    return variables


def read_secret(variables: Mapping[str, str]) -> tuple[str, list[Problem]]:
    """Return the job's secret, ``""`` if it has none, and why the file that
    should have it cannot be used.

    The variable wins over the file. An empty or unreadable file is a problem:
    the job would start without a proof.
    """
    given = variables.get(names.JOB_SECRET_VARIABLE, "")
    if given or not _is_file_given(variables):
        return given, []
    path = _path_of_file(variables)
    advice = "make it readable for the user of the job, on every host"
    try:
        secret = files.read_text(Path(path)).strip()
    except (OSError, ValueError) as error:
        return "", [Problem(f"the job's secret cannot be read: {error}", path, advice)]
    if not secret:
        return "", [
            Problem(
                "the file of the job's secret is empty",
                path,
                "write a secret into it, or remove it",
            )
        ]
    return secret, []


def _path_of_file(variables: Mapping[str, str]) -> str:
    return variables.get(names.JOB_SECRET_FILE_VARIABLE, "").strip() or names.JOB_SECRET_FILE


def _is_file_given(variables: Mapping[str, str]) -> bool:
    """Return whether the secret is expected in a file: one is named, or
    something is at the default path.
    """
    named = bool(variables.get(names.JOB_SECRET_FILE_VARIABLE, "").strip())
    return named or os.path.lexists(names.JOB_SECRET_FILE)


def _forbid_reading() -> None:
    import ctypes  # takes milliseconds, and most jobs have no secret

    try:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, AttributeError):
        return
