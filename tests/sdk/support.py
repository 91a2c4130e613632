"""Local mode of the SageMaker Python SDK: a real client in its own environment,
real containers, no network for either.

The client runs in an empty network namespace, so that every look-up outside fails; Docker is a
socket in the file system. The job's containers are on the network that the client makes for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from trainworks.host.pip import pip_configuration
from trainworks.host.settings import read_host_settings
from trainworks_testing.clock import PATIENCE

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
PEERS = HERE.parents[1] / ".cache" / "peers"

BUCKET = "trainworks-test"
"""Of the S3 server, where there is one."""

PIP_CHANNEL = "pip"
"""Input channel that carries this machine's pip settings into a job that installs requirements."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of a job.

    Attributes:
        error: The client's exception, as ``Type: text``, empty if it raised none.
        output: Output of the client and the containers.
        model: Files of the model archive that the client handed back, name to content.
        outputs: Files of the archive of the hosts' output directories,
            likewise; there on failure too.
    """

    error: str
    output: str
    model: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def world(self) -> list[dict[str, Any]]:
        """Return the report of each process to rank 0, in the order of ranks."""
        assert self.error == "", self.output[-6000:]
        processes: list[dict[str, Any]] = json.loads(self.model["model.json"])
        return processes


def run_client(line: str, job: Mapping[str, Any], folder: Path, store: str = "") -> Ended:
    """Run a job with the client of a line (``v2``, ``v3``) in a folder of its
    own, and leave no container behind.

    With an S3 server at ``store`` (line v2 only) code and model go through it;
    the client is not isolated then.
    """
    python = PEERS / f"sdk-{line}" / "bin" / "python"
    if not python.is_file():
        pytest.fail(f"{python} is missing; make peers makes it")
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(
        json.dumps({**job, "store": store, "bucket": BUCKET}), encoding="utf-8"
    )
    # Telemetry is the one thing that the clients send anywhere in local mode.
    settings = {
        "SchemaVersion": "1.0",
        "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
    }
    (folder / "config.yaml").write_text(json.dumps(settings), encoding="utf-8")
    variables = {
        name: os.environ[name]
        for name in ("PATH", "DOCKER_HOST", "DOCKER_CONFIG")
        if name in os.environ
    }
    environment = {
        **variables,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(folder / "config.yaml"),
    }
    if store:
        environment |= {
            "AWS_ENDPOINT_URL_S3": store,
            "AWS_ENDPOINT_URL_STS": store,
            "NO_PROXY": urlsplit(store).hostname or "",
        }
    isolated: tuple[str, ...] = (
        ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")
    )
    with removed_afterwards(folder, environment):
        try:
            prefix = () if store else isolated
            done = subprocess.run(
                (
                    *prefix,
                    str(python),
                    str(HERE / "clients" / f"{line}.py"),
                    "job.json",
                ),
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            client_output = (error.stdout or b"").decode(errors="replace")
            place = _where_it_is(folder, environment)
            pytest.fail(f"the client has not ended\n{client_output[-6000:]}\n{place}")
        output = done.stdout.decode(errors="replace")
        assert done.returncode == 0, output[-6000:]
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        model = (
            _read_archive(Path(urlsplit(result["model"]).path))
            if result["model"] and not store
            else {}
        )
        return Ended(
            error=result["error"],
            output=output,
            model=model,
            outputs={
                name: text
                for archive in folder.glob("**/compressed_artifacts/output.tar.gz")
                for name, text in _read_archive(archive).items()
            },
        )


def _where_it_is(folder: Path, environment: Mapping[str, str]) -> str:
    """Return the processes and the last lines of the containers of a job that does not end."""
    places: list[str] = []

    def ask(*words: str) -> str:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        return done.stdout + done.stderr

    for file in _compose_files(folder):
        for container in ask(
            "docker-compose", "--file", str(file), "ps", "--all", "--quiet"
        ).split():
            state = ask(
                "docker",
                "inspect",
                "--format",
                "{{.Name}} {{.State.Status}} {{.State.ExitCode}}",
                container,
            )
            places += [
                state,
                ask("docker", "top", container),
                ask("docker", "logs", "--tail", "40", container),
            ]
    return "\n".join(places)


def _compose_files(folder: Path) -> list[Path]:
    return [*folder.glob("docker-compose.yaml"), *folder.glob("*/docker-compose.yaml")]


@contextmanager
def removed_afterwards(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Remove the containers and networks of every Compose file below a folder:
    both clients leave them behind.
    """
    try:
        yield
    finally:
        for file in _compose_files(folder):
            down = ("docker-compose", "--file", str(file), "down", "--timeout", "1")
            subprocess.run(down, env=environment, capture_output=True, timeout=300, check=False)


def host_address(image: str, *, docker: tuple[str, ...] = ("docker",)) -> str:
    """Return the address at which Docker's containers reach this host: where a container sends all
    that is not near it.

    The daemon's own description of its bridge has no gateway after the daemon's
    first start, only a subnet.
    """
    words = (*docker, "run", "--rm", "--entrypoint", "cat", image, "/proc/net/route")
    routes = subprocess.run(words, capture_output=True, check=True, text=True, timeout=300).stdout
    # Interface, destination, gateway: numbers in the byte order of the machine,
    # which is little-endian.
    rows = [line.split() for line in routes.splitlines()[1:]]
    gateway = next(row[2] for row in rows if row[1] == "00000000")
    return str(ip_address(bytes.fromhex(gateway)[::-1]))


def _read_archive(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name: content.read().decode()
            for member in archive.getmembers()
            if member.isfile() and (content := archive.extractfile(member)) is not None
        }


def source(folder: Path, program: str, requirements: str = "") -> Path:
    """Return a folder of user code with a program of ours and, where there are
    any, its requirements.txt.
    """
    code = folder / "code"
    code.mkdir(parents=True)
    (code / program).write_bytes((PROGRAMS / program).read_bytes())
    if requirements:
        (code / "requirements.txt").write_text(requirements, encoding="utf-8")
    return code


def pip_settings(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return a folder that carries this machine's pip settings into a job, and
    the variables that make pip read it.

    Jobs on a machine behind a mirror or an intercepting proxy need both, as docs/jobs.md says.
    """
    settings = read_host_settings(os.environ)
    folder.mkdir()
    (folder / "pip.conf").write_text(pip_configuration(settings.pip), encoding="utf-8")
    inside = f"/opt/ml/input/data/{PIP_CHANNEL}"
    variables = {"PIP_CONFIG_FILE": f"{inside}/pip.conf", **settings.proxies}
    for name, content, variable in (
        ("ca.pem", settings.ca, "PIP_CERT"),
        ("netrc", settings.netrc, "NETRC"),
    ):
        if content:
            (folder / name).write_bytes(content)
            variables[variable] = f"{inside}/{name}"
    return folder, variables
