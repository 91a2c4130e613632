"""Checks a job on a laptop, before you pay for a cluster.

The platform's files are written to a temporary folder and read by the launcher's own reader. The
hosts' devices come from the instance table. Then ``make_job`` and ``plan_host`` do what they would
do in a container. The training script is not read, and no property of this machine counts.
"""

from __future__ import annotations

import json
import shlex
import tempfile
import textwrap
from dataclasses import replace
from itertools import accumulate
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
_TAKEN_TO_BE_THERE = ("cuda", "torch_xla", "mpi4py", names.OPEN_MPI, "smp", "smddp")


class Result(NamedTuple):
    """What preflight found.

    Attributes:
        problems: Why the job would not start.
        warnings: One sentence each.
        hyperparameters: What the job is sent, by the SDK's rules.
        job: The leader's job; None if the job has problems.
        plans: Plans of the leader and of one worker of each kind.
        advice: What would be better.
        tips: What to think of in a job of this kind.
        assumption: What the answer rests on; ``""`` if nothing was asked.
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
    """Run a preflight; (exit status, what to print). 0: the job would start.

    64: it has problems.
    """
    result = check(parsed)
    status = names.EXIT_NOT_STARTED if result.problems else 0
    redactor = None if "--show-secrets" in parsed else Redactor(result.hyperparameters)
    as_json = value_of(parsed, "--format", "text") == "json"
    return status, _as_json(result, redactor) if as_json else _as_text(result, redactor, width)


def check(parsed: Parsed) -> Result:
    """Everything but the printing."""
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
    environment = _environment(parsed, inputs.facts, groups, sent, folder, entry)
    built_for = environment.manifest.architecture
    rows = {group.instance_type: inputs.facts.find(group.instance_type) for group in groups}
    problems += [
        Problem(
            f"{name} has {row.architecture} processors, and the image is for {built_for}",
            "option --instance-type",
            f"take an image for {row.architecture} (its --image-manifest says so),"
            " or another instance type",
        )
        for name, row in rows.items()
        if row and row.architecture != built_for
    ]
    result = _plan(environment, groups, inputs.facts, translation)
    return result._replace(
        problems=(*problems, *result.problems),
        warnings=tuple(dict.fromkeys((*inputs.warnings, *_sizes(sent), *result.warnings))),
        hyperparameters=sent,
        assumption=(
            f"image {environment.manifest.name!r}, by its manifest;"
            " instance types by preflight's table"
            if "--image-manifest" in parsed
            else (
                "no --image-manifest is given: the image is assumed to have every program and"
                f" library; paths and versions are those of {inputs.facts.image.name}"
            )
        ),
    )


def _sizes(sent: Mapping[str, Json]) -> tuple[str, ...]:
    """Return what the platform would not take, for its number or its length."""
    found: list[str] = []
    if len(sent) + _SDK_OWN > names.HYPERPARAMETERS_LIMIT:
        text = f"{len(sent)} hyperparameters, and {_SDK_OWN} of the SDK's own: the platform takes"
        found.append(
            f"{text} {names.HYPERPARAMETERS_LIMIT};"
            " put them into a file of the source directory or a channel"
        )
    for name, value in sent.items():
        length = len(json.dumps(value))
        if length > names.HYPERPARAMETER_LENGTH_LIMIT:
            text = f"hyperparameter {name} has {length:,} characters, the platform takes"
            found.append(f"{text} {names.HYPERPARAMETER_LENGTH_LIMIT:,}; put it into a file")
    return tuple(found)


_SDK_OWN = 5
"""Hyperparameters that the SDK adds to every job: program, submit directory,
log level, job name, region.
"""


def _plan(
    environment: Environment, groups: Sequence[Group], facts: Facts, translation: Translation
) -> Result:
    """Return the plans of a leader and of one worker of each kind, and the advice.

    Or the launcher's refusal.
    """
    try:
        job = make_job(environment)
        job = make_job(environment, job.placement.leader)
        others = [
            *job.placement.distribution_hosts[1:2],
            *(members[0] for members in _host_names(groups)),
        ]
        hosts = dict.fromkeys((job.placement.leader, *others))
        plans = tuple(plan_host(make_job(environment, host)) for host in hosts)
    except RefusalError as refusal:
        return Result(problems=refusal.problems, warnings=translation.warnings)
    row = _row(facts, environment.manifest, job.placement.instance_type)
    return Result(
        warnings=(
            *translation.warnings,
            *dict.fromkeys(text for plan in plans for text in plan.warnings),
        ),
        job=job,
        plans=plans,
        advice=tuple(advise(job, row, facts)),
        tips=tuple(tips_for(job, row)),
    )


def _host_names(groups: Sequence[Group]) -> tuple[tuple[str, ...], ...]:
    """Return the hosts of each group, numbered through as the platform does."""
    ends = [*accumulate(group.count for group in groups)]
    return tuple(
        tuple(f"algo-{number}" for number in range(end - group.count + 1, end + 1))
        for group, end in zip(groups, ends)
    )


def _row(facts: Facts, manifest: Manifest, instance_type: str) -> InstanceFacts:
    """Return what is known of an instance type: the image's own row counts
    before the launcher's.
    """
    known = facts.find(instance_type) or InstanceFacts(Instance())
    return replace(known, instance=manifest.instances.get(instance_type, known.instance))


def _environment(
    parsed: Parsed,
    facts: Facts,
    groups: Sequence[Group],
    sent: Mapping[str, Json],
    folder: Path,
    entry: str,
) -> Environment:
    """Make the first host's environment: files read by the launcher's own
    reader, devices from the table.
    """
    hosts = _host_names(groups)
    everyone: list[Json] = [host for members in hosts for host in members]
    config: dict[str, Json] = {
        "current_host": everyone[0],
        "hosts": everyone,
        "current_instance_type": groups[0].instance_type,
    }
    if groups[0].name:
        config["current_group_name"] = groups[0].name
        config["instance_groups"] = [
            {
                "instance_group_name": group.name,
                "instance_type": group.instance_type,
                "hosts": [*members],
            }
            for group, members in zip(groups, hosts)
        ]
    # The SDK encodes each value; the program's name and place are settings of the job.
    encoded: dict[str, Json] = {
        name: json.dumps(value) for name, value in {**sent, names.PROGRAM: entry}.items()
    }
    with tempfile.TemporaryDirectory(prefix="trainworks-preflight-") as base:
        root = Path(base)
        (root / names.HYPERPARAMETERS_FILE).parent.mkdir(parents=True)
        (root / names.HYPERPARAMETERS_FILE).write_text(json.dumps(encoded), encoding="utf-8")
        (root / names.RESOURCE_CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        if "--source-dir" in parsed:
            (root / names.CODE_DIRECTORY).symlink_to(folder.resolve(), target_is_directory=True)
        else:
            (root / names.CODE_DIRECTORY).mkdir()
            (root / names.CODE_DIRECTORY / entry).write_bytes((folder / entry).read_bytes())
        variables = {
            names.BASE_DIRECTORY_VARIABLE: base,
            "PATH": base,
        }  # no program of this machine is looked at
        if "--image-manifest" in parsed:
            variables[names.IMAGE_MANIFEST_VARIABLE] = value_of(parsed, "--image-manifest")
        read = read_environment(variables)
        code = Code(
            directory=f"{names.BASE_DIRECTORY}/{names.CODE_DIRECTORY}",
            entries=read.code.entries,
            executable=read.code.executable,
        )
    manifest, programs = _image(parsed, read.manifest, facts)
    known = {name: row.instance for name, row in facts.instances.items()}
    families = tuple(dict.fromkeys((*manifest.families, *facts.families)))
    first = _row(facts, manifest, groups[0].instance_type).instance
    return read._replace(
        base_directory=names.BASE_DIRECTORY,
        variables=MappingProxyType({"PATH": "/usr/local/bin:/usr/bin:/bin"}),
        hosts=read.hosts.with_interface(names.INTERFACE),
        manifest=manifest._replace(
            instances=MappingProxyType({**known, **manifest.instances}), families=families
        ),
        devices=Devices(gpus=first.gpus, neuron_devices=min(first.neuron_cores, 1), efa=None),
        code=code,
        hostname=str(everyone[0]),
        programs=programs,
        launcher_python="/usr/bin/python3",
        launcher_directory="/opt/trainworks/lib/trainworks_launcher",
        home="",
        results=Results({}, {}),
        warnings=(),
    )


def _image(parsed: Parsed, manifest: Manifest, facts: Facts) -> tuple[Manifest, Mapping[str, str]]:
    """Return (the image's manifest, its programs).

    Without a manifest, the image is assumed to have all that a mode may need, as this project's
    newest image has it.
    """
    component = _COMPONENT_OF[value_of(parsed, "--framework", "pytorch")]
    version = value_of(parsed, "--framework-version")
    components = dict(manifest.components)
    if "--image-manifest" in parsed:
        programs = manifest.programs
    else:
        newest = facts.image
        programs = MappingProxyType(
            {name: newest.programs.get(name, f"/usr/bin/{name}") for name in PROGRAMS}
        )
        # The newest image's framework may be another one than the job's.
        others = set(_COMPONENT_OF.values()) - {component}
        versions = {name: each for name, each in newest.components.items() if name not in others}
        components = {
            **dict.fromkeys((component, *_TAKEN_TO_BE_THERE), ""),
            **versions,
            **components,
        }
        manifest = manifest._replace(
            framework=manifest.framework or component, fabric=newest.fabric
        )
    if version:
        components[component] = version
    return manifest._replace(components=MappingProxyType(components)), programs


def _as_json(result: Result, redactor: Redactor | None) -> str:
    """Return the whole result as JSON text."""
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
    """Return hyperparameters without secrets; a value without one keeps its type."""
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
    """Return the result for a person."""
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
    """Lines of ``width``; options and names with hyphens stay whole."""
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=following, break_on_hyphens=False
    )


def _plan_lines(plan: NodePlan, leader: NodePlan, width: int) -> list[str]:
    """One host's plan in short: its command, ready to be copied, and the
    variables that are not every script's.
    """
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
    """Return words and variables of a plan that the leader's has otherwise.

    None if the plans have another form.
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
"""Characters from which a variable is named only, where two hosts are compared."""

_FEW = 4
"""Differences from the leader's plan up to which only they are shown."""


def _own_variables(plan: NodePlan) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(plan.env.items())
        if not name.startswith(_EVERY_SCRIPTS)
    }


_EVERY_SCRIPTS = ("SM_", "SAGEMAKER_", "CURRENT_HOST", "PYTHON", "MASTER_")
"""How variables begin that every script is given, whatever its mode: `explain` shows them."""
