"""Writes the image's environment for login shells and ssh sessions, which do not inherit it.

A container's own process has the variables of ENV. ``/etc/profile`` sets PATH anew for each login
shell, and sshd starts a session with its own environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from trainworks.plan.resolve import DEVICE_ENVIRONMENT


def select_lasting_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold for every container of an image.

    Variables that request devices from the NVIDIA runtime are left out: they count only when a
    container starts.
    """
    return {name: value for name, value in environment.items() if name not in DEVICE_ENVIRONMENT}


def render_profile(environment: Mapping[str, str]) -> str:
    """Return the script for ``/etc/profile.d``: it sets PATH, and variables that are not set."""
    lines = ["# The image's environment, for login shells. Written by trainworks."]
    for name, value in select_lasting_variables(environment).items():
        # ``/etc/profile`` has set another PATH already; other variables of a user stay.
        if name == "PATH":
            lines.append(f"export PATH={shlex.quote(value)}")
        else:
            lines.append(f'[ -n "${{{name}+set}}" ] || export {name}={shlex.quote(value)}')
    return "\n".join(lines) + "\n"


def render_sshd(environment: Mapping[str, str]) -> str:
    """Return the lines for ``/etc/ssh/sshd_config.d``.

    Sshd takes one ``SetEnv`` with all variables.
    """
    pairs = []
    for name, value in select_lasting_variables(environment).items():
        # sshd_config has quotes around a pair, and a backslash before a quote.
        escaped = f"{name}={value}".replace("\\", "\\\\").replace('"', '\\"')
        pairs.append(f'"{escaped}"')
    head = "# The image's environment, for ssh sessions. Written by trainworks."
    return f"{head}\nSetEnv {' '.join(pairs)}\n"
