"""The image tests: one function for every kind of check.

``trainworks.imagetest.run_checks`` runs them, once for each check. A failure says in plain words
what is wrong and how to correct it; pytest's own view of the failing line would say neither. The
name of a function is ``test_`` and the check's ``kind``; the probe, which runs inside the image,
answers the others (``test_probe``).
"""

from __future__ import annotations

import posixpath
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import pytest
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion
from testinfra.backend.base import BaseBackend  # type: ignore[import-untyped]
from testinfra.host import Host  # type: ignore[import-untyped]

from trainworks.engine.backend import MAKERS
from trainworks.engine.protocol import (
    BuiltImage,
    Completed,
    Container,
    Engine,
    HistoryEntry,
    Isolation,
    Job,
)
from trainworks.errors import ImageTestError, TrainworksError
from trainworks.imagetest import imports, probe_request, secrets
from trainworks.imagetest.concurrency import Lanes
from trainworks.imagetest.makers import Makers, list_problems
from trainworks.imagetest.probe.answers import QUESTIONS, Answer, Request
from trainworks.imagetest.probe.files import LINE_LIMIT, DamagedFile, InstalledFiles
from trainworks.imagetest.results import ALIKE, folded, one_line
from trainworks.plan import checks as kinds
from trainworks.render.dockerfile import ARCHIVES_LABEL, BASE_LABEL, INPUTS_LABEL, LAYERS_LABEL
from trainworks.render.steps import strip_flags

COMMAND_TIMEOUT = 1200.0
"""Seconds for a command or an import of a check.

torch.compile takes 25 of them on two free cores, 60 on busy ones, and more than
300 where arm64 is emulated.
"""

RENDERED = frozenset(
    {
        "Env",
        "Labels",
        "Entrypoint",
        "Cmd",
        "WorkingDir",
        "User",
        "StopSignal",
        "Volumes",
        "ArgsEscaped",
    }
)
"""The keys of a configuration that are compared one by one.

The last one says how BuildKit has written another.
"""

INSTRUCTIONS = {
    "OnBuild": "ONBUILD",
    "Healthcheck": "HEALTHCHECK",
    "ExposedPorts": "EXPOSE",
    "Shell": "SHELL",
}
"""The instruction that sets a key, where there is one."""

BUILD_LABELS = frozenset(
    {INPUTS_LABEL, BASE_LABEL, ARCHIVES_LABEL, LAYERS_LABEL, "io.buildah.version"}
)
"""Labels that the builder and an engine add to what was rendered."""

_OUTPUT_LIMIT = 2000


@dataclass(frozen=True, kw_only=True)
class ImageUnderTest:
    """An image in an engine's store, and the facts that its checks need.

    Attributes:
        engine: The engine that has the image.
        image: The image.
        checks: The checks, in the order of the report; equal ones run once.
        forbidden: Literal strings of the build host that must not occur in the
            image (its proxy, its index).
        base: The image that this one extends, if it is of another maker: its
            own secrets are not reported.
        isolated: The isolation of programs in the image (``Engine.container``).
        makers: Gives the lists of files of packages' makers; ``None``: only the image's own lists
            are read.
    """

    engine: Engine
    image: BuiltImage
    checks: tuple[kinds.Check, ...]
    forbidden: tuple[str, ...] = ()
    base: BuiltImage | None = None
    isolated: Isolation = ""
    makers: Makers | None = None


SUBJECT = pytest.StashKey[ImageUnderTest]()
"""The place in pytest's configuration where ``run_checks`` puts the image."""


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> ImageUnderTest:
    """Return the image."""
    return pytestconfig.stash[SUBJECT]


@pytest.fixture(scope="session")
def container(subject: ImageUnderTest) -> Iterator[Container]:
    """Run one container of the image for all checks that look at its files and packages."""
    with subject.engine.container(subject.image.reference, isolated=subject.isolated) as started:
        yield started


@pytest.fixture(scope="session")
def host(container: Container) -> Host:
    """Return the container as testinfra's host."""
    backend = cast("BaseBackend", container.testinfra_backend())
    host = Host(backend)
    backend.set_host(host)
    return host


@dataclass(frozen=True, kw_only=True)
class PendingResults:
    """Results that take long, started for all checks at once; a call of a field waits for it.

    Attributes:
        probe: The answers of the probe, the program inside the image.
        secrets: Secrets of the build host in the layers.
        completed: The end of a check's program.
        imported: A line for each failed import of a check that imports.
    """

    probe: Callable[[], Answer]
    secrets: Callable[[], tuple[secrets.SecretFinding, ...]] | None
    completed: Mapping[kinds.Check, Callable[[], Completed]]
    imported: Mapping[kinds.Check, Callable[[], list[str]]]


@pytest.fixture(scope="session")
def pending(subject: ImageUnderTest) -> Iterator[PendingResults]:
    """Start everything that takes long, in this order, in several containers at once."""
    engine, image, checks = subject.engine, subject.image, subject.checks
    request = probe_request.request_of(checks, image)
    no_request = probe_request.request_of((), image)

    # One walk over the files answers both.
    files: Request = {}
    if "files" in request:
        files["files"] = request.pop("files")
    if "lists" in request:
        files["lists"] = request.pop("lists")

    def ask_files(container: Container) -> Answer:
        if not files:
            return {}
        return probe_request.ask(container, files)

    def ask(container: Container) -> Answer:
        if request == no_request:
            return {}
        return probe_request.ask(container, request)

    published: list[str] = []
    has_secrets_check = False
    programs = {}
    importers = {}
    for check in checks:
        if isinstance(check, kinds.SecretsCheck):
            has_secrets_check = True
            published += check.published
        program = _program(check, subject)
        if program is not None:
            programs[check] = program
        importer = _importing(check)
        if importer is not None:
            importers[check] = importer

    def scan(_: Container) -> tuple[secrets.SecretFinding, ...]:
        findings = secrets.scan(engine, image, subject.forbidden, published)
        if findings and subject.base is not None:
            inherited = secrets.scan(engine, subject.base, subject.forbidden, published)
            findings = secrets.added(findings, inherited)
        return findings

    with Lanes(engine, image.reference, isolated=subject.isolated) as lanes:
        # The first in its lane: the others leave files in their container (keras in HOME).
        of_files, of_others = lanes.start(ask_files), lanes.start(ask)
        yield PendingResults(
            probe=lambda: {**of_files(), **of_others()},
            secrets=lanes.start(scan) if has_secrets_check else None,
            completed={check: lanes.start(program) for check, program in programs.items()},
            imported={check: lanes.start(importer) for check, importer in importers.items()},
        )


def _program(
    check: kinds.Check, subject: ImageUnderTest
) -> Callable[[Container], Completed] | None:
    """Return a function that runs the program of a check, or None for a check without one."""
    match check:
        case kinds.CommandCheck():
            # The engine's own way in, not testinfra's: it has a time limit and keeps stdout and
            # stderr in their order.
            if check.expect:
                return lambda container: probe_request.run_printing(
                    container, check.command, timeout=COMMAND_TIMEOUT
                )
            return lambda container: container.run(check.command, timeout=COMMAND_TIMEOUT)
        case kinds.StartCheck():
            isolated = subject.isolated
            if check.alone and not subject.engine.isolates():
                isolated = "job"
            job = Job(command=check.arguments, timeout=COMMAND_TIMEOUT, isolated=isolated)
            return lambda _: subject.engine.run(subject.image.reference, job)
        case _:
            return None


def _importing(check: kinds.Check) -> Callable[[Container], list[str]] | None:
    """Return a function that runs the imports of a check, or None for a check without imports.

    It returns a line for each failure.
    """
    match check:
        case kinds.ImportCheck():

            def import_one(container: Container) -> list[str]:
                python = probe_request.ENVIRONMENT_PYTHON
                error = probe_request.can_import(
                    container, python, check.module, timeout=COMMAND_TIMEOUT
                )
                return [error] if error else []

            return import_one
        case kinds.PythonImportsCheck():
            timeout = COMMAND_TIMEOUT + imports.SECONDS * len(check.distributions)

            def import_all(container: Container) -> list[str]:
                failures = probe_request.ask_program(
                    container,
                    (check.python,),
                    probe_request.IMPORTS,
                    check.distributions,
                    timeout=timeout,
                )
                if failures["asked"] != len(check.distributions):
                    raise ImageTestError(
                        "the image's answer is malformed: it is about other distributions"
                    )
                return [import_failure(failure, check) for failure in failures["failed"]]

            return import_all
        case _:
            return None


@pytest.fixture(scope="session")
def answer(pending: PendingResults) -> Answer:
    """Return the answer of the probe."""
    return pending.probe()


@pytest.fixture(scope="session")
def problems(answer: Answer, subject: ImageUnderTest) -> dict[kinds.Check, list[str]]:
    """Return the problems of each check."""
    return dict(zip(probe_request.probed(subject.checks), answer["problems"], strict=True))


@pytest.fixture(scope="session")
def stock(answer: Answer) -> InstalledFiles:
    """Return the problems of the files."""
    files = answer["files"]
    if files["error"] or not files["packages"]:
        reason = files["error"] or "the image has neither dpkg's nor rpm's database"
        raise ImageTestError(f"cannot list the packages of the image: {reason}")
    return files


def _broken(reason: str) -> NoReturn:
    pytest.fail(reason, pytrace=False)


def _tail(output: str) -> str:
    return output.strip()[-_OUTPUT_LIMIT:] or "(it printed nothing)"


def _lines(lines: list[str], limit: int = LINE_LIMIT) -> str:
    first_lines = lines[:limit]
    if len(lines) > limit:
        first_lines.append(f"... and {len(lines) - limit} more")
    return "\n".join(first_lines)


def test_probe(check: kinds.Check, problems: dict[kinds.Check, list[str]]) -> None:
    """The probe reports no problem of the check."""
    if problems[check]:
        _broken("\n".join(problems[check]))


def test_path(check: kinds.PathCheck, request: pytest.FixtureRequest) -> None:
    """A path exists as declared, or does not exist."""
    if check.state == "absent":
        test_probe(check, request.getfixturevalue("problems"))
        return
    host: Host = request.getfixturevalue("host")
    file = host.file(check.path)
    if not file.exists:
        _broken(
            f"{check.path} does not exist:"
            f" the recipe of {check.component} does not bring it to the final stage"
        )
    if check.state == "directory" and not file.is_directory:
        _broken(f"{check.path} is not a directory")
    if check.state in ("file", "executable") and not file.is_file:
        _broken(f"{check.path} is not a file")
    if check.state == "executable" and not file.is_executable:
        _broken(f"{check.path} is not executable: its mode is {file.mode:o}")


def test_command(check: kinds.CommandCheck, pending: PendingResults) -> None:
    """A command succeeds and prints what is expected."""
    completed = pending.completed[check]()
    command = shlex.join(check.command)
    if completed.status != 0:
        _broken(
            f"{command}\n"
            f"ended with status {completed.status} and printed\n"
            f"{_tail(completed.output)}"
        )
    if check.expect not in completed.output:
        _broken(
            f"{command}\n"
            f"succeeded, but {check.expect!r} is not in what it printed:\n"
            f"{_tail(completed.output)}"
        )


def test_import(check: kinds.ImportCheck, pending: PendingResults) -> None:
    """A module can be imported."""
    failures = pending.imported[check]()
    if failures:
        _broken("\n".join(failures))


def test_python_imports(check: kinds.PythonImportsCheck, pending: PendingResults) -> None:
    """Every installed distribution can be imported; one that fails is named with its reason."""
    failures = pending.imported[check]()
    if failures:
        _broken(_lines(failures))


def import_failure(failed: imports.ImportFailure, check: kinds.PythonImportsCheck) -> str:
    """Return the failure, the age of the distribution, and the way to mend just this failure."""
    name = failed["name"]
    released = dict(check.released).get(name, "")
    subject = f"{name} {failed['version']}" if failed["version"] else name
    if released:
        subject += f", released {released}"
    text = f"{subject}: {failed['reason']}"
    if failed["module"]:
        return f"{text}\n  add the package that has the module {failed['module']} (--requirements)"
    if failed["library"]:
        return f"{text}\n  add the Debian package that has {failed['library']} (--apt)"
    return f"{text}\n  {name} is installed, and fails: ask for another version of it"


def test_python_package(check: kinds.PythonPackageCheck, answer: Answer) -> None:
    """A Python distribution has the declared version.

    A local part (``+cu121``) counts where one is declared.
    """
    if answer["distributions_error"]:
        _broken(answer["distributions_error"])
    name = canonicalize_name(check.distribution)
    versions = [row["version"] for row in answer["distributions"] if row["name"] == name]
    if not versions:
        _broken(
            f"{check.distribution} is not installed in the environment of"
            f" {probe_request.ENVIRONMENT_PYTHON}"
        )
    if len(versions) > 1:
        _broken(
            f"{check.distribution} is installed {len(versions)} times ({', '.join(versions)}):"
            " one of them is a remainder of a broken installation"
            " or comes from a second folder on sys.path"
        )
    try:
        fits = SpecifierSet(f"=={check.version}").contains(versions[0], prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        fits = versions[0] == check.version
    if not fits:
        _broken(
            f"{check.distribution} is {versions[0]}, declared is {check.version}: another"
            " requirement moved it, or the lock and the row do not fit each other"
        )


def test_debian_package(check: kinds.DebianPackageCheck, host: Host) -> None:
    """A Debian package is there; its upstream version begins with the declared one."""
    listing = host.run("dpkg-query --show --showformat='${Package}\\t${Status}\\n'")
    if listing.rc != 0:
        # testinfra would raise an error of its own for each package.
        _broken(f"dpkg cannot read its database: {_tail(listing.stderr or listing.stdout)}")
    package = host.package(check.package)
    if not package.is_installed:
        # A library whose ABI changed has another package name, and provides the
        # old one (64-bit time in Debian 13).
        package = host.package(_provider(host, check.package) or check.package)
    if not package.is_installed:
        _broken(
            f"{check.package} is not installed: the recipe of {check.component} must install it in"
            " the final stage"
        )
    if not check.version:
        return
    upstream = upstream_version(package.version)
    if upstream != check.version and not upstream.startswith(f"{check.version}."):
        _broken(f"{check.package} is {package.version}, declared is {check.version}")


def _provider(host: Host, name: str) -> str:
    """Return an installed Debian package that provides ``name``, ``""`` where there is none."""
    listing = host.run("dpkg-query --show --showformat='${Package}\\t${Provides}\\n'")
    return provider_in(listing.stdout, name)


def provider_in(listing: str, name: str) -> str:
    """Return the first package of a listing (a line is ``package TAB provides``) that provides
    ``name``, or ``""``.
    """
    for line in listing.splitlines():
        package, _, provides = line.partition("\t")
        names = re.sub(r"\([^)]*\)", "", provides)
        if name in re.split(r"[ ,]+", names):
            return package
    return ""


def upstream_version(version: str) -> str:
    """Return a Debian version without epoch and revision: ``1:9.2p1-2+deb12u3`` is ``9.2p1``."""
    return version.split(":", 1)[-1].rsplit("-", 1)[0]


def test_owned_files(check: kinds.OwnedFilesCheck, stock: InstalledFiles) -> None:  # noqa: ARG001
    """Every file has an owner."""
    if stock["unowned"]:
        _broken(
            f"{_lines(folded(stock['unowned']), 5 * LINE_LIMIT)}\n"
            "belong to no package, no Python distribution and no recipe:"
            " remove them in the step that makes them,"
            " or declare them (`owns` in the recipe's front matter)"
        )


def test_delivered_files(
    check: kinds.DeliveredFilesCheck,  # noqa: ARG001  (the probe has checked it)
    stock: InstalledFiles,
    subject: ImageUnderTest,
) -> None:
    """Every file is as its maker delivered it."""
    if stock["damaged"]:
        lines = damages(stock["damaged"], subject.checks)
        _broken(
            f"{_lines(lines, 5 * LINE_LIMIT)}\n"
            "build the image again; what a recipe itself removes or"
            " replaces is declared in its front matter (`removes`)"
        )


def test_makers_lists(
    check: kinds.MakersListsCheck, answer: Answer, subject: ImageUnderTest
) -> None:
    """The image has the plan's packages, and these their makers' lists of files."""
    problems = list_problems(check, answer["lists"], subject.makers)
    if problems:
        lines = _lines(problems, 5 * LINE_LIMIT)
        _broken(
            f"{lines}\nbuild the image again; what a recipe removes from wheels is in its `trims`"
        )


def damages(files: Iterable[DamagedFile], checks: Sequence[kinds.Check]) -> list[str]:
    """Return a line for each damaged file.

    Many files with the same damage have lines for the first ones, and the number of the others.
    """
    groups: dict[tuple[str, str], list[DamagedFile]] = {}
    for file in files:
        owner = "" if file["path"].endswith(".md5sums") else file["owner"]
        groups.setdefault((owner, file["problem"]), []).append(file)
    lines = []
    for group in groups.values():
        first_files = group
        if len(group) > ALIKE:
            first_files = group[: ALIKE - 1]
        lines += [damage(file, checks) for file in first_files]
        other_files = group[len(first_files) :]
        if other_files:
            folder = posixpath.commonpath([file["path"] for file in other_files])
            lines[-1] += f", and so are {len(other_files)} others in {folder}"
    return lines


def damage(file: DamagedFile, checks: Iterable[kinds.Check]) -> str:
    """Return the problem of a file, its component if the plan has it, and its package.

    ``/usr/bin/ls is missing (component system, package coreutils)``
    """
    kind, _, name = file["owner"].partition(" ")
    component = {"recipe": name, "package": "system"}.get(kind, "")
    if kind == "python":
        component = _component_of(name, checks)
    owners = []
    if component:
        owners.append(f"component {component}")
    if kind == "python":
        owners.append(f"distribution {name}")
    if kind == "package":
        owners.append(f"package {name}")
    text = f"{one_line(file['path'])} {file['problem']}"
    if owners:
        text += f" ({', '.join(owners)})"
    return text


def _component_of(distribution: str, checks: Iterable[kinds.Check]) -> str:
    """Return the component of a Python distribution, as far as the plan has it."""
    component = ""
    for check in checks:
        if not isinstance(check, kinds.PythonPackageCheck):
            continue
        if canonicalize_name(check.distribution) == distribution:
            component = check.component
    return component


def test_world_writable(check: kinds.WorldWritableCheck, stock: InstalledFiles) -> None:
    """No file can be changed by every user."""
    problems = []
    for path, mode in stock["open"]:
        if path not in check.allowed:
            problems.append(f"{path} has mode {mode:04o}")
        elif not mode & stat.S_ISVTX:
            problems.append(f"{path} has mode {mode:04o}, without sticky bit")
    if problems:
        _broken(
            f"{_lines(problems)}\n"
            "every user in the container can change it: `chmod o-w` in the step that makes it"
        )


def test_privileged_files(check: kinds.PrivilegedFilesCheck, stock: InstalledFiles) -> None:
    """Only known programs run with the rights of another user."""
    problems = []
    for row in stock["privileged"]:
        path, package = row["path"], row["package"]
        if (package, path) not in check.allowed:
            problems.append(f"{path} has {row['rights']} (package: {package or 'none'})")
    if problems:
        _broken(
            f"{_lines(problems)}\n"
            "remove the setuid or setgid bit or capability in the step that adds it,"
            " or give the reason in images/privileged-files.toml"
        )


def test_secrets(check: kinds.SecretsCheck, pending: PendingResults) -> None:  # noqa: ARG001  (the promise says it all)
    """No layer, history, label or variable contains anything that must not leave the build host."""
    assert pending.secrets is not None
    findings = pending.secrets()
    if findings:
        _broken(secrets.summary(findings))


def test_size(
    check: kinds.SizeCheck, subject: ImageUnderTest, request: pytest.FixtureRequest
) -> None:
    """The image is not larger than declared."""
    if not probe_request.oversized(check, subject.image):
        return
    reason = f"it has {subject.image.size / 1e6:,.0f} MB; the largest parts:"
    try:
        answer: Answer = request.getfixturevalue("answer")
        parts = [f"{size / 1e6:>8,.0f} MB  {component}" for component, size in answer["sizes"]]
    except TrainworksError as error:
        parts = [f"(not known: {error})"]
    _broken("\n".join([reason, *parts]))


def test_label(check: kinds.LabelCheck, subject: ImageUnderTest) -> None:
    """A label has the declared value."""
    value = subject.image.labels.get(check.label)
    if value is None:
        _broken(f"the image has no label {check.label}")
    if value != check.value:
        _broken(f"it is {value!r}")


def test_configuration(check: kinds.ConfigurationCheck, subject: ImageUnderTest) -> None:
    """The configuration is as rendered."""
    image = subject.image
    problems = _key_problems(check, image)
    problems += _environment_problems(check, image)
    if not check.others:
        unset_labels = sorted(image.labels.keys() - {*check.labels} - BUILD_LABELS)
        problems += [
            f"LABEL {name} is {image.labels[name]!r}, and nothing sets it" for name in unset_labels
        ]
    if check.steps:
        problems += history_problems(check.steps, subject.engine.history(image.reference))
    if problems:
        advice = "build the image again, or declare it in a recipe (`environment`)"
        _broken("\n".join([*problems, advice]))


@dataclass(frozen=True)
class _Setting:
    """A key of a configuration: its instruction, its value, and the rendered value."""

    name: str
    value: object
    rendered: object


def _key_problems(check: kinds.ConfigurationCheck, image: BuiltImage) -> list[str]:
    """Return a line for each key of a configuration that differs from the rendered one."""
    user = "" if image.user in ("root", "0", "0:0") else image.user
    stop_signal = "" if image.stop_signal == "SIGTERM" else image.stop_signal
    settings = [
        _Setting("ENTRYPOINT", list(image.entry_point), list(check.entry_point)),
        _Setting("CMD", list(image.command), list(check.command)),
        _Setting("WORKDIR", image.working_folder, check.working_folder),
        _Setting("USER", user, ""),
        _Setting("STOPSIGNAL", stop_signal, ""),
        _Setting("VOLUME", list(image.volumes), []),
        _Setting("os", image.system or "linux", "linux"),
    ]
    if check.architecture:
        settings.append(_Setting("architecture", image.architecture, check.architecture))
    for key, value in sorted(image.configuration.items()):
        # Another maker's base may name its author, and arm64 has one variant, which some builders
        # write down.
        is_only_variant = (image.architecture, value) == ("arm64", "v8")
        if key in MAKERS and (check.others or is_only_variant):
            continue
        # Nothing else is rendered: another key of a configuration was put there later.
        if key not in RENDERED:
            settings.append(_Setting(INSTRUCTIONS.get(key, key), value, None))
    return [
        f"{setting.name} is {setting.value!r}, and should be {setting.rendered!r}"
        for setting in settings
        if setting.value != setting.rendered
    ]


def _environment_problems(check: kinds.ConfigurationCheck, image: BuiltImage) -> list[str]:
    """Return a line for each variable that differs from the rendered one."""
    rendered = dict(check.environment)
    problems = []
    for name, value in sorted(image.environment.items()):
        if name not in rendered and not check.others:
            problems.append(f"ENV {name} is {value!r}, and nothing sets it")
        elif name in rendered and value != rendered[name]:
            problems.append(f"ENV {name} is {value!r}, and should be {rendered[name]!r}")
    missing = [name for name in rendered if name not in image.environment]
    problems += [f"ENV {name} is missing" for name in missing]
    return problems


def history_problems(steps: Sequence[str], history: Sequence[HistoryEntry]) -> list[str]:
    """Return the first difference between these steps and the last layers of a history.

    One line at most.
    """
    all_steps = [_step_of(entry) for entry in history]
    layer_steps = [step for step in all_steps if step]
    if len(layer_steps) < len(steps):
        problem = (
            f"history has {len(layer_steps)} steps that make layers,"
            f" and should have {len(steps)} on the base image"
        )
        return [problem]
    own_steps = layer_steps[-len(steps) :]
    for number, (expected, actual) in enumerate(zip(steps, own_steps, strict=True), start=1):
        if actual != expected:
            problem = (
                f"history says of step {number} of {len(steps)} {actual!r:.200}, and should say"
                f" {expected!r:.200}"
            )
            return [problem]
    return []


def _step_of(entry: HistoryEntry) -> str:
    """Return an entry of a history in the form of ``render.steps.image_steps``.

    ``""`` for one that makes no layer.
    """
    text = " ".join(entry.created_by.split()).removesuffix(" # buildkit")
    # buildah, and Docker before BuildKit, write the shell, and "#(nop)" before an instruction that
    # is not a command. Build arguments stand before the shell: ``|2 a=b c=d /bin/sh -c ...``.
    before, shell, command = text.partition("/bin/sh -c ")
    first_word = before.split(" ")[0]
    is_command = first_word in ("", "RUN") or before.startswith("|")
    if shell and is_command and not command.startswith("#(nop)"):
        # buildah 1.28 writes the flags of RUN before the command, newer ones leave them out.
        return f"RUN {strip_flags(command)}"
    instruction = command.removeprefix("#(nop) ") if shell else text
    word = instruction.split(" ")[0]
    return word if word in ("COPY", "ADD") else ""


def test_start(check: kinds.StartCheck, pending: PendingResults) -> None:
    """A container starts through the entry point."""
    completed = pending.completed[check]()
    if completed.status != 0 or check.expect not in completed.output:
        _broken(
            f"a container with {shlex.join(check.arguments)} ended with status {completed.status}"
            f" and printed\n{_tail(completed.output)}"
        )


PROMISES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(QUESTIONS, test_probe),
    "path": test_path,
    "command": test_command,
    "import": test_import,
    "python-package": test_python_package,
    "python-imports": test_python_imports,
    "debian-package": test_debian_package,
    "owned-files": test_owned_files,
    "delivered-files": test_delivered_files,
    "makers-lists": test_makers_lists,
    "world-writable": test_world_writable,
    "privileged-files": test_privileged_files,
    "secrets": test_secrets,
    "size": test_size,
    "label": test_label,
    "configuration": test_configuration,
    "start": test_start,
}
"""Every kind of check, and its function."""
