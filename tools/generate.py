#!/usr/bin/env python3
"""Write the files of this repository that follow from the facts; `--check` only compares them.

- Tables of targets, versions, builds, components, instance types and exit statuses, and the command
  line's help. Each stands between two marks in README.md or in a page of docs/.
- The table of instance types that `trainworks-preflight` reads.
- The JSON schemas of images/schema, by which editors check rows.
- In docs/adr, links from each decision to the later ones that change it.
- The items of AWS's pages and their places here: docs/coverage.md, from tests/coverage.toml.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tool_start import FileError, exit_status_of, use_environment

use_environment()

from coverage_table import page_markdown, read_table  # noqa: E402 - imported by the right Python
from decisions import decision_pages  # noqa: E402
from row_schemas import schema_files  # noqa: E402
from trainworks import errors  # noqa: E402
from trainworks.cli.commands import COMMANDS, grammar_of  # noqa: E402
from trainworks.facts.load import load  # noqa: E402
from trainworks.facts.rows import Component, Facts, TargetRow  # noqa: E402
from trainworks.inspect.listing import patches_until, render_summary  # noqa: E402
from trainworks.plan.model import Request  # noqa: E402
from trainworks.plan.resolve import make_plan  # noqa: E402
from trainworks.plan.select import (  # noqa: E402
    request_for,
    select_row,
    sorted_rows,
    version_key,
)
from trainworks.render.manifest import render_manifest  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

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
        for condition in conditions(row):
            when += f", {condition}"
        group = {"always": "always", "default": "without"}.get(when.partition(",")[0], "with")
        lines = groups["vendor" if row.sources == ("vendor",) else group]
        lines.append(f"| {row.name} | {row.summary} | {when} | {row.without or '-'} |\n")
    head = "| component | what | in an image | without it |\n|---|---|---|---|\n"
    return {f"components-{name}": head + "".join(lines) for name, lines in groups.items()}


def conditions(row: Component) -> list[str]:
    """Return the conditions of a component, such as ``["CUDA only", "pytorch only"]``."""
    words = []
    if row.needs_cuda:
        words.append("CUDA only")
    if row.frameworks:
        words.append(f"{' and '.join(row.frameworks)} only")
    if row.by_row:
        words.append("some targets only")
    if row.bases:
        words.append(f"{' and '.join(row.bases)} only")
    return words


def choices_of_with(facts: Facts) -> str:
    """Return a sentence with the components that ``--with`` adds to images of packages."""
    choices = []
    for row in facts.components:
        if row.required or row.default or row.sources == ("vendor",):
            continue
        note = ", ".join(conditions(row))
        choices.append(f"`{row.name}` ({note})" if note else f"`{row.name}`")
    return f"`--with` takes {', '.join(choices)}.\n"


def proved(facts: Facts) -> str:
    """Return each vendor's recipe, with its version in the image of SageMaker's
    page, and whether it was really run.
    """
    (page,) = [row for row in facts.targets if (row.framework, row.version, row.cuda) == PAGE]
    versions = component_versions(page, facts)
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


def component_versions(row: TargetRow, facts: Facts) -> dict[str, str]:
    """Return the versions of a target's components, by their names."""
    plan = make_plan(request_for(row, facts), facts)
    return {step.component: step.version for step in plan.steps}


AWS_OWN = ("smp", "smddp", "metis", "rmm", "efa-installer", "open-mpi")
"""What vendor targets are kept for: the columns of their table."""


def vendor_targets(facts: Facts) -> str:
    """Return the targets of vendor sources, and what they have of AWS's own parts."""
    lines = [f"| target | {' | '.join(AWS_OWN)} |", "|---|" + "---|" * len(AWS_OWN)]
    for row in sorted_rows(facts):
        if facts.sources_of(row) != "vendor":
            continue
        versions = component_versions(row, facts)
        cells = " | ".join(versions.get(name, "-") for name in AWS_OWN)
        lines.append(f"| {row.framework} {row.version}, `{row.cuda}` | {cells} |")
    return "\n".join(lines) + "\n"


def images(facts: Facts) -> str:
    """Return the last recorded build of each target: its commit, its id, and the digest of what
    was pushed.

    Nothing here is compared with today's recipe: each change of the launcher would change the page.
    """
    lines = [
        "| target | state | on | commit | size | id in the engine | digest in the registry |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted_rows(facts):
        name = facts.name_of(row)
        built = facts.built_by_target.get(name)
        if built is None:
            lines.append(f"| {name} | no build recorded | - | - | - | - | - |")
            continue
        cells = (
            name,
            "tested and pushed" if built.digest else "tested, not pushed",
            built.date,
            f"`{built.commit[:8]}`" if built.commit else "-",
            f"{built.megabytes:,} MB",
            f"`{built.image}`" if built.image else "-",
            f"`{built.digest}`" if built.digest else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
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
    lines += [f"| {', '.join(names)} | {driver} |" for driver, names in cells.items()]
    return "\n".join(lines) + "\n"


def choice(facts: Facts) -> str:
    """Return the choices of users: for each CUDA the framework's version, driver, last patch and
    last build, and below the table the command of the recommended target.

    Of several targets of one CUDA the row has the last build of the one that ``--cuda`` alone
    means.
    """
    recommended = recommended_target(facts)
    lines = [
        "| `--cuda` | framework | NVIDIA driver at least | patches until | last built |",
        "|---|---|---|---|---|",
    ]
    for row in targets_of_packages(facts):
        request = Request(framework=row.framework, cuda=row.cuda, version=row.version)
        name = facts.name_of(select_row(request, facts))
        cuda = f"`{row.cuda}`"
        if name == recommended:
            cuda += ", recommended"
        driver = facts.cuda_by_name[row.cuda].minimum_driver or "-"
        built = facts.built_by_target.get(name)
        day = built.date if built else "-"
        lines.append(
            f"| {cuda} | {row.framework} {row.version} | {driver} |"
            f" {patches_until(row, facts)} | {day} |"
        )
    table = "\n".join(dict.fromkeys(lines)) + "\n"
    return f"{table}\nRecommended, if your driver runs it: `python build.py {recommended}`.\n"


def recommended_target(facts: Facts) -> str:
    """Return the name of the target with the newest CUDA of those whose framework gets patches."""
    supported = [row for row in targets_of_packages(facts) if facts.end_of_patch(row) is None]
    newest = max(supported, key=lambda row: version_key(row.cuda.removeprefix("cu")))
    return facts.name_of(select_row(Request(framework=newest.framework, cuda=newest.cuda), facts))


def targets_of_packages(facts: Facts) -> list[TargetRow]:
    """Return the targets for x86-64 that are made of packages."""
    chosen = []
    for row in sorted_rows(facts):
        is_amd64 = facts.architecture_of(row) == "amd64"
        if is_amd64 and facts.sources_of(row) == "packages":
            chosen.append(row)
    return chosen


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


def launcher_facts(facts: Facts) -> str:
    """Return what `trainworks-preflight` knows: instance types, smp's second version, the newest
    image.

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
    keys = ("schema", "name", "target", "components", "fabric", "protected")
    image = {name: manifest[name] for name in keys}
    image["programs"] = dict(plan.programs)
    legacy = runpy.run_path(str(ROOT / "smdistributed" / "trainworks_smdistributed" / "legacy.py"))
    second_version = {
        "module": legacy["SECOND"],
        "what": legacy["SECOND_IS"],
        "instead": legacy["INSTEAD_OF_SECOND"],
    }
    instances = []
    for row in facts.instances:
        values = asdict(row)
        del values["name"], values["source"]
        instances.append(f"    {json.dumps(row.name)}: {json.dumps(values)}")
    rows = ",\n".join(instances)
    families = json.dumps([row.name for row in facts.families])
    return (
        "{\n"
        '  "generated": "by tools/generate.py from images/",\n'
        '  "instances": {\n'
        f"{rows}\n"
        "  },\n"
        f'  "families": {families},\n'
        f'  "second_version_of_smp": {json.dumps(second_version)},\n'
        f'  "image": {json.dumps(image)}\n'
        "}\n"
    )


def usage() -> str:
    """Return what each command does; its ``--help`` says the rest."""
    lines = ["| command | what it does |", "|---|---|"]
    lines += [
        f"| `python build.py {name} --help` | {grammar_of(name).manual.summary} |"
        for name in COMMANDS
    ]
    return "\n".join(lines) + "\n"


def variables() -> str:
    """Return the environment variables and the settings that commands read."""
    rows: dict[str, None] = {}
    for name in COMMANDS:
        for source in grammar_of(name).manual.reads:
            rows[f"| `{source.name}` | {source.meaning} |"] = None
    lines = ["| name | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


MOST_FAILURES = 3
"""The most failed tests that a row names; the record has more."""


def files_of_evidence() -> list[str]:
    """Return the paths of the files in evidence/, oldest first: in a checkout only those that git
    tracks.
    """
    tracked = subprocess.run(
        ("git", "ls-files", "evidence"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode == 0:
        return sorted(tracked.stdout.split())
    return sorted(f"evidence/{path.name}" for path in (ROOT / "evidence").iterdir())


def evidence() -> str:
    """Return the newest record of each suite and machine in evidence/, and beside a green one the
    newest that failed.

    Raises:
        FileError: A file is not a record.
    """
    files = files_of_evidence()
    newest: dict[tuple[str, str], str] = {}
    newest_failed: dict[tuple[str, str], str] = {}
    rows: dict[str, str] = {}
    for name in files:
        # Beside records there are lists of tests, signatures, and the keys of those who sign.
        if not name.endswith(".json"):
            continue
        try:
            record = json.loads((ROOT / name).read_text(encoding="utf-8"))
            suite_and_machine = record["suite"], machine_text(record["where"])
            has_failed = any(part["result"] == "failed" for part in record["parts"])
            rows[name] = evidence_row(name, record, files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"{name}: not a record of tools/evidence.py ({error!r}): restore it, for example"
                f" `git restore {name}`, or remove it"
            ) from error
        newest[suite_and_machine] = name
        if has_failed:
            newest_failed[suite_and_machine] = name
    if not rows:
        return "There is no record yet.\n"
    lines = ["| what | date | commit | where | result | took |", "|---|---|---|---|---|---|"]
    for suite_and_machine, name in newest.items():
        lines.append(rows[name])
        failed = newest_failed.get(suite_and_machine, name)
        if failed != name:
            lines.append(rows[failed])
    return "\n".join(lines) + "\n"


def evidence_row(name: str, record: Mapping[str, Any], files: Sequence[str]) -> str:
    """Return the row of a record.

    Args:
        name: Its path, ``evidence/STAMP-make-test.json``.
        record: Its content.
        files: The paths of all files in evidence/: the list of its tests may be one.
    """
    parts = record["parts"]
    counts = [part["tests"]["passed"] for part in parts if "tests" in part]
    count = f"{len(parts)} parts"
    if counts:
        count = f"{sum(counts):,} tests"
    failures = [describe_failure(part) for part in parts if part["result"] == "failed"]
    result = "green"
    if failures:
        result = f"failed: {'; '.join(failures)}"
        count = f"{sum(counts):,} passed"
    tests = f"{name.removesuffix('.json')}.tests.gz"
    if tests in files:
        count = f"[{count}](../{tests})"
    not_tested = [part["name"] for part in parts if part["result"] == "not tested"]
    if not_tested:
        result += f", not tested: {', '.join(not_tested)}"
    commit = f"`{record['commit'][:8]}`"
    if record["changed"]:
        commit += ", with changes"
    cells = (
        f"[`{record['suite']}`](../{name})",
        record["date"],
        commit,
        machine_text(record["where"]),
        f"{result}, {count}",
        f"{record['seconds'] // 60} min",
    )
    return f"| {' | '.join(map(cell, cells))} |"


def describe_failure(part: Mapping[str, Any]) -> str:
    """Return the name of a part that failed, with the first of its failed tests, else its cause.

    For example ``what needs no engine (2 failed: `a.test_b`, `a.test_c`)``.
    """
    names = part.get("failures", [])
    if not names:
        return f"{part['name']} ({part['cause']})"
    words = ", ".join(f"`{name}`" for name in names[:MOST_FAILURES])
    number = part["tests"]["failed"]
    if number > MOST_FAILURES:
        words += ", ..."
    return f"{part['name']} ({number} failed: {words})"


def machine_text(machine: Mapping[str, Any]) -> str:
    """Return the words for a record's machine: ``NVIDIA H200, driver VERSION``."""
    text = ", ".join(machine.get("gpus", ())) or f"{machine['cores']} cores, no GPU"
    if driver := machine.get("driver"):
        text += f", driver {driver}"
    return text


def exit_statuses() -> str:
    """Return the meaning of each exit status of build.py, and the commands that have it."""
    ends: dict[int, list[str]] = {}
    for name in COMMANDS:
        for status, _ in grammar_of(name).manual.exit_statuses:
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

    Parts of other names stay: tests write them.
    """

    def replacement(part: re.Match[str]) -> str:
        begin, name, old, end = part.groups()
        return f"{begin}{parts.get(name, old)}{end}"

    return MARKED.sub(replacement, text)


def main() -> int:
    """Write the generated files, or with `--check` print those that differ.

    Raises:
        FileError: A page, a record or the table of coverage cannot be read.
        TrainworksError: The rows are wrong, or a lock does not fit its target.
    """
    facts = load(ROOT)
    coverage = (ROOT / "tests" / "coverage.toml").read_text(encoding="utf-8")
    parts = {
        **components(facts),
        "with": choices_of_with(facts),
        "choice": choice(facts),
        "drivers": drivers(facts),
        "images": images(facts),
        "vendor-targets": vendor_targets(facts),
        "proved": proved(facts),
        "summary": render_summary(facts),
        "instances": instances(facts),
        "usage": usage(),
        "variables": variables(),
        "exit-statuses": exit_statuses(),
        "evidence": evidence(),
        "coverage": page_markdown(read_table(coverage)),
    }
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "tables").glob("*.md")),
    ]
    texts = {path: filled(path.read_text(encoding="utf-8"), parts) for path in pages}

    launcher = ROOT / "launcher"
    texts[launcher / "trainworks_preflight" / "facts.json"] = launcher_facts(facts)
    library = ROOT / "smdistributed" / "smdistributed" / "modelparallel" / "torch"
    parameters = (library / "job" / "parameters.json").read_text(encoding="utf-8")
    texts[launcher / "trainworks_launcher" / "job" / "smp_parameters.json"] = parameters
    for name, schema in schema_files().items():
        texts[ROOT / "images" / "schema" / name] = schema
    texts |= decision_pages(ROOT)

    stale = []
    for path, text in texts.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is not what the facts say: run `make docs`",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(texts[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
