"""The pages that follow from ``images/``: targets, components, instance types, rules, the shapes of the files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from trainworks.facts.rows import Component, Facts, Rule, TargetRow
from trainworks.facts.schema import schemas
from trainworks.inspect.catalogue import Entry
from trainworks.inspect.listing import sorted_rows
from trainworks.lint.findings import SEVERITIES
from trainworks.lint.rules import RULES
from trainworks.plan.select import version_key
from trainworks.plan.target import context_of
from website.markdown import code, facts_list, link, prose, table

HERE = Path(__file__).resolve().parent

TARGETS = "reference/targets"
COMPONENTS = "reference/components.md"
INSTANCES = "reference/instances.md"
SCHEMAS = "reference/files.md"
CATALOGUE = "catalogue.html"


def target_pages(facts: Facts, entries: tuple[Entry, ...]) -> dict[str, str]:
    """Return a page for each target, and the one that lists them."""
    rows = {facts.name_of(row): row for row in facts.targets}
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"code": code, "prose": prose}
    template = environment.from_string((HERE / "target.md.j2").read_text(encoding="utf-8"))
    pages = {f"{TARGETS}/{entry.name}.md": _target(entry, rows[entry.name], template) for entry in entries}
    index = f"{TARGETS}/index.md"
    pages[index] = (
        "# Every target\n\n"
        f'{len(entries)} targets; <a href="../../{CATALOGUE}">the catalogue</a> has them with filters.\n\n'
        f"{target_table(entries, index)}"
    )
    return pages


def target_table(entries: tuple[Entry, ...], page: str) -> str:
    """Return a table of targets, each with a link to its page."""
    return table(
        ("target", "CUDA", "Python", "system", "sources", "built for real"),
        (
            (
                link(entry.name, f"{TARGETS}/{entry.name}.md", page),
                entry.cuda_version or entry.cuda,
                entry.python,
                entry.base,
                entry.sources,
                f"{entry.built.date}, {entry.built.megabytes:,} MB"
                if entry.built
                else f"from an older recipe, {entry.older}"
                if entry.older
                else "no",
            )
            for entry in entries
        ),
    )


def _target(entry: Entry, row: TargetRow, template: Template) -> str:
    page = f"{TARGETS}/{entry.name}.md"
    image = entry.tag.removeprefix("trainworks/").partition(":")[0]
    return template.render(
        entry=entry,
        source=row.source,
        catalogue=CATALOGUE,
        repository=f"ACCOUNT.dkr.ecr.REGION.amazonaws.com/{image}",
        link=lambda title, target, anchor="": link(title, target, page, anchor),
        component=lambda name: link(name, COMPONENTS, page, name),
    )


def component_page(facts: Facts) -> str:
    """Return the page with every component."""
    versions: dict[str, dict[str, list[str]]] = {}
    for target in sorted_rows(facts):
        for name, version in context_of(target, facts).versions.items():
            versions.setdefault(name, {}).setdefault(version, []).append(facts.name_of(target))
    sections = []
    for name, rows in groupby(sorted(facts.components, key=lambda row: row.name), key=lambda row: row.name):
        found = list(rows)
        sections.append(f"## {name}\n\n" + "\n".join(_component(row) for row in found))
        if name in versions:
            sections.append(
                table(
                    ("version", "in"),
                    (
                        (version, ", ".join(link(each, f"{TARGETS}/{each}.md", COMPONENTS) for each in targets))
                        for version, targets in sorted(versions[name].items(), key=lambda item: version_key(item[0]))
                    ),
                )
            )
    return (
        "# Components\n\nThe parts of images, each with a recipe of its own. Which rows a component can have says "
        f"{link('the shape of images/components.toml', SCHEMAS, COMPONENTS, 'componentstoml')}.\n\n"
        + "\n".join(sections)
    )


def _component(row: Component) -> str:
    where = (
        "in every image" if row.required else "in an image by default" if row.default else "in an image with `--with`"
    )
    limits = [
        *([f"with {' or '.join(row.frameworks)}"] if row.frameworks else []),
        *(["where there is CUDA"] if row.needs_cuda else []),
        *(["on Neuron"] if row.needs_neuron else []),
        *([f"with {row.sources[0]} sources only"] if len(row.sources) == 1 else []),
    ]
    rest = facts_list(
        (
            ("When", ", ".join(["only while building" if row.build_only else where, *limits])),
            ("Without it", prose(row.without)),
            ("Recipe", link(f"templates/components/{row.recipe_name}.j2",
                            f"templates/components/{row.recipe_name}.j2", COMPONENTS)),
            ("Python packages", ", ".join(map(code, row.python))),
            ("Debian packages", ", ".join(map(code, row.debian))),
            ("Run for real", prose(row.proved)),
            ("Source", prose(row.source)),
        )
    )  # fmt: skip
    return f"{prose(row.summary[:1].upper() + row.summary[1:])}.\n\n{rest}"


def instance_page(facts: Facts) -> str:
    """Return the page with the instance types, the families without accelerators, and the file systems."""

    def yes(value: object) -> str:
        return "yes" if value else "-"

    types = table(
        ("instance type", "GPUs", "Neuron cores", "memory", "EFA", "RDMA", "smddp"),
        (
            (
                code(row.name),
                str(row.gpus or "-"),
                str(row.neuron_cores or "-"),
                f"{row.memory_gib:,} GiB" if row.memory_gib else "",
                yes(row.efa),
                yes(row.efa_rdma),
                yes(row.smddp),
            )
            for row in facts.instances
        ),
    )
    storages = table(
        ("file system", "a step", "adds", "then in steps of", "source"),
        (
            (
                row.name,
                f"{row.step_gib:,} GiB",
                f"{row.step_megabytes_per_second} MB/s",
                f"{row.increment_gib:,} GiB",
                prose(row.source),
            )
            for row in facts.storages
        ),
    )
    variables = table(
        ("variable", "value", "on hosts with", "why", "source"),
        (
            (code(row.name), code(row.value), "RDMA" if row.rdma else "EFA", prose(row.why), prose(row.source))
            for row in facts.fabric
        ),
    )
    sources = {row.source: None for row in facts.instances} | {row.source: None for row in facts.families}
    return (
        "# Instance types\n\nWhat the launcher and its preflight know of a host where they cannot look at it. "
        f"A type is a row of {link('images/instances.toml', 'images/instances.toml', INSTANCES)}.\n\n{types}\n"
        f"Without accelerators, whatever their size: {', '.join(code(row.name) for row in facts.families)}.\n\n"
        f"Sources: {'; '.join(map(prose, sources))}.\n\n"
        f"## File systems\n\n{storages}\n## What hosts with EFA need\n\n{variables}"
    )


def rule_sections(facts: Facts) -> str:
    """Return the rules of compatibility, a section each."""
    return "\n".join(f"### {rule.name}\n\n{_rule(rule)}" for rule in facts.rules)


def _rule(rule: Rule) -> str:
    def ranges(written: Mapping[str, str]) -> str:
        return ", ".join(code(f"{name} {allowed}") for name, allowed in written.items())

    refuses = "is refused" if rule.severity == "refuse" else "is advised against"
    return facts_list(
        (
            ("When", ranges(rule.when)),
            ("Required", ranges(rule.require) or f"such a plan {refuses}"),
            ("Why", prose(rule.reason)),
            ("Instead", prose(rule.instead)),
            ("Advice only", "the image is built all the same" if rule.severity == "advise" else ""),
            ("Source", prose(rule.source)),
        )
    )


def lint_sections() -> str:
    """Return lint's rules, the severe ones first, a section each."""
    ordered = sorted(RULES, key=lambda rule: SEVERITIES.index(rule.severity))
    return "\n".join(
        f"### {rule.name}\n\n"
        + facts_list(
            (
                (rule.severity, prose(rule.summary)),
                ("Why", prose(rule.reason)),
                ("Instead", prose(rule.fix)),
            )
        )
        for rule in ordered
    )


# --- The files of images/ --------------------------------------------------------------------------------------------


MEANINGS = {"source": "where the fact comes from; a file may say it once, at its head"}
"""What holds for every row, and stands in no description of one."""


def schema_page() -> str:
    """Return the page with the shape of each kind of file in ``images``, from its JSON schema."""
    sections = []
    for name, schema in schemas().items():
        locked = name.startswith("lock")
        file = {"framework": "FRAMEWORK", "lock": "lock/TARGET"}.get(name, name)
        file = name.replace("lock-", "lock/") if name.startswith("lock-") else file
        key, rows = next((key, value) for key, value in schema["properties"].items() if value["type"] == "array")
        head = [each for each in schema["properties"] if each != key]
        said = f" At its head: {', '.join(map(code, head))}." if head else ""
        by = " Written by `build.py lock`, never by hand." if locked else ""
        raw = f"images/schema/{name}.json"
        sections.append(
            f"## {file}.toml\n\n{_shape(rows['items'])}\nEach row begins with {code(f'[[{key}]]')}.{said}{by} "
            f"For editors: {link(raw, raw, SCHEMAS)}.\n"
        )
        sections += [
            f"### {title}\n\n{_shape(definition)}" for title, definition in sorted(schema.get("$defs", {}).items())
        ]
    return (
        "# The files of images/\n\nEverything that can change from one release to the next is a row of a TOML file. "
        "`build.py schema` writes these shapes as JSON schemas, so that an editor checks a row while it is typed; "
        "every command checks all of them before it starts.\n\n" + "\n".join(sections)
    )


def _shape(row: Mapping[str, Any]) -> str:
    intro, meanings = _documented(row.get("description", ""))
    required = set(row.get("required", ()))
    rows = (
        (
            code(name),
            _type(value),
            "required" if name in required else code(str(value["default"])) if value.get("default") else "",
            prose(meanings.get(name) or value.get("description", MEANINGS.get(name, ""))),
        )
        for name, value in row["properties"].items()
    )
    return f"{intro}\n\n{table(('key', 'type', 'default', 'meaning'), rows)}"


def _type(value: Mapping[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(_type(each) for each in value["anyOf"] if each.get("type") != "null")
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "enum" in value:
        return " or ".join(map(code, value["enum"]))
    kind = str(value.get("type", "any"))
    if kind == "array":
        return f"list of {_type(value['items'])}"
    if kind == "object":
        return "table"
    return kind


def _documented(description: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring, and what its ``Attributes`` say of each name."""
    text, _, attributes = description.partition("\nAttributes:\n")
    meanings = {name: " ".join(words.split()) for name, words in _attributes(attributes)}
    return "\n\n".join(prose(" ".join(part.split())) for part in text.strip().split("\n\n")), meanings


def _attributes(text: str) -> Iterator[tuple[str, str]]:
    for entry in re.split(r"\n(?=    \w)", text.strip("\n")):
        name, colon, words = entry.strip().partition(":")
        if colon:
            yield name, words
