"""Reads ``images/`` and ``templates/`` into ``Facts``; the only file that knows pydantic, TOML and the folders.

Every problem of every file is reported at once, each with its file, row and key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from trainworks.errors import FactsError, OutputError
from trainworks.facts.ranges import SUBJECTS, problem_of, references
from trainworks.facts.rows import (
    Artifact,
    Base,
    BaseImage,
    Built,
    CheckRow,
    Component,
    Cuda,
    FabricVariable,
    Facts,
    Family,
    GeneratedFiles,
    Instance,
    Lock,
    LockedArtifact,
    LockedBaseImage,
    LockedPackage,
    PrivilegedFiles,
    Recipe,
    Rule,
    SourceFile,
    Stack,
    Storage,
    TargetRow,
)
from trainworks.facts.text import MAY_HOLD_CONTROL, UnreadableError, control_characters, parse_toml, read_text

Row = TypeVar("Row")

FRONT_MATTER = re.compile(r"\A\{#\n(?P<toml>.*?)#\}\n", re.DOTALL)
"""A recipe starts with one Jinja comment; its text is TOML."""


@dataclass(frozen=True, kw_only=True)
class FrontMatter:
    """What a front matter may say; the keys of a check depend on its kind, and ``plan`` looks at them."""

    environment: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    programs: Mapping[str, str] = field(default_factory=dict)
    owns: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    check: tuple[Mapping[str, Any], ...] = ()


FRONT_MATTER_PATTERNS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "path": (re.compile(r"/[A-Za-z0-9._/+-]+\Z"), "the absolute path of a folder"),
    "programs": (re.compile(r"/[A-Za-z0-9._/+-]+\Z"), "the absolute path of a program"),
    "owns": (re.compile(r"/\S+\Z"), "an absolute path, in which `*` may stand"),
    "imports": (re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z"), "the name of a Python module"),
}
"""What texts of a front matter must look like, by key, as in ``PATTERNS``."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
"""The name of an environment variable."""

NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
DIGEST = re.compile(r"(sha256:[0-9a-f]{64})?\Z")
OPTIONAL_SHA256 = re.compile(r"([0-9a-f]{64})?\Z")
COMMIT = re.compile(r"([0-9a-f]{40})?\Z")
FINGERPRINT = re.compile(r"([0-9A-F]{40})?\Z")
URL = re.compile(r"(https:/{2}\S+)?\Z")
VERSION = re.compile(r"\d+(\.\d+)*([.+-]?[a-z0-9]+)*\Z")
PYTHON = re.compile(r"3\.\d+\Z")
OPTIONAL_NAME = re.compile(r"([a-z0-9]+([.-][a-z0-9]+)*)?\Z")
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._/-]*(:[0-9]+/[A-Za-z0-9._/-]+)?(:[A-Za-z0-9_][A-Za-z0-9._-]*)?\Z")
OPTIONAL_IMAGE = re.compile(rf"({IMAGE.pattern.removesuffix(chr(92) + 'Z')})?\Z")
DIGITS = re.compile(r"\d+(\.\d+)*\Z")
OPTIONAL_DIGITS = re.compile(r"(\d+(\.\d+)*)?\Z")
RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~-]*\Z")
PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*\Z")
FLAG = re.compile(r"-{0,2}[A-Za-z0-9][A-Za-z0-9._=/:+-]*\Z")
BOUNDS = r"(<=|>=|==|!=|<|>)\d[A-Za-z0-9.+]*"
REQUIREMENT = re.compile(rf"[A-Za-z0-9{{][A-Za-z0-9._*{{}}-]*(\[[A-Za-z0-9._,-]+\])?({BOUNDS}(,{BOUNDS})*)?\Z")
DISTRIBUTION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!~-]*\Z")

_PACKAGES = (PACKAGE, "the name of a package of the distribution")
_IMAGE = (IMAGE, "an image's name, for example 'debian:bookworm-slim'")
_RELEASE = (RELEASE, "a version, for example '2.4.1'")
_REQUIREMENT = (REQUIREMENT, "the name of a Python distribution, with extras or a range such as <1.24 behind it")

PATTERNS: Mapping[type[Any], Mapping[str, tuple[re.Pattern[str], str]]] = {
    Base: {
        "name": (NAME, "lower-case letters, digits and dashes"),
        "suite": (NAME, "lower-case letters, digits and dashes"),
        "version": (DIGITS, "numbers and dots"),
        "glibc": (DIGITS, "numbers and dots"),
        "image": _IMAGE,
        "digest": (DIGEST, "'sha256:' and 64 hexadecimal digits, or absent"),
        "python": (PYTHON, "MAJOR.MINOR, for example '3.11'"),
        "pythons": (re.compile(r"/[A-Za-z0-9._/+-]+\Z"), "the absolute path of an interpreter"),
    },
    Built: {
        "inputs": (re.compile(r"sha256:[0-9a-f]{64}\Z"), "'sha256:' and 64 hexadecimal digits"),
        "date": (re.compile(r"\d{4}-\d\d-\d\d\Z"), "a day, for example '2026-11-22'"),
    },
    BaseImage: {"name": _IMAGE, "digest": (DIGEST, "'sha256:' and 64 hexadecimal digits, or absent")},
    Cuda: {
        "name": (
            re.compile(r"(cpu|neuron|cu\d{3})\Z"),
            "'cpu', 'neuron', or 'cu' and three digits, for example 'cu121'",
        ),
        "version": (OPTIONAL_DIGITS, "numbers and dots, or absent"),
        "wheel_suffix": (re.compile(r"(cu\d+)?\Z"), "'cu' and digits, or absent"),
        "architectures": (re.compile(r"\d+[a-z]?\Z"), "an architecture as nvcc names it, without the dot: '80'"),
    },
    Component: {
        "name": (NAME, "lower-case letters, digits and dashes"),
        "recipe": (OPTIONAL_NAME, "lower-case letters, digits and dashes, or absent"),
        "debian": _PACKAGES,
        "rpm": _PACKAGES,
        "build_debian": _PACKAGES,
        "build_rpm": _PACKAGES,
        "python": _REQUIREMENT,
        "python_cpu": _REQUIREMENT,
    },
    Stack: {"components": _RELEASE},
    Artifact: {
        "name": (NAME, "lower-case letters, digits and dashes"),
        "version": _RELEASE,
        "tag": (re.compile(r"([A-Za-z0-9][A-Za-z0-9._/+-]*)?\Z"), "the name of a git tag, or absent"),
        "flags": (FLAG, "one option or word, without blanks"),
        "provides": _RELEASE,
        "together": _RELEASE,
        "url": (URL, "an https:// URL, or absent"),
        "git": (URL, "an https:// URL, or absent"),
        "signature": (URL, "an https:// URL, or absent"),
        "key": (URL, "an https:// URL, or absent"),
        "sha256": (OPTIONAL_SHA256, "64 hexadecimal digits, or absent"),
        "commit": (COMMIT, "40 hexadecimal digits, or absent"),
        "fingerprint": (FINGERPRINT, "40 upper-case hexadecimal digits, or absent"),
    },
    Rule: {"name": (NAME, "lower-case letters, digits and dashes")},
    TargetRow: {
        "version": (VERSION, "a version, for example '2.4.1'"),
        "python": (re.compile(r"(3\.\d+)?\Z"), "MAJOR.MINOR, for example '3.11', or absent"),
        "versions": _RELEASE,
        "image": (OPTIONAL_IMAGE, f"{_IMAGE[1]}, or absent"),
        "builder_image": (OPTIONAL_IMAGE, f"{_IMAGE[1]}, or absent"),
        "wheel_index": (URL, "an https:// URL, or absent"),
        "limits": _REQUIREMENT,
    },
    LockedArtifact: {"sha256": (SHA256, "64 hexadecimal digits")},
    LockedBaseImage: {"name": _IMAGE, "digest": (DIGEST, "'sha256:' and 64 hexadecimal digits")},
    LockedPackage: {
        "name": (DISTRIBUTION, "a normalised name: lower-case letters, digits and dashes"),
        "file": (FILE, "the name of a file, without a folder"),
        "requires": (DISTRIBUTION, "a normalised name: lower-case letters, digits and dashes"),
        "sha256": (SHA256, "64 hexadecimal digits"),
        "version": (VERSION, "a version, for example '2.4.1'"),
    },
}
"""What a text must look like, by row type and key: the pattern, and how a person would say it.

Of a list it is each text that must, of a table each value. Everything that reaches a Dockerfile has a pattern.
"""


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
"""What pydantic made of each row type: making it takes longer than reading a file of such rows."""


def _strict(row_type: type[Row]) -> TypeAdapter[Row]:
    if row_type not in _ADAPTERS:
        _ADAPTERS[row_type] = TypeAdapter(with_config(ConfigDict(extra="forbid", strict=True))(row_type))
    return _ADAPTERS[row_type]


class _Reader:
    """Reads files below one folder and collects every problem instead of stopping at the first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self.unreadable: set[str] = set()
        """Files whose content is not known: what other files say about it can neither be right nor wrong."""
        self.malformed: set[tuple[str, str]] = set()
        """Kind and name of rows that are there and malformed: whoever names them is not to blame for it."""

    def text(self, path: Path) -> str:
        try:
            return read_text(path)
        except UnreadableError as error:
            self.problems.append(f"{self.name(path)}: {error}")
            self.unreadable.add(self.name(path))
            return ""

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def toml(self, path: Path) -> dict[str, Any]:
        return self.parse(self.text(path), self.name(path))

    def parse(self, text: str, where: str) -> dict[str, Any]:
        try:
            table = parse_toml(text)
        except UnreadableError as error:
            self.problems.append(f"{where}: {error}")
            self.unreadable.add(where)
            return {}
        if MAY_HOLD_CONTROL.search(text):
            # A check of a front matter goes into no Dockerfile, and a program in it may have several lines.
            texts = control_characters({key: value for key, value in table.items() if key != "check"})
            self.problems.extend(
                f"{where}: key '{place}': {value!r} has a control character (a line break, a tab, an escape)"
                for place, value in texts
            )
        return table

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
            if not isinstance(raw, dict):
                self.problems.append(f"{label}: must be a table of keys, got {raw!r}")
                continue
            if given := more.keys() & raw.keys():
                self.problems += [f"{label}: unknown key '{name}'; the file says it" for name in sorted(given)]
            try:
                # Through JSON, because pydantic's strict mode takes arrays for tuples there and nothing else loosens.
                text = json.dumps({**inherited, **raw, **more}, default=str)
            except (RecursionError, ValueError):
                self.problems.append(f"{label}: a value is nested too deeply, or a number has too many digits")
                continue
            try:
                row = adapter.validate_json(text)
            except ValidationError as error:
                self.problems.extend(f"{label}: {_explain(detail)}" for detail in error.errors())
                self.malformed.add((key, str(raw.get("name", ""))))
                continue
            self.match(row, PATTERNS.get(row_type, {}), label)
            self.problems.extend(
                f"{label}: key '{name}': {value} is negative"
                for name, value in raw.items()
                if isinstance(value, int) and value < 0
            )
            found.append(row)
        return found

    def match(self, row: object, patterns: Mapping[str, tuple[re.Pattern[str], str]], label: str) -> None:
        """Note each text of a row that does not look as it must."""
        for name, (pattern, form) in patterns.items():
            value = getattr(row, name)
            for text in (value,) if isinstance(value, str) else value.values() if isinstance(value, Mapping) else value:
                if not pattern.match(text):
                    self.problems.append(f"{label}: key '{name}': {_short(text)} is not {form}")


def _identity(raw: object) -> str:
    if not isinstance(raw, dict):
        return ""
    parts = [f"{key} = {_short(raw[key])}" for key in ("name", "version", "cuda", "base") if key in raw]
    return f" ({', '.join(parts)})" if parts else ""


def _explain(detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"key '{place}' is missing"
    if detail["type"] == "unexpected_keyword_argument":
        return f"unknown key '{place}'"
    return f"key '{place}': {detail['msg'][0].lower()}{detail['msg'][1:]}, got {_short(detail['input'])}"


def _short(value: object) -> str:
    """Return a value as Python writes it, without the end of a long one."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


LONGEST_VALUE = 200
"""Characters of a value that an error shows."""


NO_FRAMEWORKS = frozenset(
    {
        "artifacts",
        "base-images",
        "bases",
        "built",
        "compatibility",
        "components",
        "cuda",
        "fabric",
        "families",
        "generated-files",
        "instances",
        "privileged-files",
        "stacks",
        "storage",
    }
)
"""Files of ``images``; every other one is a framework's."""

BUILT = "built.toml"
"""File of ``images`` that ``build.py --record`` writes; a checkout in which nothing was built may lack it."""

LOCKED_ARTIFACTS = "artifacts.toml"
LOCKED_BASE_IMAGES = "base-images.toml"
"""Files of ``images/lock`` that all targets share; every other one is a target's."""


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
    base_images = table("base-images", BaseImage, "base_image")
    artifacts = table("artifacts", Artifact, "artifact")
    rules = table("compatibility", Rule, "rule")
    cudas = table("cuda", Cuda, "cuda")
    components = table("components", Component, "component")
    stacks = table("stacks", Stack, "stack")
    instances = table("instances", Instance, "instance")
    families = table("families", Family, "family")
    storages = table("storage", Storage, "storage")
    fabric = table("fabric", FabricVariable, "variable")
    generated_files = table("generated-files", GeneratedFiles, "generated")
    privileged_files = table("privileged-files", PrivilegedFiles, "privileged")
    built = table("built", Built, "built") if (images / BUILT).exists() else ()
    targets: list[TargetRow] = []
    for path in sorted(images.glob("*.toml")):
        if path.stem not in NO_FRAMEWORKS:
            content = reader.toml(path)
            framework = content.pop("framework", None)
            content.pop("summary", None)
            if framework != path.stem and f"images/{path.name}" not in reader.unreadable:
                reader.problems.append(f"images/{path.name}: key 'framework' must be {path.stem!r}, got {framework!r}")
            targets += reader.rows(TargetRow, "target", content, f"images/{path.name}", framework=path.stem)
    facts = Facts(
        bases=bases,
        base_images=base_images,
        cudas=cudas,
        artifacts=artifacts,
        rules=rules,
        components=components,
        stacks=stacks,
        instances=instances,
        families=families,
        storages=storages,
        fabric=fabric,
        generated_files=generated_files,
        privileged_files=privileged_files,
        targets=tuple(targets),
        built=built,
        recipes=_recipes(reader, templates),
        templates={path.name: reader.text(path) for path in sorted(templates.glob("*.j2"))},
        files=_files(root),
        locks=_locks(reader, images / "lock"),
        locked_artifacts=_locked(reader, images / "lock" / LOCKED_ARTIFACTS, LockedArtifact, "artifact"),
        locked_base_images=_locked(reader, images / "lock" / LOCKED_BASE_IMAGES, LockedBaseImage, "base_image"),
    )
    if not (root / "launcher").is_dir():
        reader.problems.append("launcher is not a folder: every image has the launcher in it")
    # Each row that names a row of an unreadable file would be blamed for it.
    if not any(name.count("/") == 1 for name in reader.unreadable):
        _relate(facts, reader.malformed, reader.problems)
    if reader.problems:
        raise FactsError(reader.problems)
    return facts


def _recipes(reader: _Reader, templates: Path) -> dict[str, Recipe]:
    recipes: dict[str, Recipe] = {}
    for path in sorted((templates / "components").glob("*.j2")):
        where, text = f"templates/components/{path.name}", reader.text(path)
        match = FRONT_MATTER.match(text)
        if match is None and where not in reader.unreadable:
            reader.problems.append(f"{where}: must start with a front matter: {{#, lines of TOML, #}}")
        front = reader.parse(match["toml"], where) if match else {}
        try:
            content = _strict(FrontMatter).validate_json(json.dumps(front, default=str))
        except ValidationError as error:
            reader.problems.extend(f"{where}: {_explain(detail)}" for detail in error.errors())
            content = FrontMatter()
        reader.match(content, FRONT_MATTER_PATTERNS, where)
        reader.problems.extend(
            f"{where}: key 'environment': {_short(name)} is not the name of a variable: letters, digits and underscores"
            for name in content.environment
            if not VARIABLE.match(name)
        )
        recipes[path.stem] = Recipe(
            name=path.stem,
            text=text,
            environment=content.environment,
            path=content.path,
            programs=content.programs,
            checks=tuple(
                CheckRow(
                    kind=str(raw.get("kind", "")),
                    values={key: raw[key] for key in raw if key not in ("kind", "beside")},
                    beside=str(raw.get("beside", "")),
                )
                for raw in content.check
            ),
            owns=content.owns,
            imports=content.imports,
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
        if path.name in {LOCKED_ARTIFACTS, LOCKED_BASE_IMAGES}:
            continue
        packages = reader.rows(LockedPackage, "package", reader.toml(path), f"images/lock/{path.name}")
        locks[path.stem] = Lock(target=path.stem, packages=tuple(packages))
    return locks


def _locked(reader: _Reader, path: Path, row_type: type[Row], key: str) -> tuple[Row, ...]:
    """Read a lock that all targets share; it may not be there yet."""
    if not os.path.lexists(path):
        return ()
    return tuple(reader.rows(row_type, key, reader.toml(path), f"images/lock/{path.name}"))


def _relate(facts: Facts, malformed: Set[tuple[str, str]], problems: list[str]) -> None:
    """Check what no single row can say: unique names, names that point somewhere, rows and recipes in step."""

    def names_of(kind: str, names: Iterable[str]) -> Set[str]:
        return {*names, *(name for malformed_kind, name in malformed if malformed_kind == kind)}

    for kind, names in (
        ("base", [row.name for row in facts.bases]),
        ("cuda", [row.name for row in facts.cudas]),
        ("base_image", [row.name for row in facts.base_images]),
        ("rule", [row.name for row in facts.rules]),
        ("component", [f"{row.name} ({source})" for row in facts.components for source in row.sources]),
        ("stack", [row.name for row in facts.stacks]),
        ("instance", [row.name for row in facts.instances]),
        ("family", [row.name for row in facts.families]),
        ("storage", [row.name for row in facts.storages]),
        ("variable", [row.name for row in facts.fabric]),
        ("generated", [row.name for row in facts.generated_files]),
        ("privileged", [row.package for row in facts.privileged_files]),
        ("built", [row.target for row in facts.built]),
    ):
        problems.extend(f"images: {kind} {name!r} stands in two rows" for name in _repeated(names))
    component_names = {component.name for component in facts.components}
    known = names_of("component", component_names)
    problems.extend(
        f"templates/components/{recipe.name}.j2: check {number}: beside unknown component {check.beside!r}"
        for recipe in facts.recipes.values()
        for number, check in enumerate(recipe.checks, start=1)
        if check.beside and check.beside not in known
    )
    recipes = {component.recipe_name for component in facts.components}
    for component in facts.components:
        problems.extend(
            f"images/components.toml: component {component.name!r}: {key} unknown {need!r}"
            for key, needs in (("needs", component.needs), ("builds_with", component.builds_with))
            for need in needs
            if need not in known
        )
        if circle := " -> ".join(_circle(component.name, facts.components)):
            problems.append(f"images/components.toml: component {component.name!r}: builds_with in a circle: {circle}")
        if component.recipe_name not in facts.recipes:
            problems.append(
                f"templates/components/{component.recipe_name}.j2 is missing: the component {component.name} has a row"
            )
    problems.extend(
        f"templates/components/{name}.j2: no row of this name in images/components.toml"
        for name in sorted(set(facts.recipes) - recipes - known)
    )
    _relate_artifacts(facts, problems)
    _relate_ranges(facts, known | names_of("artifact", [row.name for row in facts.artifacts]), problems)
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
                ("image", target.image, facts.base_image_by_name, "images/base-images.toml"),
                ("builder_image", target.builder_image, facts.base_image_by_name, "images/base-images.toml"),
            )
            if value and value not in names_of("base_image" if key.endswith("image") else key, rows)
        ]
        broken += [
            f"{where}: key 'versions': unknown component {name!r}" for name in target.versions if name not in known
        ]
        problems.extend(broken)
        # A malformed base is in its file, and has no Python to name the target by; nor has a stack its sources.
        if not broken and target.base in facts.base_by_name and target.stack in facts.stack_by_name:
            target_names.append(facts.name_of(target))
    problems.extend(f"images: target {name} stands in two rows" for name in _repeated(target_names))
    if len(target_names) == len(facts.targets) and not names_of("target", ()):
        # A lock of a target that does not exist is a leftover; one that is missing is said when the target is planned.
        problems.extend(
            f"images/lock/{name}.toml: no target of this name" for name in sorted(set(facts.locks) - set(target_names))
        )
    for name, lock in facts.locks.items():
        problems.extend(
            f"images/lock/{name}.toml: package {package!r} stands in two rows"
            # What is needed to build and what is installed are two sets: `setuptools` may well be in both.
            for package in _repeated(f"{package.name}{' (build)' * package.build}" for package in lock.packages)
        )


def _circle(name: str, components: Iterable[Component]) -> tuple[str, ...]:
    """Return the way from a component back to itself by ``builds_with``, ``()`` if there is none.

    Of the components of a circle only the first one by name has it: it is one problem.
    """
    builds_with: dict[str, tuple[str, ...]] = {}
    for component in components:
        builds_with[component.name] = (*builds_with.get(component.name, ()), *component.builds_with)
    ways: list[tuple[str, ...]] = [(name,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        for need in builds_with.get(way[-1], ()):
            if need == name:
                return (*way, name) if name == min(way) else ()
            if need not in seen:
                seen.add(need)
                ways.append((*way, need))
    return ()


def _relate_artifacts(facts: Facts, problems: list[str]) -> None:
    """Check that each artifact is one file or one commit, and that what it brings along has a row."""
    versions = {(row.name, row.version) for row in facts.artifacts}
    for row in facts.artifacts:
        where = f"images/artifacts.toml: artifact {row.name} {row.version}"
        if not FILE.match(row.file):
            problems.append(f"{where}: the file of its `url` is {_short(row.file)}, which is not the name of a file")
        if bool(row.url) == bool(row.git):
            problems.append(f"{where}: must have either `url` or `git`")
        if bool(row.git) != bool(row.commit):
            problems.append(f"{where}: `git` and `commit` belong together: a tag alone can be moved")
        if len({bool(row.signature), bool(row.key), bool(row.fingerprint)}) > 1:
            problems.append(f"{where}: `signature`, `key` and `fingerprint` belong together")
        problems.extend(
            f"{where}: key 'together': no artifact {name} {version}"
            for name, version in row.together.items()
            if (name, version) not in versions
        )


def _relate_ranges(facts: Facts, parts: Set[str], problems: list[str]) -> None:
    """Check that rules, artifacts and variables ask about what there is, in ranges that can be read."""
    provided = [row.provides for row in facts.artifacts] + [row.provides for row in facts.base_images]
    versions = {*parts, *(name for each in provided for name in each)}
    known = {*SUBJECTS, *versions, *(row.framework for row in facts.targets)}
    known |= {f"{name}.{kind}" for name in versions for kind in ("build", "flags")}
    ranges = [
        (f"images/compatibility.toml: rule {row.name!r}: key '{key}'", written)
        for row in facts.rules
        for key, written in (("when", row.when), ("require", row.require))
    ]
    ranges += [
        (f"images/artifacts.toml: artifact {row.name} {row.version}: key 'requires'", row.requires)
        for row in facts.artifacts
    ]
    ranges += [(f"images/fabric.toml: variable {row.name!r}: key 'when'", row.when) for row in facts.fabric]
    for where, written in ranges:
        for name, allowed in written.items():
            for asked in (name, *references(allowed)):
                if asked not in known:
                    near = get_close_matches(asked, sorted(known), n=1)
                    advice = f"; did you mean {near[0]}?" if near else ""
                    problems.append(f"{where}: unknown subject {asked!r}{advice}")
            if problem := problem_of(allowed):
                problems.append(f"{where}: {name}: {problem}")
    problems.extend(
        f"images/compatibility.toml: rule {row.name!r}: key 'when' is empty: it must say which plans it speaks about"
        for row in facts.rules
        if not row.when
    )


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})  # type: ignore[func-returns-value]


def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each kind of file in ``images``, by name, for editors: ``images/schema/NAME.json``."""
    files: Mapping[str, tuple[str, type[Any]]] = {
        "artifacts": ("artifact", Artifact),
        "base-images": ("base_image", BaseImage),
        "built": ("built", Built),
        "bases": ("base", Base),
        "compatibility": ("rule", Rule),
        "cuda": ("cuda", Cuda),
        "components": ("component", Component),
        "stacks": ("stack", Stack),
        "instances": ("instance", Instance),
        "families": ("family", Family),
        "storage": ("storage", Storage),
        "fabric": ("variable", FabricVariable),
        "generated-files": ("generated", GeneratedFiles),
        "privileged-files": ("privileged", PrivilegedFiles),
        "framework": ("target", TargetRow),
        "lock": ("package", LockedPackage),
        "lock-artifacts": ("artifact", LockedArtifact),
        "lock-base-images": ("base_image", LockedBaseImage),
    }
    return {name: _schema(name, key, row_type) for name, (key, row_type) in files.items()}


def _schema(name: str, key: str, row_type: type[Any]) -> dict[str, Any]:
    row = _strict(row_type).json_schema()
    definitions = row.pop("$defs", {})
    # A file may say once, at its head, where all its rows come from; and what framework its rows are of.
    head = {"source"} if "source" in row["properties"] else set()
    if name == "framework":
        del row["properties"]["framework"]
        row["required"].remove("framework")
        head |= {"framework", "summary"}
    row["required"] = [required for required in row["required"] if required != "source"]
    for column, (pattern, form) in PATTERNS.get(row_type, {}).items():
        text = row["properties"][column]
        while text["type"] != "string":
            text = text["items" if text["type"] == "array" else "additionalProperties"]
        text |= {"pattern": f"^{pattern.pattern.replace(chr(92) + 'Z', '$')}", "description": form}
    for text in row["properties"].values():
        if text.get("type") == "integer":
            text["minimum"] = 0
    return {
        "$schema": SCHEMA_DIALECT,
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{column: {"type": "string"} for column in sorted(head)},
            key: {"type": "array", "items": row},
        },
        **({"$defs": definitions} if definitions else {}),
    }


SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""What pydantic writes; editors look at it to know the keywords."""
