"""The peer of the builds: one plain Dockerfile with one stage, as people write
them, with the same content as ours.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainworks.build.context import add_local_wheels
from trainworks.engine.protocol import BuildRequest, Secret
from trainworks.host.settings import HostSettings
from trainworks.plan.model import ImagePlan

WORDS = """\
a Dockerfile with one stage, as people write them: from the same base image, `apt-get install` of
our Debian packages with compiler, headers, pip and venv, then `pip install --no-cache-dir` of the
same locked files with the same hashes in one step, then at the end, where a change costs least,
`COPY` of the launcher, `pip install` of it and `gcc` of the hostname shim. It is built by the same
engine with the same mirrors, proxies and local files, timed without any process of ours around it.
It differs from ours where such Dockerfiles do: it keeps compiler and headers, and pip writes
bytecode (`.pyc`) of everything, ours only of what every job imports."""

TEMPLATE = """\
FROM {base}
RUN --mount=type=secret,id=apt.conf --mount=type=secret,id=sources.list \\
    --mount=type=secret,id=ca.pem \\
    export APT_CONFIG=/run/secrets/apt.conf DEBIAN_FRONTEND=noninteractive \\
    && apt-get update \\
    && apt-get install -y --no-install-recommends {debian} \\
    && rm -rf /var/lib/apt/lists/* \\
    && mkdir -p /run/sshd /opt/ml/code /opt/ml/model \\
    && mkdir -p /opt/ml/input/config /opt/ml/input/data /opt/ml/output/data
ENV {environment}
COPY requirements.txt /tmp/requirements.txt
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem --mount=type=secret,id=netrc \\
    --mount=type=bind,source=wheels,target=/run/wheels \\
    {pip_environment} \\
    && python3 -m venv /opt/venv \\
    && pip install --no-cache-dir {sources} -r /tmp/requirements.txt \\
    && echo /opt/venv/lib > /etc/ld.so.conf.d/open-mpi.conf && ldconfig
COPY image.json /opt/trainworks/image.json
COPY launcher /opt/launcher
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem --mount=type=secret,id=netrc \\
    {pip_environment} \\
    && pip install --no-cache-dir /opt/launcher \\
    && mkdir -p /opt/trainworks/lib \\
    && gcc -O2 -shared -fPIC -o /opt/trainworks/lib/libhostname.so \\
        /opt/launcher/hostname_shim/hostname.c
WORKDIR /opt/ml/code
ENTRYPOINT ["train"]
"""

PIP_ENVIRONMENT = """\
export PIP_CONFIG_FILE=/run/secrets/pip.conf NETRC=/run/secrets/netrc \\
    && if [ -s /run/secrets/ca.pem ]; then export PIP_CERT=/run/secrets/ca.pem; fi"""
"""The settings of this machine, as our own steps get them.

On a machine without any, these lines do nothing.
"""

MORE_PACKAGES = ("gcc", "libc6-dev", "python3", "python3-dev", "python3-pip", "python3-venv")
"""What people install to have pip and to build what has no wheel.

Ours has it in a build stage only.
"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The peer's build context, written, and how it is built.

    Attributes:
        context: Its folder.
        launcher: The file to change for a change of the launcher.
        tag: The image's name.
    """

    context: Path
    launcher: Path
    tag: str
    plan: ImagePlan
    settings: HostSettings

    def request(self, *, no_cache: bool = False) -> BuildRequest:
        """Return what the engine is asked for."""
        secrets = self.settings.secrets(self.plan.base.suite, self.plan.wheel_index)
        return BuildRequest(
            name="peer",
            context=self.context,
            tags=(self.tag,),
            secrets=tuple(
                Secret(identifier=name, content=content) for name, content in secrets.items()
            ),
            arguments=self.settings.proxies,
            no_cache=no_cache,
        )


def write_peer(
    plan: ImagePlan, manifest: bytes, launcher: Path, settings: HostSettings, folder: Path, tag: str
) -> Peer:
    """Write the peer of a plan.

    Args:
        plan: What the image has in it.
        manifest: Content of ``image.json``.
        launcher: The launcher's project.
        settings: This machine's settings.
        folder: An empty folder.
        tag: Name of the image.
    """
    steps = [step for step in plan.steps if step.python and step.component != "builder"]
    requirements = [
        f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
        for step in steps
        for package in step.python
    ]
    (folder / "requirements.txt").write_text("".join(requirements), encoding="utf-8")
    (folder / "image.json").write_bytes(manifest)
    for step in plan.steps:
        if step.python:
            (folder / "wheels" / step.component).mkdir(parents=True)
    add_local_wheels(plan, settings.pip, folder)
    shutil.copytree(
        launcher,
        folder / "launcher",
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", ".ruff_cache", ".mypy_cache"),
    )
    sources = [f"--find-links /run/wheels/{step.component}" for step in steps]
    if plan.wheel_index and not settings.pip.names_a_source:
        sources.append(f"--extra-index-url {plan.wheel_index}")
    dockerfile = TEMPLATE.format(
        base=plan.image,
        debian=" ".join(sorted({*_debian(plan), *MORE_PACKAGES})),
        environment=" ".join(f'{name}="{value}"' for name, value in plan.environment.items()),
        pip_environment=PIP_ENVIRONMENT,
        sources=" ".join(sources),
    )
    (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
    return Peer(
        context=folder,
        launcher=folder / "launcher" / "trainworks_launcher" / "contract" / "names.py",
        tag=tag,
        plan=plan,
        settings=settings,
    )


def _debian(plan: ImagePlan) -> Iterator[str]:
    """Yield the Debian packages of a plan; the step ``system`` has those of all."""
    for step in plan.steps:
        if step.component == "system":
            yield from step.debian
