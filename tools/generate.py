#!/usr/bin/env python3
"""Write everything in this repository that follows from the facts: `tools/generate.py`, or
`--check` to compare only.

- Tables of targets, versions, components, instance types and exit statuses, and the command line's
  help. Each stands between two marks in README.md or in a page of docs/.
- The table of instance types that `trainworks-preflight` reads.
- The JSON schemas of images/schema, by which editors check rows.
- Which later decisions change each decision of docs/adr.
- What AWS's pages describe, and where it is: docs/coverage.md, from tests/coverage.toml.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from coverage_table import page_markdown, read_table  # noqa: E402
from decisions import DecisionError, decision_pages  # noqa: E402
from row_schemas import schema_files  # noqa: E402
from trainworks import errors  # noqa: E402 - the path has to be set first
from trainworks.cli.commands import COMMANDS, grammar_of  # noqa: E402
from trainworks.facts.load import load  # noqa: E402
from trainworks.facts.ranges import PROPERTIES  # noqa: E402
from trainworks.facts.rows import Facts  # noqa: E402
from trainworks.inspect.listing import patches_until, summary_markdown  # noqa: E402
from trainworks.plan.resolve import make_plan  # noqa: E402
from trainworks.plan.select import request_for, sorted_rows, version_key  # noqa: E402
from trainworks.render.manifest import render_manifest  # noqa: E402

MARKED = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end of generated -->)", re.DOTALL)


PAGE = ("pytorch", "1.10.2", "cu113")
"""The image of SageMaker's page about smp: the row whose components' proofs
docs/tables/vendor.md lists.
"""


def components(facts: Facts) -> dict[str, str]:
    """Return the tables of components: what each is, where it comes from, and
    what an image without it lacks.
    """
    groups: dict[str, list[str]] = {"with": [], "without": [], "always": [], "vendor": []}
    for row in facts.components:
        when = "always" if row.required else "default" if row.default else "`--with`"
        if row.needs_cuda:
            when += ", CUDA only"
        if row.bases:
            when += f", {' and '.join(row.bases)} only"
        group = {"always": "always", "default": "without"}.get(when.partition(",")[0], "with")
        lines = groups["vendor" if row.sources == ("vendor",) else group]
        lines.append(f"| {row.name} | {row.summary} | {when} | {row.without or '-'} |\n")
    head = "| component | what | in an image | without it |\n|---|---|---|---|\n"
    return {f"components-{name}": head + "".join(lines) for name, lines in groups.items()}


def proved(facts: Facts) -> str:
    """Return each vendor's recipe, with its version in the image of SageMaker's
    page, and whether it was really run.
    """
    (page,) = (row for row in facts.targets if (row.framework, row.version, row.cuda) == PAGE)
    versions = {
        step.component: step.version for step in make_plan(request_for(page, facts), facts).steps
    }
    head = f"{PAGE[0]} {PAGE[1]}, `{PAGE[2]}`"
    lines = [f"| component | recipe | in {head} | run for real | by |", "|---|---|---|---|---|"]
    for row in facts.components:
        if row.sources == ("vendor",):
            tests = ", ".join(f"`{test}`" for test in row.proved_by) or "-"
            run = row.proved or "never: rendered only"
            lines.append(
                f"| {row.name} | {row.recipe_name} |"
                f" {versions.get(row.name) or '-'} | {run} | {tests} |"
            )
    return "\n".join(lines) + "\n"


AWS_OWN = ("smp", "smddp", "metis", "rmm", "efa-installer", "open-mpi")
"""What vendor targets are kept for: the columns of their table."""


def vendor_targets(facts: Facts) -> str:
    """Return the targets of vendor sources, and what they have of AWS's own parts."""
    lines = [f"| target | {' | '.join(AWS_OWN)} |", "|---|" + "---|" * len(AWS_OWN)]
    for row in sorted_rows(facts):
        if facts.sources_of(row) != "vendor":
            continue
        versions = {
            step.component: step.version for step in make_plan(request_for(row, facts), facts).steps
        }
        cells = " | ".join(versions.get(name, "-") for name in AWS_OWN)
        lines.append(f"| {row.framework} {row.version}, `{row.cuda}` | {cells} |")
    return "\n".join(lines) + "\n"


def drivers(facts: Facts) -> str:
    """Return the oldest NVIDIA driver that each major version of CUDA runs on,
    and the cells that have it.
    """
    cells: dict[str, list[str]] = {}
    for row in facts.cudas:
        if row.minimum_driver:
            cells.setdefault(row.minimum_driver, []).append(row.name)
    lines = ["| `--cuda` | NVIDIA driver at least |", "|---|---|"]
    return (
        "\n".join(
            [*lines, *(f"| {', '.join(names)} | {driver} |" for driver, names in cells.items())]
        )
        + "\n"
    )


def choice(facts: Facts) -> str:
    """Return what one chooses among: of each CUDA the framework's version, the
    driver, and the end of its patches.
    """
    lines = [
        "| `--cuda` | framework | NVIDIA driver at least | patches until |",
        "|---|---|---|---|",
    ]
    for row in sorted_rows(facts):
        if (
            facts.sources_of(row) == "packages"
            and facts.base_by_name[row.base].architecture == "amd64"
        ):
            driver = facts.cuda_by_name[row.cuda].minimum_driver or "-"
            lines.append(
                f"| `{row.cuda}` | {row.framework} {row.version} | {driver} |"
                f" {patches_until(row, facts)} |"
            )
    return "\n".join(dict.fromkeys(lines)) + "\n"


def instances(facts: Facts) -> str:
    """Return the instance types that the launcher knows."""
    lines = ["| instance type | GPUs | Neuron cores | EFA | RDMA |", "|---|---|---|---|---|"]
    for row in facts.instances:
        words = ["yes" if value else "-" for value in (row.efa, row.efa_rdma)]
        name = f"{row.name} ({row.architecture})" if row.architecture != "amd64" else row.name
        lines.append(f"| {name} | {row.gpus} | {row.neuron_cores} | {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Return a text for a cell of a table, which a bar would end."""
    return text.replace("|", "\\|")


def properties() -> str:
    """Return what rules can ask about every target."""
    lines = ["| property | what it is |", "|---|---|"]
    return (
        "\n".join([*lines, *(f"| `{name}` | {meaning} |" for name, meaning in PROPERTIES.items())])
        + "\n"
    )


def compatibility_rules(facts: Facts) -> str:
    """Return the compatibility rules: what each is about, what it requires, why, and its source."""

    def ranges(written: Mapping[str, str]) -> str:
        return ", ".join(f"{name} {allowed}" for name, allowed in written.items())

    lines = ["| rule | when | required | why | instead | source |", "|---|---|---|---|---|---|"]
    for rule in facts.rules:
        required = f"`{ranges(rule.require)}`" if rule.require else "not this"
        advised = " (advice)" if rule.severity == "advise" else ""
        cells = (
            rule.name + advised,
            f"`{ranges(rule.when)}`",
            required,
            rule.reason,
            rule.instead,
            rule.source,
        )
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(lines) + "\n"


def launcher_facts(facts: Facts) -> str:
    """Return what `trainworks-preflight` knows: instance types, the newest image.

    One row per line.
    """
    rows_of_packages = [
        row for row in facts.targets if row.framework == "pytorch" and not row.image
    ]
    newest = max(
        rows_of_packages,
        key=lambda row: (version_key(row.version), facts.cuda_by_name[row.cuda].version),
    )
    plan = make_plan(request_for(newest, facts), facts)
    manifest = json.loads(render_manifest(plan))
    image = {name: manifest[name] for name in ("schema", "name", "target", "components", "fabric")}
    image["programs"] = dict(plan.programs)
    instances = {
        row.name: {
            key: value for key, value in asdict(row).items() if key not in ("name", "source")
        }
        for row in facts.instances
    }
    rows = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in instances.items()
    )
    families = json.dumps([row.name for row in facts.families])
    return (
        "{\n"
        '  "generated": "by tools/generate.py from images/",\n'
        '  "instances": {\n'
        f"{rows}\n"
        "  },\n"
        f'  "families": {families},\n'
        f'  "image": {json.dumps(image)}\n'
        "}\n"
    )


def usage() -> str:
    """Return what each command does; its ``--help`` says the rest."""
    lines = ["| command | what it does |", "|---|---|"]
    lines += [
        f"| `python build.py {name} --help` | {grammar_of(name).summary} |" for name in COMMANDS
    ]
    return "\n".join(lines) + "\n"


def variables() -> str:
    """Return the environment variables and the settings that commands read."""
    sources = dict.fromkeys(source for name in COMMANDS for source in grammar_of(name).reads)
    lines = ["| name | meaning |", "|---|---|"]
    return (
        "\n".join([*lines, *(f"| `{source.name}` | {source.meaning} |" for source in sources)])
        + "\n"
    )


def evidence() -> str:
    """Return the newest record of each suite and machine in evidence/: those
    that git has, where this is a checkout.
    """
    folder = ROOT / "evidence"
    listed = subprocess.run(
        ("git", "ls-files", "evidence"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = (
        listed.stdout.split()
        if not listed.returncode
        else [f"evidence/{path.name}" for path in folder.glob("*.json")]
    )
    rows: dict[tuple[str, str], str] = {}
    for name in sorted(names):
        record = json.loads((ROOT / name).read_text(encoding="utf-8"))
        where = (
            ", ".join(record["where"].get("gpus", ()))
            or f"{record['where']['cores']} cores, no GPU"
        )
        if driver := record["where"].get("driver"):
            where += f", driver {driver}"
        counts = [part["tests"]["passed"] for part in record["parts"] if "tests" in part]
        failed = [part["name"] for part in record["parts"] if part["result"] == "failed"]
        result = f"failed: {', '.join(failed)}" if failed else "green"
        result += f", {sum(counts):,} tests" if counts else f", {len(record['parts'])} parts"
        commit = f"`{record['commit'][:8]}`" + (", with changes" if record["changed"] else "")
        cells = (
            f"[`{record['suite']}`](../{name})",
            record["date"],
            commit,
            where,
            result,
            f"{record['seconds'] // 60} min",
        )
        rows[record["suite"], where] = f"| {' | '.join(map(cell, cells))} |"
    head = "| what | date | commit | where | result | took |\n|---|---|---|---|---|---|\n"
    return (
        head + "".join(f"{row}\n" for row in rows.values()) if rows else "There is no record yet.\n"
    )


def exit_statuses() -> str:
    """Return what each exit status of build.py means, and which commands can end with it."""
    ends: dict[int, list[str]] = {}
    for name in COMMANDS:
        for status, _ in grammar_of(name).exit_statuses:
            ends.setdefault(status, []).append(f"`{name}`")
    lines = ["| status | meaning | commands |", "|---|---|---|"]
    for error in vars(errors).values():
        if not (
            isinstance(error, type)
            and issubclass(error, errors.TrainworksError)
            and "exit_status" in vars(error)
        ):
            continue
        commands = ends.get(error.exit_status, [])
        cells = "every command" if len(commands) == len(COMMANDS) else ", ".join(commands)
        lines.append(f"| {error.exit_status} | {error.meaning} | {cells} |")
    return "\n".join(lines) + "\n"


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Return a page with the text between marks of these names replaced.

    Tests write the other parts.
    """
    return MARKED.sub(lambda found: f"{found[1]}{parts.get(found[2], found[3])}{found[4]}", text)


def main() -> int:
    """Write, or with `--check` name what differs."""
    facts = load(ROOT)
    parts = {
        **components(facts),
        "choice": choice(facts),
        "drivers": drivers(facts),
        "vendor-targets": vendor_targets(facts),
        "proved": proved(facts),
        "summary": summary_markdown(facts),
        "instances": instances(facts),
        "properties": properties(),
        "compatibility-rules": compatibility_rules(facts),
        "usage": usage(),
        "variables": variables(),
        "exit-statuses": exit_statuses(),
        "evidence": evidence(),
        "coverage": page_markdown(
            read_table((ROOT / "tests" / "coverage.toml").read_text(encoding="utf-8"))
        ),
    }
    wanted = {
        path: filled(path.read_text(encoding="utf-8"), parts)
        for path in (
            ROOT / "README.md",
            *sorted((ROOT / "docs").glob("*.md")),
            *sorted((ROOT / "docs" / "tables").glob("*.md")),
        )
    }
    wanted[ROOT / "launcher" / "trainworks_preflight" / "facts.json"] = launcher_facts(facts)
    library = ROOT / "smdistributed" / "smdistributed" / "modelparallel" / "torch"
    wanted[ROOT / "launcher" / "trainworks_launcher" / "job" / "smp_parameters.json"] = (
        library / "job" / "parameters.json"
    ).read_text(encoding="utf-8")
    wanted |= {ROOT / "images" / "schema" / name: text for name, text in schema_files().items()}
    try:
        wanted |= decision_pages(ROOT)
    except DecisionError as error:
        sys.exit(str(error))
    stale = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is not what the facts say: run `make docs`",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
