"""Isolates a container with programs of another maker; also the OCI runtime that buildah calls.

An image that is only inspected must not reach this machine: no network, no capability, no new
privileges, no process of others, no file to change but temporary ones, and limits of memory and
processes. Docker has an option for each. ``buildah run`` lacks some, so this file is its runtime:
the file changes the description of the container and starts the real runtime. The file is a
program of its own there, so it imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

TEMPORARY: Final = "/dev/trainworks"
"""The one folder that can be written to.

It is below ``/dev``, so that it hides no file of the image.
"""

ENVIRONMENT: Final = {"TMPDIR": TEMPORARY, "XDG_CACHE_HOME": f"{TEMPORARY}/cache"}

TEMPORARY_BYTES: Final = 1 << 30
"""Bytes of all temporary files."""

MEMORY_BYTES: Final = 6 << 30
"""Bytes of memory; the temporary files count.

``import torch`` with CUDA takes 2 GB, and compiling a model as much again.
"""

MOST_PROCESSES: Final = 1024
"""The number of processes; threads count."""

OUTPUT_BYTES: Final = 128 << 20
"""Bytes that a command may print.

The list of all files of an image of 20 GB, with their digests, has 60 MB.
"""

NAMESPACES: Final = ("pid", "network", "ipc", "uts", "mount")
"""The kinds of namespaces that a container gets for itself."""


JOB_CAPABILITIES: Final = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "KILL",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
)
"""What a container's root may do to the files and users of its own container; sshd needs it."""


def isolated(description: dict[str, Any], *, job: bool) -> dict[str, Any]:
    """Close everything in the description of a container (OCI's config.json), and return it.

    Args:
        description: The parsed file, which is changed.
        job: Whether the container may change its own files and users.
    """
    description["root"]["readonly"] = not job
    process = description["process"]
    process["noNewPrivileges"] = True
    allowed = [f"CAP_{name}" for name in JOB_CAPABILITIES] if job else []
    capabilities = dict.fromkeys(("bounding", "effective", "permitted"), allowed)
    process["capabilities"] = {**capabilities, "inheritable": [], "ambient": []}
    if not job:
        # The image's volumes, and the files that name this container's host.
        for mount in description["mounts"]:
            if mount.get("type") == "bind":
                old_options = mount.get("options", ())
                options = [option for option in old_options if option not in ("rw", "ro")]
                mount["options"] = [*options, "ro"]
    description["mounts"].append(
        {
            "destination": TEMPORARY,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", "mode=1777", f"size={TEMPORARY_BYTES}"],
        }
    )
    linux = description["linux"]
    # Each namespace of ours is new: one with a path would be joined.
    namespaces = [row for row in linux.get("namespaces", ()) if row["type"] not in NAMESPACES]
    namespaces += [{"type": kind} for kind in NAMESPACES]
    linux["namespaces"] = namespaces
    resources = linux.setdefault("resources", {})
    resources["pids"] = {"limit": MOST_PROCESSES}
    resources["memory"] = {**(resources.get("memory") or {}), "limit": MEMORY_BYTES}
    return description


def environment_options(isolated: str) -> list[str]:
    """Return the options, the same for both engines, that tell programs where they can write.

    Args:
        isolated: As of ``Engine.container``; only an ``asked`` container is told.
    """
    values = ENVIRONMENT if isolated == "asked" else {}
    return [f"--env={name}={value}" for name, value in values.items()]


def docker_options(isolated: str) -> list[str]:
    """Return the options of ``docker run`` with the same meaning.

    Volumes of the image stay writable.

    Args:
        isolated: As of ``Engine.container``.
    """
    if not isolated:
        return []
    options = [
        "--network=none",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--no-healthcheck",
    ]
    options += [f"--pids-limit={MOST_PROCESSES}", f"--memory={MEMORY_BYTES}"]
    if isolated == "job":
        return [*options, *(f"--cap-add={name}" for name in JOB_CAPABILITIES)]
    options += [
        "--read-only",
        f"--tmpfs={TEMPORARY}:exec,nosuid,nodev,mode=1777,size={TEMPORARY_BYTES}",
    ]
    return [*options, *environment_options(isolated)]


def main(words: list[str]) -> None:
    """Isolate the container that a runtime's command creates, and become the runtime.

    The container's ``config.json`` is changed. This process does not return.

    Args:
        words: The kind of isolation (``asked`` or ``job``), the runtime's path, and the arguments
            of its ``create``.
    """
    kind, runtime, *arguments = words
    file = Path(arguments[arguments.index("--bundle") + 1], "config.json")
    description = json.loads(file.read_text(encoding="utf-8"))
    changed = isolated(description, job=kind == "job")
    file.write_text(json.dumps(changed), encoding="utf-8")
    os.execv(runtime, [runtime, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
