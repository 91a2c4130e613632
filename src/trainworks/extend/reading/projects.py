"""``pyproject.toml`` as a requirements file: its dependencies, extras and groups (PEP 621, PEP 735). Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from packaging.dependency_groups import resolve_dependency_groups
from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as Specification
from packaging.utils import canonicalize_name

from trainworks.extend.reading.lines import RequirementLines, read_texts


def read_project(
    text: str, where: str, *, extras: Sequence[str] = (), groups: Sequence[str] = (), own: bool = True
) -> RequirementLines:
    """Read what a project file asks for.

    Args:
        text: Its content.
        where: Its name, for messages.
        extras: Extras of the project that are wanted.
        groups: Dependency groups that are wanted.
        own: Whether the project's own dependencies are wanted; without it, only the groups are.
    """
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return RequirementLines(problems=(f"{where}: this is not TOML: {error}",))
    problems: list[str] = []
    texts: list[tuple[str, str]] = []
    project = content.get("project", {})
    all_groups = content.get("dependency-groups", {})
    if own and not project and not groups:
        problems.append(f"{where}: it has no [project]{_advice(content, all_groups)}")
    of_extras, missing = _of_extras(project, extras, where)
    if own:
        dynamic = {"dependencies", *(["optional-dependencies"] if extras else [])} & set(project.get("dynamic", ()))
        advice = "give its folder as --source, or ./ in a requirements file"
        problems += [f"{where}: its {name} are dynamic: {advice}" for name in sorted(dynamic)]
        texts += [(f"{where} dependencies", line) for line in project.get("dependencies", ())]
        texts += of_extras
    if own or "optional-dependencies" not in project.get("dynamic", ()):
        problems += missing
    for group in groups:
        if canonicalize_name(group) not in {canonicalize_name(each) for each in all_groups}:
            problems.append(f"--group {group}: {where} does not have it{_known(all_groups)}")
            continue
        try:
            texts += [(f"{where} group {group}", line) for line in resolve_dependency_groups(all_groups, group)]
        except (ValueError, LookupError, TypeError, ExceptionGroup) as error:
            problems.append(f"{where} group {group}: {_first(error)}")
    read = read_texts(texts)
    sources = content.get("tool", {}).get("uv", {}).get("sources", {})
    named = {canonicalize_name(each) for each in sources} & {each.name for each in read.requirements}
    notes = [f"{where}: tool.uv.sources is not read ({', '.join(sorted(named))}): uv.lock has what uv takes"]
    return RequirementLines(
        requirements=read.requirements,
        sources=read.sources,
        folders=read.folders,
        notes=tuple(notes if named else ()),
        problems=(*problems, *read.problems),
    )


def _of_extras(project: dict[str, Any], extras: Sequence[str], where: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the lines of extras, and of those of the project itself that these name; and which there are not."""
    optional: dict[str, list[str]] = {
        canonicalize_name(name): lines for name, lines in project.get("optional-dependencies", {}).items()
    }
    texts: list[tuple[str, str]] = []
    missing: list[str] = []
    done: set[str] = set()
    waiting: list[str] = [canonicalize_name(each) for each in extras]
    while waiting:
        name = waiting.pop(0)
        if name in done:
            continue
        done.add(name)
        if name not in optional:
            missing.append(f"--extra {name}: {where} does not have it{_known(optional)}")
            continue
        for line in optional[name]:
            own = _own_extras(line, str(project.get("name", "")))
            waiting += own
            texts += [] if own else [(f"{where} extra {name}", line)]
    return texts, missing


def _own_extras(line: str, project: str) -> list[str]:
    """Return the extras that a line asks for of the project itself, such as ``mine[all]``."""
    try:
        wanted = Specification(line)
    except InvalidRequirement:
        return []
    same = project and canonicalize_name(wanted.name) == canonicalize_name(project)
    return sorted(map(canonicalize_name, wanted.extras)) if same else []


def _known(names: Iterable[str]) -> str:
    there = ", ".join(sorted(names))
    return f": it has {there}" if there else ": it has none"


def _advice(content: dict[str, Any], groups: Iterable[str]) -> str:
    if "poetry" in content.get("tool", {}):
        return ": `poetry export -o requirements.txt` (plug-in poetry-plugin-export) writes what pip reads"
    there = ", ".join(sorted(groups))
    return f": choose groups with --group ({there})" if there else " and no [dependency-groups]"


def _first(error: BaseException) -> str:
    if isinstance(error, ExceptionGroup):
        return _first(error.exceptions[0])
    return f"{type(error).__name__}: {error}"
