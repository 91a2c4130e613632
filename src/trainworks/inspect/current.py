"""Remember which recorded builds are of today's recipes: to know it, every target with a record is rendered.

What is remembered holds for exactly the files that decide it, by their content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainworks.facts.data import FOLDERS, data_folder
from trainworks.facts.rows import Built, Facts
from trainworks.host.cache import cache_folder, write_cached

PACKAGE = Path(__file__).resolve().parents[1]
CODE = ("facts", "plan", "render")
"""The folders of the package that make a Dockerfile of rows and recipes."""

LEFT_OUT = frozenset({"__pycache__", "schema"})


def remembered_builds(facts: Facts, root: Path, environment: Mapping[str, str]) -> Mapping[str, Built]:
    """Return the recorded builds whose inputs are today's, by the target's name.

    Args:
        facts: The facts of ``root``, as they were read.
        root: The checkout.
        environment: The process's environment, which says where caches lie. Without a cache only time is lost.
    """
    try:
        path = cache_folder(environment, "current-builds.json")
    except RuntimeError:
        path = None
    state = _state(root)
    if path:
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["state"] == state:
                return {name: facts.built_by_target[name] for name in known["current"]}
    from trainworks.render.builds import current_builds

    current = current_builds(facts)
    if path:
        with suppress(OSError):
            write_cached(path, json.dumps({"state": state, "current": list(current)}).encode())
    return current


def _state(root: Path) -> str:
    """Return the hash of every file that decides what is rendered, and of the records."""
    digest = hashlib.sha256()
    for folder in (*(data_folder(root, name) for name in FOLDERS), *(PACKAGE / name for name in CODE)):
        for path in sorted(folder.rglob("*")):
            if LEFT_OUT.isdisjoint(path.parts[len(folder.parts) :]) and path.is_file():
                content = path.read_bytes()
                head = f"\0{folder.name}/{path.relative_to(folder)}\0{path.stat().st_mode:o}\0{len(content)}\0"
                digest.update(head.encode() + content)
    return digest.hexdigest()
