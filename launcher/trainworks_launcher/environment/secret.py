"""Reads the job's secret, and protects this process's copy.

The secret is in a variable or in a file that the platform mounts. Another process of the same user
could read the variable in ``/proc/PID/environ`` or ``/proc/PID/mem``, and a program that the
launcher starts would inherit the variable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping

from trainworks_launcher.contract import files, names
from trainworks_launcher.contract.errors import Problem

_PR_SET_DUMPABLE = 4  # linux/prctl.h


def take_variables() -> Mapping[str, str]:
    """Return this process's environment, and keep the secret from other processes of the user.

    The secret's variable is removed from ``os.environ``, so that ranks do not inherit the secret.
    The kernel gives this process's files in /proc to root (proc(5), PR_SET_DUMPABLE in prctl(2)).
    A rank is readable again after its exec, so a debugger can attach.
    """
    variables = dict(os.environ)
    if variables.get(names.JOB_SECRET_VARIABLE) or _has_file(variables):
        _forbid_reading()
    os.environ.pop(names.JOB_SECRET_VARIABLE, None)
    return variables


def read_secret(variables: Mapping[str, str]) -> tuple[str, list[Problem]]:
    """Return the job's secret, ``""`` if the job has none, and the problems of its file.

    The variable counts before the file. An empty or unreadable file is a problem: without a secret
    the hosts would not check each other.
    """
    secret = variables.get(names.JOB_SECRET_VARIABLE, "")
    if secret or not _has_file(variables):
        return secret, []
    path = _path_of_file(variables)
    try:
        secret = files.read_text(Path(path)).strip()
    except (OSError, ValueError) as error:
        advice = "make it readable for the user of the job, on every host"
        return "", [Problem(f"the job's secret cannot be read: {error}", path, advice)]
    if not secret:
        advice = "write a secret into it, or remove it"
        return "", [Problem("the file of the job's secret is empty", path, advice)]
    return secret, []


def _path_of_file(variables: Mapping[str, str]) -> str:
    """Return the path of the secret's file: the variable's, else the default; it may not exist."""
    return variables.get(names.JOB_SECRET_FILE_VARIABLE, "").strip() or names.JOB_SECRET_FILE


def _has_file(variables: Mapping[str, str]) -> bool:
    """Return whether a variable names the secret's file, or the default path exists."""
    if variables.get(names.JOB_SECRET_FILE_VARIABLE, "").strip():
        return True
    return os.path.lexists(names.JOB_SECRET_FILE)


def _forbid_reading() -> None:
    """Clear PR_SET_DUMPABLE of this process: its files in /proc become root's.

    Nothing happens where the C library cannot be called.
    """
    import ctypes  # takes milliseconds, and most jobs have no secret

    try:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, AttributeError):
        return
