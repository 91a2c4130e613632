"""Reads ``images/`` and ``templates/`` into ``Facts``; the only file that knows pydantic, TOML and the folders.

Every problem of every file is reported at once, each with its file, row and key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from trainworks.errors import FactsError, OutputError
from trainworks.facts.rows import (
    Base,
    CheckRow,
    Component,
    Cuda,
    Facts,
    Instance,
    Lock,
    LockedPackage,
    Recipe,
    SourceFile,
    Stack,
    TargetRow,
)

Row = TypeVar("Row")

FRONT_MATTER = re.compile(r"\A\{#\n(?P<toml>.*?)#\}\n", re.DOTALL)
"""A recipe starts with one Jinja comment; its text is TOML."""

FRONT_MATTER_KEYS = ("environment", "programs", "check")

NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
DIGEST = re.compile(r"(sha256:[0-9a-f]{64})?\Z")
VERSION = re.compile(r"\d+(\.\d+)*([.+-]?[a-z0-9]+)*\Z")

PATTERNS: Mapping[type[Any], Mapping[str, tuple[re.Pattern[str], str]]] = {
    Base: {
        "name": (NAME, "lower-case letters, digits and dashes"),
        "digest": (DIGEST, "'sha256:' and 64 hexadecimal digits, or absent"),
        "python": (re.compile(r"3\.\d+\Z"), "MAJOR.MINOR, for example '3.11'"),
    },
    Cuda: {"name": (re.compile(r"(cpu|cu\d{3})\Z"), "'cpu' or 'cu' and three digits, for example 'cu121'")},
    Component: {"name": (NAME, "lower-case letters, digits and dashes")},
    TargetRow: {"version": (VERSION, "a version, for example '2.4.1'")},
    LockedPackage: {
        "sha256": (SHA256, "64 hexadecimal digits"),
        "version": (VERSION, "a version, for example '2.4.1'"),
    },
}
"""What a text must look like, by row type and key: the pattern, and how a person would say it."""


@cache
def _strict(row_type: type[Row]) -> TypeAdapter[Row]:
    return TypeAdapter(with_config(ConfigDict(extra="forbid", strict=True))(row_type))


class _Reader:
    """Reads files below one folder and collects every problem instead of stopping at the first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []

    def text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(f"{self.name(path)}: cannot be read: {error}")
            return ""

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def toml(self, path: Path) -> dict[str, Any]:
        return self.parse(self.text(path), self.name(path))

    def parse(self, text: str, where: str) -> dict[str, Any]:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            self.problems.append(f"{where}: not TOML: {error}")
            return {}

    def rows(self, row_type: type[Row], key: str, table: dict[str, Any], where: str, **more: object) -> list[Row]:
        """Validate the array ``key`` of a file; the file's own ``source`` holds for rows that have none."""
        adapter = _strict(row_type)
        found: list[Row] = []
        raw_rows = table.pop(key, [])
        inherited = {"source": table.pop("source")} if "source" in table else {}
        if not isinstance(raw_rows, list):
            self.problems.append(f"{where}: `{key}` must be written as [[{key}]] rows")
            raw_rows = []
        for extra in table:
            self.problems.append(f"{where}: unknown key '{extra}'; this file has [[{key}]] rows")
        for number, raw in enumerate(raw_rows, start=1):
            label = f"{where}: {key} {number}{_identity(raw)}"
            try:
                # Through JSON, because pydantic's strict mode takes arrays for tuples there and nothing else loosens.
                row = adapter.validate_json(json.dumps({**inherited, **more, **raw}, default=str))
            except ValidationError as error:
                self.problems.extend(f"{label}: {_explain(detail)}" for detail in error.errors())
                continue
            for name, (pattern, form) in PATTERNS.get(row_type, {}).items():
                value = getattr(row, name)
                if not pattern.match(value):
                    self.problems.append(f"{label}: key '{name}': {value!r} is not {form}")
            found.append(row)
        return found


def _identity(raw: object) -> str:
    if not isinstance(raw, dict):
        return ""
    parts = [f"{key} = {raw[key]!r}" for key in ("name", "version", "cuda", "base") if key in raw]
    return f" ({', '.join(parts)})" if parts else ""


def _explain(detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"key '{place}' is missing"
    if detail["type"] == "unexpected_keyword_argument":
        return f"unknown key '{place}'"
    return f"key '{place}': {detail['msg'][0].lower()}{detail['msg'][1:]}, got {detail['input']!r}"


def load(root: Path) -> Facts:
    """Read and validate all facts of a checkout.

    Args:
        root: The checkout: the folder with ``images``, ``templates`` and ``launcher``.

    Raises:
        FactsError: With every malformed row, dangling name and missing recipe, all at once.
        OutputError: When ``images`` is not there at all.
    """
    images, templates = root / "images", root / "templates"
    if not images.is_dir():
        raise OutputError(
            f"{images} is not a folder", hint="run from a checkout of trainworks, or name one with --root"
        )
    reader = _Reader(root)

    def table(name: str, row_type: type[Row], key: str) -> tuple[Row, ...]:
        return tuple(reader.rows(row_type, key, reader.toml(images / f"{name}.toml"), f"images/{name}.toml"))

    bases = table("bases", Base, "base")
    cudas = table("cuda", Cuda, "cuda")
    components = table("components", Component, "component")
    stacks = table("stacks", Stack, "stack")
    instances = table("instances", Instance, "instance")
    targets: list[TargetRow] = []
    fixed = {"bases", "cuda", "components", "stacks", "instances"}
    for path in sorted(images.glob("*.toml")):
        if path.stem not in fixed:
            content = reader.toml(path)
            framework = content.pop("framework", None)
            content.pop("summary", None)
            if framework != path.stem:
                reader.problems.append(f"images/{path.name}: key 'framework' must be {path.stem!r}, got {framework!r}")
            targets += reader.rows(TargetRow, "target", content, f"images/{path.name}", framework=path.stem)
    facts = Facts(
        bases=bases,
        cudas=cudas,
        components=components,
        stacks=stacks,
        instances=instances,
        targets=tuple(targets),
        recipes=_recipes(reader, templates),
        templates={path.name: reader.text(path) for path in sorted(templates.glob("*.j2"))},
        files=_files(root),
        locks=_locks(reader, images / "lock"),
    )
    _relate(facts, reader.problems)
    if reader.problems:
        raise FactsError(reader.problems)
    return facts


def _recipes(reader: _Reader, templates: Path) -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for path in sorted((templates / "components").glob("*.j2")):
        where, text = f"templates/components/{path.name}", reader.text(path)
        match = FRONT_MATTER.match(text)
        if match is None:
            reader.problems.append(f"{where}: must start with a front matter: {{#, lines of TOML, #}}")
            continue
        front = reader.parse(match["toml"], where)
        for key in front.keys() - set(FRONT_MATTER_KEYS):
            reader.problems.append(f"{where}: unknown key '{key}'; a front matter has {', '.join(FRONT_MATTER_KEYS)}")
        checks = [
            CheckRow(kind=str(raw.get("kind", "")), values={key: raw[key] for key in raw if key != "kind"})
            for raw in front.get("check", [])
        ]
        recipes[path.stem] = Recipe(
            name=path.stem,
            text=text,
            environment=front.get("environment", {}),
            programs=front.get("programs", {}),
            checks=tuple(checks),
        )
    return recipes


def _files(root: Path) -> tuple[SourceFile, ...]:
    """Read the files that recipes copy: ``templates/files`` and the launcher, at their places in a build context."""
    found: list[SourceFile] = []
    for folder, place in ((root / "templates" / "files", "files"), (root / "launcher", "launcher")):
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if path.is_file() and "__pycache__" not in relative.parts and ".egg-info" not in str(relative):
                # Git keeps one permission bit, executable or not; the rest depends on somebody's umask.
                mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                found.append(SourceFile(path=f"{place}/{relative.as_posix()}", content=path.read_bytes(), mode=mode))
    return tuple(found)


def _locks(reader: _Reader, folder: Path) -> dict[str, Lock]:
    locks: dict[str, Lock] = {}
    for path in sorted(folder.glob("*.toml")):
        packages = reader.rows(LockedPackage, "package", reader.toml(path), f"images/lock/{path.name}")
        locks[path.stem] = Lock(target=path.stem, packages=tuple(packages))
    return locks


def _relate(facts: Facts, problems: list[str]) -> None:
    """Check what no single row can say: unique names, names that point somewhere, rows and recipes in step."""
    for kind, names in (
        ("base", [row.name for row in facts.bases]),
        ("cuda", [row.name for row in facts.cudas]),
        ("component", [row.name for row in facts.components]),
        ("stack", [row.name for row in facts.stacks]),
        ("instance", [row.name for row in facts.instances]),
    ):
        problems.extend(f"images: {kind} {name!r} stands in two rows" for name in _repeated(names))
    known = set(facts.component_by_name)
    for component in facts.components:
        problems.extend(
            f"images/components.toml: component {component.name!r}: needs unknown {need!r}"
            for need in component.needs
            if need not in known
        )
        if not component.vendor and component.name not in facts.recipes:
            problems.append(f"templates/components/{component.name}.j2 is missing: the component has a row")
    problems.extend(
        f"templates/components/{name}.j2: no row of this name in images/components.toml"
        for name in sorted(set(facts.recipes) - known)
    )
    problems.extend(
        f"images/stacks.toml: stack {stack.name!r}: unknown component {name!r}"
        for stack in facts.stacks
        for name in stack.components
        if name not in known
    )
    target_names: list[str] = []
    for target in facts.targets:
        where = f"images/{target.framework}.toml: target {target.version} {target.cuda} {target.base}"
        broken = [
            f"{where}: key '{key}': no row {value!r} in {file}"
            for key, value, rows, file in (
                ("cuda", target.cuda, facts.cuda_by_name, "images/cuda.toml"),
                ("base", target.base, facts.base_by_name, "images/bases.toml"),
                ("stack", target.stack, facts.stack_by_name, "images/stacks.toml"),
            )
            if value not in rows
        ]
        broken += [
            f"{where}: key 'versions': unknown component {name!r}" for name in target.versions if name not in known
        ]
        problems.extend(broken)
        if not broken:
            target_names.append(facts.name_of(target))
    problems.extend(f"images: target {name} stands in two rows" for name in _repeated(target_names))
    if not problems:
        # A lock of a target that does not exist is a leftover; one that is missing is said when the target is planned.
        problems.extend(
            f"images/lock/{name}.toml: no target of this name" for name in sorted(set(facts.locks) - set(target_names))
        )


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each kind of row, by file name, for editors and for ``images/schema``."""
    files: Mapping[str, tuple[str, type[Any]]] = {
        "bases": ("base", Base),
        "cuda": ("cuda", Cuda),
        "components": ("component", Component),
        "stacks": ("stack", Stack),
        "instances": ("instance", Instance),
        "framework": ("target", TargetRow),
        "lock": ("package", LockedPackage),
    }
    return {name: {"row": key, **_strict(row_type).json_schema()} for name, (key, row_type) in files.items()}


def field_names(row_type: type[Any]) -> tuple[str, ...]:
    """Return the keys that a row of this type may have, in their order."""
    return tuple(field.name for field in fields(row_type))
