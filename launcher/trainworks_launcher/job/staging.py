"""How code and requirements come to a host: the command lines of the programs that bring them.

Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import nearest
from trainworks_launcher.contract.settings import Reader, region_of
from trainworks_launcher.environment.entry_point import REQUIREMENTS, Code, EntryPoint
from trainworks_launcher.environment.environment import BOTO3, Environment

_ARN = (
    r"arn:(?P<partition>[^:/]+):codeartifact:(?P<region>[a-z0-9-]+):(?P<owner>\d{12})"
    r":repository/(?P<domain>[a-z][a-z0-9-]+)/(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]+)"
)

_NAMED = 4
"""Distributions that a text names; a CUDA image keeps about twenty."""


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
    """Return the repository that an ARN names. Raises ValueError for anything else.

    Source: service authorization reference, resource types of AWS CodeArtifact.

    >>> arn = "arn:aws:codeartifact:eu-west-1:123456789012:repository/shared/wheels"
    >>> parse_repository(arn).domain
    'shared'
    """
    match = re.fullmatch(_ARN, arn)
    if not match:
        raise ValueError(f"{arn!r} is not the ARN of a CodeArtifact repository")
    return Repository(match["region"], match["owner"], match["domain"], match["repository"])


def with_fetch(environment: Environment, reader: Reader) -> Code:
    """Return the code, with the command line that fetches it if it is remote."""
    code = environment.code
    if not code.remote:
        return code
    variables = reader.variables
    endpoint = next(
        (variables[name] for name in names.S3_ENDPOINT_VARIABLES if variables.get(name)), ""
    )
    if "@" in endpoint:
        where = next(name for name in names.S3_ENDPOINT_VARIABLES if variables.get(name))
        advice = "leave them out: S3 takes credentials from AWS's own variables or from a role"
        reader.refuse("the endpoint has credentials in it", f"variable {where}", advice)
    program = _program(environment, "fetch.py", f"the code is at {code.archive}", reader)
    words = (
        code.archive,
        endpoint,
        region_of(variables, reader.reserved),
        _command_line(environment),
    )
    return code._replace(fetch=(*program, *words))


def installation(
    environment: Environment, code: Code, entry: EntryPoint, reader: Reader
) -> tuple[str, ...]:
    """Return the command line that installs the project and its requirements; () for none.

    A project is installed where its entry point is Python's: a shell script may want to do that in
    its own way. What was installed with this code when the image was built is not installed again:
    the host may have no network.
    """
    is_missing = code.project and code.project not in code.installed
    project = (".",) if is_missing and entry.kind in ("module", "package") else ()
    listed = ("-r", code.requirements) if code.requirements in code.entries else ()
    if code.requirements in code.installed:
        listed = ()
    elif not listed and code.requirements != REQUIREMENTS and not code.remote:
        place = code.archive or code.directory
        where, advice = (
            f"{names.SOURCE_CODE_FILE}: requirements",
            nearest(code.requirements, code.entries),
        )
        reader.refuse(f"file not found: {code.requirements!r} in {place}", where, advice)
    if not project and not listed:
        return ()
    python = environment.programs.get("python", "")
    if not python and not entry.in_python:  # else it is a problem already
        problem = f"Python is not installed in this image, and there is a {code.requirements}"
        reader.refuse(problem, "program python", "install python3, or leave the file out")
    program = f"{environment.launcher_directory}/programs/install.py"
    strict = reader.variables.get(names.STRICT_VARIABLE, "").strip() or "off"
    if strict not in ("on", "off"):
        reader.refuse(
            f"{strict!r} is neither on nor off",
            f"variable {names.STRICT_VARIABLE}",
            "write on or off",
        )
    options = ["--strict"] if strict == "on" else []
    if not environment.manifest.document:
        # Nothing on the disk says what is kept: it was observed.
        kept = environment.manifest.protected
        options += [f"--keep={name}=={version}" for name, version in sorted(kept.items())]
    install = (python, "-I", program, *options, "--", *project, *listed)
    if project:
        install = (
            environment.launcher_python,
            "-I",
            f"{environment.launcher_directory}/programs/copied.py",
            *install,
        )
    arn = reader.variables.get(names.REPOSITORY_VARIABLE, "").strip()
    if not arn:
        return install
    where = f"variable {names.REPOSITORY_VARIABLE}"
    try:
        found = parse_repository(arn)
    except ValueError as error:
        advice = "its form is arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY"
        reader.refuse(str(error), where, advice)
        return install
    asking = _program(environment, "codeartifact.py", f"{names.REPOSITORY_VARIABLE} is set", reader)
    words = (found.region, found.owner, found.domain, found.repository, _command_line(environment))
    return (*asking, *words, "--", *install)


LOCKS = ("uv.lock", "pylock.toml", "poetry.lock", "pdm.lock", "Pipfile.lock", "environment.yml")
"""Files of other tools at the root of the code that say what it needs."""


def ignored_lock_files(code: Code) -> tuple[str, ...]:
    """Return lines for the log: which files that look like requirements no
    installation at the start reads.
    """
    if code.requirements in code.entries or code.installed:
        return ()
    return tuple(
        f"{name} is not read when a job starts: pip reads a {code.requirements}"
        for name in LOCKS
        if name in code.entries
    )


def why_kept(environment: Environment) -> str:
    """Return which of the image's distributions an installation keeps, for a person.

    ``""`` for an image that does not say.
    """
    protected = [f"{name} {version}" for name, version in environment.manifest.protected.items()]
    if not protected:
        return ""
    more = f" and {len(protected) - _NAMED} more" if len(protected) > _NAMED else ""
    return f"the image's {', '.join(protected[:_NAMED])}{more} stay: they are constraints"


def _program(environment: Environment, name: str, reason: str, reader: Reader) -> tuple[str, ...]:
    """Return how a program that asks AWS is started: with the Python that has
    boto3, else with the launcher's.
    """
    if not environment.aws_client:
        advice = "install one of them in the image (pip install boto3)"
        problem = f"neither boto3 nor the aws command line is installed, and {reason}"
        reader.refuse(problem, f"image {environment.manifest.name!r}", advice)
    has_library = environment.aws_client == BOTO3
    python = environment.programs.get("python", "") if has_library else environment.launcher_python
    return (python, "-I", f"{environment.launcher_directory}/programs/{name}")


def _command_line(environment: Environment) -> str:
    """Return the path of the aws command line, if that is what is used; else ""."""
    return "" if environment.aws_client == BOTO3 else environment.aws_client
