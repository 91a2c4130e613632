"""Run pip with a private index of AWS CodeArtifact.

Run as ``python -I codeartifact.py REGION OWNER DOMAIN REPOSITORY CLI -- PIP...``: with the user's
Python and its boto3 if CLI is "", else with the aws command line at CLI. The program gets a token
and the address of the repository, writes the token into a netrc file in the host's runtime
directory that only this user can read, runs pip with the address as its index, and removes the
file. So the token is in no argument of a process (pip would hand a URL in its options on to its own
children) and in no output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# As in contract/names.py: a file that the user's Python runs imports no other module of ours.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE
_USER = "aws"  # the name that goes with a token; source: CodeArtifact user guide, "Configure pip"
_CONNECT_SECONDS = 10
_ATTEMPTS = 5


class CodeArtifactError(Exception):
    """The token or the address could not be read."""


def ask_boto3(region: str, owner: str, domain: str, repository: str) -> tuple[str, str]:
    """Ask CodeArtifact for a token, with boto3.

    Args:
        region: Region of the domain.
        owner: Number of the account that owns the domain.
        domain: The domain.
        repository: The repository.

    Returns:
        (token, address of the repository).

    Raises:
        CodeArtifactError: There are no credentials, or the service refuses.
    """
    import boto3  # type: ignore[import-not-found, unused-ignore]
    from botocore.config import Config  # type: ignore[import-not-found, unused-ignore]
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-not-found, unused-ignore]

    config = Config(
        connect_timeout=_CONNECT_SECONDS, retries={"max_attempts": _ATTEMPTS, "mode": "standard"}
    )
    try:
        client = boto3.client("codeartifact", region_name=region, config=config)
        authorization = client.get_authorization_token(domain=domain, domainOwner=owner)
        endpoint = client.get_repository_endpoint(
            domain=domain, domainOwner=owner, repository=repository, format="pypi"
        )
        return authorization["authorizationToken"], endpoint["repositoryEndpoint"]
    except (BotoCoreError, ClientError, ValueError) as error:
        raise CodeArtifactError(f"{type(error).__name__}: {error}") from error


def ask_cli(region: str, owner: str, domain: str, repository: str, program: str) -> tuple[str, str]:
    """Ask CodeArtifact for a token, with the aws command line at ``program``.

    The token comes through a pipe. The other parameters, the result and the errors are those of
    ``ask_boto3``.
    """
    place = ("--domain", domain, "--domain-owner", owner, "--region", region)
    common = (*place, "--output", "text", "--cli-connect-timeout", str(_CONNECT_SECONDS))
    token = _answer(
        program, "codeartifact", "get-authorization-token", "--query", "authorizationToken", *common
    )
    words = ("--repository", repository, "--format", "pypi", "--query", "repositoryEndpoint")
    return token, _answer(program, "codeartifact", "get-repository-endpoint", *words, *common)


def _answer(*words: str) -> str:
    """Run a command, and return its output.

    Raises CodeArtifactError, with the last line of its errors, if the command fails.
    """
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise CodeArtifactError(f"{words[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        reasons = [line.strip() for line in lines if line.strip()]
        reasons = reasons or [f"{words[0]} ended with status {done.returncode}"]
        raise CodeArtifactError(reasons[-1])
    return done.stdout.decode().strip()


def write_netrc(path: Path, host: str, token: str) -> None:
    """Write a netrc file with the token for one host, then the content of the user's own file.

    Args:
        path: The new file, which only this user can read.
        host: Host of the repository.
        token: The token.

    Raises:
        OSError: The file exists, or cannot be written.
    """
    own = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        rest = own.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        rest = ""
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(f"machine {host} login {_USER} password {token}\n{rest}")
    except OSError:
        # A part of it may have the token.
        path.unlink()
        raise


def main(arguments: list[str]) -> int:
    """Run pip with the repository as its index.

    Prints the address of the index. The netrc file with the token exists only while pip runs.

    Args:
        arguments: REGION, OWNER, DOMAIN, REPOSITORY, CLI, ``--`` and pip's command line.

    Returns:
        pip's status; 1, with one line on standard error, without access to the repository.

    Raises:
        OSError: The netrc file cannot be written, or pip cannot be started.
    """
    from urllib.parse import urlsplit

    # CLI is "" where boto3 is asked.
    region, owner, domain, repository, program, _separator, *pip = arguments
    try:
        if program:
            token, address = ask_cli(region, owner, domain, repository, program)
        else:
            token, address = ask_boto3(region, owner, domain, repository)
    except CodeArtifactError as error:
        place = f"{domain}/{repository} of account {owner} in {region}"
        sys.stderr.write(f"trainworks: CodeArtifact gives no access to {place}: {error}\n")
        return 1
    netrc = Path(os.environ.get(_RUNTIME_DIRECTORY, "."), "netrc")
    index = f"{address.rstrip('/')}/simple/"
    sys.stdout.write(f"trainworks: pip installs from {index}\n")
    sys.stdout.flush()
    write_netrc(netrc, urlsplit(address).hostname or "", token)
    try:
        environment = {**os.environ, "NETRC": str(netrc), "PIP_INDEX_URL": index}
        return subprocess.run(pip, env=environment, check=False).returncode
    finally:
        netrc.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
