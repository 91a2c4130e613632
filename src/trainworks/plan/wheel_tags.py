"""The tags of the wheels that a platform can load. Pure."""

from __future__ import annotations

from packaging.tags import Tag, compatible_tags, cpython_tags

_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""The older names of three levels of glibc 2."""


def wheel_tags(*, python: str, machine: str, glibc: str) -> list[Tag]:
    """Return the wheel tags that a platform can load, the best first.

    The order is that of ``packaging.tags.sys_tags``, which pip and uv have too. That function knows
    only the running machine, so the levels of the C library (PEP 600) are listed here.

    Args:
        python: Version of CPython, ``MAJOR.MINOR``.
        machine: ``x86_64`` or ``aarch64``.
        glibc: Version of the C library, ``MAJOR.MINOR``; ``""`` for another library.
    """
    platforms: list[str] = []
    if glibc:
        major, minor = (int(part) for part in glibc.split("."))
        for level in range(minor, 4, -1):
            platforms.append(f"manylinux_{major}_{level}_{machine}")
            if level in _LEGACY:
                platforms.append(f"{_LEGACY[level]}_{machine}")
    platforms.append(f"linux_{machine}")
    version = tuple(int(part) for part in python.split("."))
    interpreter = f"cp{python.replace('.', '')}"
    # The ABI is given: without it packaging asks whether the running Python is a debug or a
    # free-threaded build.
    native_tags = cpython_tags(version, [interpreter], platforms)
    return [*native_tags, *compatible_tags(version, interpreter, platforms)]
