"""Parsers of Python's packaging standards, from a library that the user's Python has.

pip carries them. An environment made by uv has no pip, and often the distribution ``packaging``.
"""

# mypy sees one of the two libraries, and which one depends on the Python that it runs with.
# mypy: disable-error-code="import-not-found,no-redef,assignment,unused-ignore"

from __future__ import annotations

try:
    from pip._vendor.packaging.markers import Marker
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.specifiers import SpecifierSet
    from pip._vendor.packaging.tags import sys_tags
    from pip._vendor.packaging.utils import parse_wheel_filename
    from pip._vendor.packaging.version import Version
except ImportError:
    from packaging.markers import Marker
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename
    from packaging.version import Version

try:
    import tomllib
except ImportError:  # before Python 3.11
    try:
        from pip._vendor import tomli as tomllib
    except ImportError:
        import tomli as tomllib

__all__ = [
    "Marker",
    "Requirement",
    "SpecifierSet",
    "Version",
    "parse_wheel_filename",
    "sys_tags",
    "tomllib",
]
