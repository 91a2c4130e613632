"""Check a job on a laptop, before you pay for a cluster.

The platform's files are written to a temporary folder, and read by the launcher's own reader. The
hosts' devices come from the instance table. Then ``make_job`` and ``plan_host`` run as in a
container. Of the training script only the imports are read, and no property of this machine counts.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Mapping, NamedTuple, Sequence

from trainworks_launcher.command.options import Parsed, value_of
from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem, RefusalError
from trainworks_launcher.contract.json_values import NOTHING, Json
from trainworks_launcher.environment.directories import Results
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import (
    PROGRAMS,
    Devices,
    Environment,
    read_environment,
)
from trainworks_launcher.environment.manifest import Instance, Manifest
from trainworks_launcher.job import model_parallel
from trainworks_launcher.job.job import Job, JobRefusedError, make_job
from trainworks_launcher.job.model_parallel import OPEN_LIBRARY
from trainworks_launcher.plan.modes import plan_host
from trainworks_launcher.plan.plan import NodePlan
from trainworks_preflight.advice import Advice, advise
from trainworks_preflight.distribution import Group, Translation, translate
from trainworks_preflight.facts import Facts, InstanceFacts
from trainworks_preflight.inputs import Inputs
from trainworks_preflight.script import find_imports
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
    problems += _check_script(environment.manifest, files, whole_folder="--source-dir" in parsed)
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
    warnings = (
        *inputs.warnings,
        *_sizes(sent),
        *_warn_of_second_version(environment, inputs.facts),
        *result.warnings,
    )
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


def _check_script(manifest: Manifest, files: _Files, *, whole_folder: bool) -> list[Problem]:
    """Return a problem for each file that imports smp's second version, where the image has the
    first one.

    Args:
        manifest: The image's manifest.
        files: The code directory and the entry point.
        whole_folder: Whether the job has the whole code directory, not the entry point alone.
    """
    if OPEN_LIBRARY not in manifest.protected:
        return []
    second = files.facts.second_version
    first_line_of: dict[str, int] = {}
    for imported in find_imports(files.folder, files.entry, whole_folder=whole_folder):
        if f"{imported.module}.".startswith(f"{second.module}."):
            first_line_of.setdefault(imported.file, imported.line)
    problems = []
    for file, line in first_line_of.items():
        what = f"the script imports {second.module}: {second.what}"
        problems.append(Problem(what, f"{file}, line {line}", second.instead))
    return problems


def _warn_of_second_version(environment: Environment, facts: Facts) -> list[str]:
    """Warn of parameters for smp's second version, where the image has the first one.

    The job starts, because the launcher only hands them to the script.
    """
    if not environment.reserved.is_on(names.TORCH_DISTRIBUTED_ENABLED):
        return []
    if OPEN_LIBRARY not in environment.manifest.protected:
        return []
    parameters, where = model_parallel.parameters(
        environment.hyperparameters, environment.variables
    )
    if parameters is None:
        return []
    second = facts.second_version
    text = f"{where} is for {second.module}, which the image does not have: beside"
    return [f"{text} torch_distributed nothing reads it. {second.instead}"]


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
    except JobRefusedError as refusal:
        # A warning may have the cause of a problem: a misspelt name of a missing parameter.
        warnings = [*environment.warnings, *refusal.placement.warnings]
        return Result(
            problems=refusal.problems,
            warnings=(*translation.warnings, *dict.fromkeys(warnings)),
        )
    except RefusalError as refusal:
        return Result(problems=refusal.problems, warnings=translation.warnings)
    row = _row(facts, environment.manifest, job.placement.instance_type)
    warnings = [text for plan in plans for text in plan.warnings]
    return Result(
        warnings=(*translation.warnings, *dict.fromkeys(warnings)),
        job=job,
        plans=plans,
        advice=tuple(advise(job, row, facts)),
        tips=tuple(tips_for(job)),
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

    Without a manifest, the image is assumed to have everything that a mode may need, with the
    paths, versions and libraries of this project's newest image.
    """
    component = _COMPONENT_OF[value_of(parsed, "--framework", "pytorch")]
    programs = manifest.programs
    if "--image-manifest" not in parsed:
        manifest = _assume_image(manifest, component, facts.image)
        paths = {name: facts.image.programs.get(name, f"/usr/bin/{name}") for name in PROGRAMS}
        programs = MappingProxyType(paths)
    version = value_of(parsed, "--framework-version")
    if version:
        manifest = _with_version(manifest, component, version)
    return manifest, programs


def _assume_image(manifest: Manifest, component: str, newest: Manifest) -> Manifest:
    """Return the manifest of the image that is assumed without ``--image-manifest``.

    Args:
        manifest: What the launcher's reader says of no manifest.
        component: Component of the job's framework, such as ``torch``.
        newest: The newest image. Its framework may be another one than the job's.
    """
    other_frameworks = set(_COMPONENT_OF.values()) - {component}
    components = dict.fromkeys((component, *_ASSUMED), "")
    for name, version in newest.components.items():
        if name not in other_frameworks:
            components[name] = version
    protected: Mapping[str, str] = {}
    if component in newest.components:
        protected = newest.protected
    return manifest._replace(
        framework=manifest.framework or component,
        fabric=newest.fabric,
        components=MappingProxyType({**components, **manifest.components}),
        protected=protected,
    )


def _with_version(manifest: Manifest, component: str, version: str) -> Manifest:
    """Return the manifest with another version of the framework's component."""
    components = {**manifest.components, component: version}
    protected = dict(manifest.protected)
    if component in protected:
        protected[component] = version
    return manifest._replace(
        components=MappingProxyType(components), protected=MappingProxyType(protected)
    )
