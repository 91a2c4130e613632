"""Tags of the wheels that a base image can load. Pure."""

from __future__ import annotations

from packaging.tags import Tag, compatible_tags, cpython_tags

from trainworks.extend.requirements import ExtendedBase

_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""The older names of three levels of glibc 2."""


def tags_of(base: ExtendedBase) -> list[Tag]:
    """Return the tags of wheels that a base image can load, the best first, as pip orders them."""
    major, minor = (int(part) for part in base.version.split(".")[:2])
    platforms = []
    if base.glibc:
        newest = int(base.glibc.split(".")[1])
        for level in range(newest, 4, -1):
            platforms.append(f"manylinux_2_{level}_{base.machine}")
            if level in _LEGACY:
                platforms.append(f"{_LEGACY[level]}_{base.machine}")
    platforms.append(f"linux_{base.machine}")
    version = (major, minor)
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, interpreter=f"cp{major}{minor}", platforms=platforms),
    ]
