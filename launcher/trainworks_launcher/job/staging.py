"""Make the command lines that fetch the user's code and install its requirements. Pure.

The programs of these command lines are fetch.py, install.py and codeartifact.py in programs/.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import nearest
from trainworks_launcher.contract.settings import Reader, region_of
from trainworks_launcher.environment.entry_point import REQUIREMENTS, Code, EntryPoint
from trainworks_launcher.environment.environment import BOTO3, Environment

_REPOSITORY_ARN = (
    r"arn:(?P<partition>[^:/]+):codeartifact:(?P<region>[a-z0-9-]+):(?P<owner>\d{12})"
    r":repository/(?P<domain>[a-z][a-z0-9-]+)/(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]+)"
)

_MAX_NAMED = 4
"""Number of distributions in a line of the log; a CUDA image keeps about twenty."""


class Repository(NamedTuple):
    """A package repository of AWS CodeArtifact.

    Attributes:
        region: AWS region.
        owner: Account number of the domain.
        domain: Name of the domain.
        repository: Name of the repository.
    """

    region: str
    owner: str
    domain: str
    repository: str


def parse_repository(arn: str) -> Repository:
    """Parse the ARN of a repository. Raises ValueError for another text.

    Source: service authorization reference, resource types of AWS CodeArtifact.

    >>> arn = "arn:aws:codeartifact:eu-west-1:123456789012:repository/shared/wheels"
    >>> parse_repository(arn).domain
    'shared'
    """
    match = re.fullmatch(_REPOSITORY_ARN, arn)
    if not match:
        raise ValueError(f"{arn!r} is not the ARN of a CodeArtifact repository")
    return Repository(match["region"], match["owner"], match["domain"], match["repository"])


def with_fetch(environment: Environment, reader: Reader) -> Code:
    """Return the user's code; remote code gets the command line that fetches the archive.

    Nothing is fetched. The reader gets a problem if no program can call AWS, or for credentials in
    the endpoint.
    """
    code = environment.code
    if not code.remote:
        return code
    endpoint = _s3_endpoint(reader)
    program = _aws_program(environment, "fetch.py", f"the code is at {code.archive}", reader)
    arguments = (
        code.archive,
        endpoint,
        region_of(reader.variables, reader.reserved),
        _aws_command_line(environment),
    )
    return code._replace(fetch=(*program, *arguments))


def _s3_endpoint(reader: Reader) -> str:
    """Return the user's endpoint of S3; ``""`` for the default.

    The reader gets a problem for credentials in the URL. The first variable that is set counts.
    """
    for name in names.S3_ENDPOINT_VARIABLES:
        endpoint = reader.variables.get(name, "")
        if not endpoint:
            continue
        if "@" in endpoint:
            advice = "leave them out: S3 takes credentials from AWS's own variables or from a role"
            reader.refuse("the endpoint has credentials in it", f"variable {name}", advice)
        return endpoint
    return ""


def installation(
    environment: Environment, code: Code, entry: EntryPoint, reader: Reader
) -> tuple[str, ...]:
    """Return the command line that installs the project and its requirements; ``()`` for none.

    For example ``python -I install.py -- . -r requirements.txt``. A project is installed only if
    its entry point is Python's, because a shell script may install the project in its own way. An
    installation of the image's build is not repeated, because the host may have no network.

    Nothing is installed. The reader gets a problem for each thing that is missing or wrong.
    """
    project: tuple[str, ...] = ()
    is_installed = code.project in code.installed
    if code.project and not is_installed and entry.kind in ("module", "package"):
        project = (".",)
    requirements = _requirements(code, reader)
    if not project and not requirements:
        return ()
    python = environment.programs.get("python", "")
    if not python and not entry.in_python:
        # For an entry point of Python environment/entry_point.py has refused the job.
        problem = f"Python is not installed in this image, and there is a {code.requirements}"
        reader.refuse(problem, "program python", "install python3, or leave the file out")
    program = f"{environment.launcher_directory}/programs/install.py"
    options = _install_options(environment, reader)
    install = (python, "-I", program, *options, "--", *project, *requirements)
    if project:
        # The code may be read-only, and pip writes beside it: copied.py installs from a copy.
        copy = f"{environment.launcher_directory}/programs/copied.py"
        install = (environment.launcher_python, "-I", copy, *install)
    return _with_repository(environment, install, reader)


def _requirements(code: Code, reader: Reader) -> tuple[str, ...]:
    """Return pip's arguments for the requirements, such as ``("-r", "requirements.txt")``.

    ``()`` without such a file, and if the image's build has installed the requirements. The reader
    gets a problem for a missing file that the job names.
    """
    file = code.requirements
    if file in code.installed:
        return ()
    if file in code.entries:
        return ("-r", file)
    if file != REQUIREMENTS and not code.remote:
        place = code.archive or code.directory
        where = f"{names.SOURCE_CODE_FILE}: requirements"
        reader.refuse(f"file not found: {file!r} in {place}", where, nearest(file, code.entries))
    return ()


def _install_options(environment: Environment, reader: Reader) -> list[str]:
    """Return the options of install.py, such as ``--strict`` and ``--keep=torch==2.9.1``.

    The reader gets a problem for a switch that is neither on nor off.
    """
    options: list[str] = []
    strict = reader.variables.get(names.STRICT_VARIABLE, "").strip() or "off"
    if strict not in ("on", "off"):
        where = f"variable {names.STRICT_VARIABLE}"
        reader.refuse(f"{strict!r} is neither on nor off", where, "write on or off")
    if strict == "on":
        options.append("--strict")
    if not environment.manifest.document:
        # Without a manifest file install.py cannot read which distributions to keep.
        protected = environment.manifest.protected
        options += [f"--keep={name}=={version}" for name, version in sorted(protected.items())]
    return options


def _with_repository(
    environment: Environment, install: tuple[str, ...], reader: Reader
) -> tuple[str, ...]:
    """Return the command line of an installation from the job's CodeArtifact repository.

    Its program codeartifact.py gets a token, and starts the installation. Without a repository
    ``install`` is returned as it is, also after a problem with the repository's ARN, which the
    reader gets.
    """
    arn = reader.variables.get(names.REPOSITORY_VARIABLE, "").strip()
    if not arn:
        return install
    try:
        repository = parse_repository(arn)
    except ValueError as error:
        advice = "its form is arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY"
        reader.refuse(str(error), f"variable {names.REPOSITORY_VARIABLE}", advice)
        return install
    reason = f"{names.REPOSITORY_VARIABLE} is set"
    program = _aws_program(environment, "codeartifact.py", reason, reader)
    arguments = (
        repository.region,
        repository.owner,
        repository.domain,
        repository.repository,
        _aws_command_line(environment),
    )
    return (*program, *arguments, "--", *install)


LOCKS = ("uv.lock", "pylock.toml", "poetry.lock", "pdm.lock", "Pipfile.lock", "environment.yml")
"""Files of other tools at the root of the code that list its requirements."""


def ignored_lock_files(code: Code) -> tuple[str, ...]:
    """Return a line for the log about each file of LOCKS that no installation reads.

    ``()`` if the code has a requirements.txt, or was installed by the image's build.
    """
    if code.requirements in code.entries or code.installed:
        return ()
    lines = []
    for name in LOCKS:
        if name in code.entries:
            line = f"{name} is not read when a job starts; a {code.requirements} is"
            lines.append(line)
    return tuple(lines)


def why_kept(environment: Environment) -> str:
    """Return one sentence about the image's distributions that an installation keeps.

    For example ``the image's torch 2.9.1, numpy 2.3.4 stay: they are constraints``; ``""`` for an
    image without protected distributions.
    """
    protected = [f"{name} {version}" for name, version in environment.manifest.protected.items()]
    if not protected:
        return ""
    listed = ", ".join(protected[:_MAX_NAMED])
    if len(protected) > _MAX_NAMED:
        listed += f" and {len(protected) - _MAX_NAMED} more"
    return f"the image's {listed} stay: they are constraints"


def _aws_program(
    environment: Environment, file: str, reason: str, reader: Reader
) -> tuple[str, ...]:
    """Return the command line of a program that calls AWS.

    The Python with boto3 runs the program. Without boto3 the launcher's Python does, and the
    program calls the aws command line. The reader gets a problem if the image has neither.

    Args:
        environment: The environment of the host.
        file: The program's file in programs/, such as ``fetch.py``.
        reason: A clause about the need, for a refusal, such as ``the code is at s3://...``.
        reader: The reader of the program.
    """
    if not environment.aws_client:
        advice = "install one of them in the image (pip install boto3)"
        problem = f"neither boto3 nor the aws command line is installed, and {reason}"
        reader.refuse(problem, f"image {environment.manifest.name!r}", advice)
    python = environment.launcher_python
    if environment.aws_client == BOTO3:
        python = environment.programs.get("python", "")
    return (python, "-I", f"{environment.launcher_directory}/programs/{file}")


def _aws_command_line(environment: Environment) -> str:
    """Return the path of the aws command line; ``""`` if boto3 is used."""
    if environment.aws_client == BOTO3:
        return ""
    return environment.aws_client
