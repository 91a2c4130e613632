"""Check a job on a laptop, before you pay for a cluster.

The platform's files are written to a temporary folder, and read by the launcher's own reader. The
hosts' devices come from the instance table. Then ``make_job`` and ``plan_host`` run as in a
container. The training script is not read, and no property of this machine counts.
"""

from __future__ import annotations

import json
import shlex
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.command.options import Parsed, value_of
from trainworks_launcher.command.rank_map import rank_map
from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.json_values import NOTHING, Json, readable
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment.directories import Results
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import (
    PROGRAMS,
    Devices,
    Environment,
    read_environment,
)
from trainworks_launcher.environment.manifest import Instance, Manifest
from trainworks_launcher.job.job import Job, describe, make_job
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import NodePlan
from trainworks_preflight.advice import Advice, advise
from trainworks_preflight.distribution import Group, Translation, translate
from trainworks_preflight.facts import Facts, InstanceFacts
from trainworks_preflight.inputs import Inputs
from trainworks_preflight.tips import Tip, tips_for

_COMPONENT_OF: Mapping[str, str] = MappingProxyType(
    {"pytorch": "torch", "tensorflow": "tensorflow", "mxnet": "mxnet"}
)
_ASSUMED = ("cuda", "torch_xla", "mpi4py", names.OPEN_MPI, "smp", "smddp")
"""Components that every image is assumed to have, without a manifest."""


class Result(NamedTuple):
    """The result of a preflight.

    Attributes:
        problems: Reasons for which the job would not start.
        warnings: One sentence each.
        hyperparameters: Hyperparameters of the job, by the SDK's rules.
        job: The leader's job; None if the job has problems.
        plans: Plans of the leader and of one worker of each kind.
        advice: Advice for a better job.
        tips: Tips for a job of this kind.
        assumption: Assumption about the image; ``""`` for a result without plans.
    """

    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    hyperparameters: Mapping[str, Json] = NOTHING
    job: Job | None = None
    plans: tuple[NodePlan, ...] = ()
    advice: tuple[Advice, ...] = ()
    tips: tuple[Tip, ...] = ()
    assumption: str = ""


def preflight(parsed: Parsed, width: int) -> tuple[int, str]:
    """Run a preflight.

    Args:
        parsed: The command line.
        width: Columns of the terminal.

    Returns:
        The exit status (0: the job would start, 64: it has problems), and the text to print.
    """
    result = check(parsed)
    status = names.EXIT_NOT_STARTED if result.problems else 0
    redactor = None if "--show-secrets" in parsed else Redactor(result.hyperparameters)
    if value_of(parsed, "--format", "text") == "json":
        return status, _as_json(result, redactor)
    return status, _as_text(result, redactor, width)


def check(parsed: Parsed) -> Result:
    """Check a job, without printing."""
    inputs = Inputs(parsed)
    groups = inputs.groups()
    folder, entry = inputs.entry()
    user = inputs.value("--hyperparameters")
    if not isinstance(user, dict):
        inputs.problems.append(
            Problem("is not a dict", "option --hyperparameters", 'for example {"epochs": 3}')
        )
        user = {}
    framework = value_of(parsed, "--framework", "pytorch")
    translation = translate(inputs.distribution(), groups, framework)
    usable = not inputs.problems and bool(groups)
    problems = [*inputs.problems, *translation.problems]
    if not usable:
        return Result(
            problems=tuple(problems),
            warnings=(*dict.fromkeys(inputs.warnings), *translation.warnings),
        )
    sent = {**user, **translation.hyperparameters}
    files = _Files(folder, entry, sent, inputs.facts)
    environment = _environment(parsed, groups, files)
    problems += _check_architecture(environment.manifest, groups, inputs.facts)
    result = _plan(environment, groups, inputs.facts, translation)
    assumption = (
        "no --image-manifest is given: the image is assumed to have every program and"
        f" library; paths and versions are those of {inputs.facts.image.name}"
    )
    if "--image-manifest" in parsed:
        assumption = (
            f"image {environment.manifest.name!r}, by its manifest;"
            " instance types by preflight's table"
        )
    warnings = (*inputs.warnings, *_sizes(sent), *result.warnings)
    return result._replace(
        problems=(*problems, *result.problems),
        warnings=tuple(dict.fromkeys(warnings)),
        hyperparameters=sent,
        assumption=assumption,
    )


def _check_architecture(manifest: Manifest, groups: Sequence[Group], facts: Facts) -> list[Problem]:
    """Return a problem for each instance type with other processors than the image's."""
    problems = []
    for name in dict.fromkeys(group.instance_type for group in groups):
        row = facts.find(name)
        if row is None or row.architecture == manifest.architecture:
            continue
        text = f"{name} has {row.architecture} processors, and the image is for"
        advice = (
            f"take an image for {row.architecture} (its --image-manifest says so),"
            " or another instance type"
        )
        problems.append(
            Problem(f"{text} {manifest.architecture}", "option --instance-type", advice)
        )
    return problems


def _sizes(sent: Mapping[str, Json]) -> tuple[str, ...]:
    """Warn of hyperparameters that the platform refuses for their number or their length."""
    warnings: list[str] = []
    if len(sent) + _SDK_OWN > names.HYPERPARAMETERS_LIMIT:
        text = f"{len(sent)} hyperparameters, and {_SDK_OWN} of the SDK's own: the platform takes"
        warnings.append(
            f"{text} {names.HYPERPARAMETERS_LIMIT};"
            " put them into a file of the source directory or a channel"
        )
    for name, value in sent.items():
        length = len(json.dumps(value))
        if length > names.HYPERPARAMETER_LENGTH_LIMIT:
            text = f"hyperparameter {name} has {length:,} characters, the platform takes"
            warnings.append(f"{text} {names.HYPERPARAMETER_LENGTH_LIMIT:,}; put it into a file")
    return tuple(warnings)


_SDK_OWN = 5
"""Hyperparameters that the SDK adds to every job: program, submit directory, log level, job name,
region.
"""


def _plan(
    environment: Environment, groups: Sequence[Group], facts: Facts, translation: Translation
) -> Result:
    """Plan the leader and one worker of each kind, and find advice; or return the refusal."""
    try:
        job = make_job(environment)
        job = make_job(environment, job.placement.leader)
        leader = job.placement.leader
        first_of_groups = [members[0] for members in _host_names(groups)]
        hosts = [leader, *job.placement.distribution_hosts[1:2], *first_of_groups]
        plans = tuple(plan_host(make_job(environment, host)) for host in dict.fromkeys(hosts))
    except RefusalError as refusal:
        return Result(problems=refusal.problems, warnings=translation.warnings)
    row = _row(facts, environment.manifest, job.placement.instance_type)
    warnings = [text for plan in plans for text in plan.warnings]
    return Result(
        warnings=(*translation.warnings, *dict.fromkeys(warnings)),
        job=job,
        plans=plans,
        advice=tuple(advise(job, row, facts)),
        tips=tuple(tips_for(job, row)),
    )


def _host_names(groups: Sequence[Group]) -> tuple[tuple[str, ...], ...]:
    """Return the hosts of each group, numbered through as the platform does."""
    names_of_groups = []
    first = 1
    for group in groups:
        numbers = range(first, first + group.count)
        names_of_groups.append(tuple(f"algo-{number}" for number in numbers))
        first += group.count
    return tuple(names_of_groups)


def _row(facts: Facts, manifest: Manifest, instance_type: str) -> InstanceFacts:
    """Return the facts of an instance type; the row of the image's manifest counts first."""
    row = facts.find(instance_type) or InstanceFacts(Instance())
    return replace(row, instance=manifest.instances.get(instance_type, row.instance))


class _Files(NamedTuple):
    """The contents of the platform's files.

    Attributes:
        folder: The code directory.
        entry: The entry point in it.
        sent: The hyperparameters.
        facts: The instance table.
    """

    folder: Path
    entry: str
    sent: Mapping[str, Json]
    facts: Facts


def _environment(parsed: Parsed, groups: Sequence[Group], files: _Files) -> Environment:
    """Make the environment of the first host: files by the launcher's own reader, devices from the
    table.
    """
    with tempfile.TemporaryDirectory(prefix="trainworks-preflight-") as base:
        _write_files(Path(base), groups, files, whole_folder="--source-dir" in parsed)
        # The PATH has no programs, so that none of this machine counts.
        variables = {names.BASE_DIRECTORY_VARIABLE: base, "PATH": base}
        if "--image-manifest" in parsed:
            variables[names.IMAGE_MANIFEST_VARIABLE] = value_of(parsed, "--image-manifest")
        read = read_environment(variables)
        code = Code(
            directory=f"{names.BASE_DIRECTORY}/{names.CODE_DIRECTORY}",
            entries=read.code.entries,
            executable=read.code.executable,
        )
    facts = files.facts
    manifest, programs = _image(parsed, read.manifest, facts)
    families = tuple(dict.fromkeys((*manifest.families, *facts.families)))
    first = _row(facts, manifest, groups[0].instance_type).instance
    instances = {name: row.instance for name, row in facts.instances.items()}
    instances.update(manifest.instances)
    return read._replace(
        base_directory=names.BASE_DIRECTORY,
        variables=MappingProxyType({"PATH": "/usr/local/bin:/usr/bin:/bin"}),
        hosts=read.hosts.with_interface(names.INTERFACE),
        manifest=manifest._replace(instances=MappingProxyType(instances), families=families),
        devices=Devices(gpus=first.gpus, neuron_devices=min(first.neuron_cores, 1), efa=None),
        code=code,
        hostname=_host_names(groups)[0][0],
        programs=programs,
        launcher_python="/usr/bin/python3",
        launcher_directory="/opt/trainworks/lib/trainworks_launcher",
        home="",
        results=Results({}, {}),
        warnings=(),
    )


def _write_files(root: Path, groups: Sequence[Group], files: _Files, *, whole_folder: bool) -> None:
    """Write the platform's files and the code.

    Args:
        root: The base directory.
        groups: The cluster.
        files: The contents.
        whole_folder: Whether the job has the whole code directory, not the entry point alone.
    """
    # The SDK encodes each value; the program's name is a setting of the job.
    encoded: dict[str, Json] = {}
    for name, value in {**files.sent, names.PROGRAM: files.entry}.items():
        encoded[name] = json.dumps(value)
    config = _resource_config(groups)
    (root / names.HYPERPARAMETERS_FILE).parent.mkdir(parents=True)
    (root / names.HYPERPARAMETERS_FILE).write_text(json.dumps(encoded), encoding="utf-8")
    (root / names.RESOURCE_CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    code = root / names.CODE_DIRECTORY
    if whole_folder:
        code.symlink_to(files.folder.resolve(), target_is_directory=True)
    else:
        code.mkdir()
        (code / files.entry).write_bytes((files.folder / files.entry).read_bytes())


def _resource_config(groups: Sequence[Group]) -> dict[str, Json]:
    """Return the content of resourceconfig.json on the first host."""
    all_hosts: list[Json] = []
    instance_groups: list[Json] = []
    for group, members in zip(groups, _host_names(groups)):
        all_hosts += members
        instance_groups.append(
            {
                "instance_group_name": group.name,
                "instance_type": group.instance_type,
                "hosts": [*members],
            }
        )
    config: dict[str, Json] = {
        "current_host": all_hosts[0],
        "hosts": all_hosts,
        "current_instance_type": groups[0].instance_type,
    }
    if groups[0].name:
        config["current_group_name"] = groups[0].name
        config["instance_groups"] = instance_groups
    return config


def _image(parsed: Parsed, manifest: Manifest, facts: Facts) -> tuple[Manifest, Mapping[str, str]]:
    """Return the image's manifest, and its programs.

    Without a manifest, the image is assumed to have everything that a mode may need, with the paths
    and versions of this project's newest image.
    """
    component = _COMPONENT_OF[value_of(parsed, "--framework", "pytorch")]
    version = value_of(parsed, "--framework-version")
    components = dict(manifest.components)
    if "--image-manifest" in parsed:
        programs = manifest.programs
    else:
        newest = facts.image
        paths = {name: newest.programs.get(name, f"/usr/bin/{name}") for name in PROGRAMS}
        programs = MappingProxyType(paths)
        assumed = dict.fromkeys((component, *_ASSUMED), "")
        # The newest image's framework may be another one than the job's.
        other_frameworks = set(_COMPONENT_OF.values()) - {component}
        for name, version_in_newest in newest.components.items():
            if name not in other_frameworks:
                assumed[name] = version_in_newest
        components = {**assumed, **components}
        manifest = manifest._replace(
            framework=manifest.framework or component, fabric=newest.fabric
        )
    if version:
        components[component] = version
    return manifest._replace(components=MappingProxyType(components)), programs


def _as_json(result: Result, redactor: Redactor | None) -> str:
    """Write the result as JSON text."""
    hidden = redactor.text if redactor else str
    redacted = [problem._replace(what=hidden(problem.what)) for problem in result.problems]
    document: dict[str, Json] = {
        "ready": not result.problems,
        "problems": [dict(problem._asdict()) for problem in redacted],
        "warnings": [hidden(warning) for warning in result.warnings],
        "hyperparameters": _redacted(result.hyperparameters, redactor),
        "plans": [plan.document() for plan in _redacted_plans(result, redactor)],
        "advice": [dict(piece._asdict()) for piece in result.advice],
        "tips": [{"text": tip.text, "link": tip.link} for tip in result.tips],
        "assumptions": [result.assumption] if result.assumption else [],
    }
    return readable(json.dumps(document, indent=2, ensure_ascii=False)) + "\n"


def _redacted(hyperparameters: Mapping[str, Json], redactor: Redactor | None) -> dict[str, Json]:
    """Redact hyperparameters; a value without a secret keeps its type."""
    if redactor is None:
        return dict(hyperparameters)
    shown: dict[str, Json] = {}
    for name, value in hyperparameters.items():
        text = value if isinstance(value, str) else json.dumps(value)
        redacted = redactor.value(name, text)
        shown[name] = value if redacted == text else redacted
    return shown


def _redacted_plans(result: Result, redactor: Redactor | None) -> Sequence[NodePlan]:
    if redactor is None:
        return result.plans
    return [plan.redacted(redactor) for plan in result.plans]


def _as_text(result: Result, redactor: Redactor | None, width: int) -> str:
    """Write the result for people."""
    width = min(max(width, 60), 120)
    hidden = redactor.text if redactor else str
    lines: list[str] = []
    if result.job is not None:
        instance_type = result.job.placement.instance_type
        lines += _wrapped(f"{describe(result.job)}; hosts are {instance_type}", width)
        ranks = rank_map(result.job.placement, result.job.environment.devices)
        if ranks:
            lines += ["", *ranks]
    problems = [str(problem) for problem in result.problems]
    for heading, texts in (("Problems", problems), ("Warnings", result.warnings)):
        if texts:
            lines += ["", f"{heading}:"]
        for number, text in enumerate(texts, 1):
            lines += _wrapped(hidden(text), width, f"  {number}. ", "     ")
    plans = _redacted_plans(result, redactor)
    for plan in plans:
        lines += ["", *_plan_lines(plan, plans[0], width)]
    if result.advice:
        lines += ["", "Advice:"]
    for piece in result.advice:
        lines += _wrapped(hidden(f"{piece.subject}: {piece.text}"), width, "  - ", "    ")
        lines += _wrapped(hidden(f"why: {piece.why}"), width, "    ", "    ")
    if result.tips:
        lines += ["", "Tips:"]
    for tip in result.tips:
        lines += _wrapped(f"{tip.text}: {tip.link}", width, "  - ", "    ")
    lines.append("")
    if result.assumption:
        lines += _wrapped(f"({result.assumption})", width)
    if result.problems:
        lines.append(f"not ready: {len(result.problems)} problem(s)")
    else:
        lines.append("ready: the job would start")
    return "\n".join(lines).strip("\n") + "\n"


def _wrapped(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """Wrap a text; options and names with hyphens stay whole."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    )


def _plan_lines(plan: NodePlan, leader: NodePlan, width: int) -> list[str]:
    """Write one host's plan in short: its command, ready to be copied, and its own variables."""
    place = f"{plan.host} ({plan.role})"
    beside = [f"  beside it: {row.name}" for row in plan.auxiliaries]
    if not plan.argv:
        reasons = [reason.why for reason in plan.why if not reason.words]
        why = reasons[0] if reasons else "another host starts its processes"
        return [*_wrapped(f"{place} runs no command: {why}", width, "", "  "), *beside]

    different = _differences(plan, leader) if plan is not leader else None
    if different is not None and len(different) <= _FEW:
        same = f"{place} runs the same"
        if different:
            same += f", but for {', '.join(different)}"
        return _wrapped(same, width, "", "  ")

    lines, line = [f"{place} runs:"], "  "
    for word in map(shlex.quote, plan.argv):
        if len(line) + len(word) + 3 > width and line.strip():
            lines.append(f"{line}\\")
            line = "    "
        line += f"{word} "
    lines.append(line.rstrip())
    variables = _own_variables(plan)
    if variables:
        lines.append("  with:")
    for name, value in variables.items():
        lines.append(f"    {name}={shlex.quote(value)}")
    return lines + beside


def _differences(plan: NodePlan, leader: NodePlan) -> list[str] | None:
    """Return the words and variables in which a plan differs from the leader's.

    None if the plans have different forms.
    """
    own, leaders = _own_variables(plan), _own_variables(leader)
    if len(plan.argv) != len(leader.argv) or not own.keys() >= leaders.keys():
        return None
    different = [word for word, other in zip(plan.argv, leader.argv) if word != other]
    for name, value in own.items():
        if leaders.get(name) == value:
            continue
        is_short = len(value) < _SHORT
        different.append(f"{name}={value}" if is_short else f"its own {name}")
    return different


_SHORT = 40
"""Length from which only the name of a variable is shown, where two hosts are compared."""

_FEW = 4
"""Limit of differences from the leader's plan that are shown instead of the whole plan."""


def _own_variables(plan: NodePlan) -> dict[str, str]:
    """Return the variables of a plan that depend on the mode."""
    own = [name for name in sorted(plan.env) if not name.startswith(_EVERY_SCRIPTS)]
    return {name: plan.env[name] for name in own}


_EVERY_SCRIPTS = ("SM_", "SAGEMAKER_", "CURRENT_HOST", "PYTHON", "MASTER_")
"""Prefixes of variables that every script gets, in any mode: `explain` shows them."""
