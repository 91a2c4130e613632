"""The image's environment for what does not inherit it: login shells and ssh sessions.

A container's own process has the variables of ENV. ``/etc/profile`` sets PATH anew for each login
shell, and sshd starts a session with its own environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from trainworks.plan.resolve import CUDA_ENVIRONMENT


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold for every container of an image.

    Those by which a container asks the NVIDIA runtime for devices are left out:
    what it was given, it has.
    """
    return {name: value for name, value in environment.items() if name not in CUDA_ENVIRONMENT}


def render_profile(environment: Mapping[str, str]) -> str:
    """Return the script for ``/etc/profile.d``: PATH as the image has it, the
    rest if it is not set.
    """
    lines = ["# The image's environment, for login shells. Written by trainworks."]
    for name, value in lasting(environment).items():
        if name == "PATH":
            lines.append(f"export PATH={shlex.quote(value)}")
        else:
            lines.append(f'[ -n "${{{name}+set}}" ] || export {name}={shlex.quote(value)}')
    return "\n".join(lines) + "\n"


def render_sshd(environment: Mapping[str, str]) -> str:
    """Return the lines for ``/etc/ssh/sshd_config.d``.

    Sshd takes one ``SetEnv`` with all variables.
    """
    pairs = " ".join(
        '"' + f"{name}={value}".replace("\\", "\\\\").replace('"', '\\"') + '"'
        for name, value in lasting(environment).items()
    )
    return f"# The image's environment, for ssh sessions. Written by trainworks.\nSetEnv {pairs}\n"
