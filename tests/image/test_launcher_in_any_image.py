"""The launcher in images that are laid out as NVIDIA's, AWS's and a user's own:
a wheel and an entry point.

Their files are those of the `cpu` image: Python, torch and their requirements, and nothing else of
this project.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image.jobs import RESTRICTED, assert_trained, prepare, run_on_hosts
from image.support import ROOT, BuiltByCommand
from image.test_imagetest import ignore
from trainworks.engine.protocol import BuildRequest, Completed, Engine, Job, Mount

pytestmark = pytest.mark.engine

OURS = "/opt/venv /opt/amazon /opt/trainworks /opt/ml /usr/local/bin/*"
"""Files of the `cpu` image that are this project's, and no part of theirs."""

KEEP = (
    "torch torchgen functorch numpy numpy.libs sympy mpmath networkx jinja2 markupsafe filelock"
    " fsspec typing_extensions pip"
)
"""Packages that an image with torch has."""


@dataclass(frozen=True)
class Layout:
    """How an image with torch is laid out.

    Attributes:
        move: Shell that brings the packages of $PACKAGES to their place, and
            torchrun beside Python.
        path: Its PATH.
        python: The Python with torch.
        train: Words of the entry point.
    """

    move: str
    path: str
    python: str
    train: tuple[str, ...] = ("train",)


SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

LAYOUTS = {
    # NVIDIA's containers: the distribution's Python, packages below /usr/local.
    "dist-packages": Layout(
        move=(
            "mv $PACKAGES/* /usr/local/lib/python3*/dist-packages/"
            " && (echo '#!/usr/bin/python3'; tail -n +2 $TORCHRUN) > /usr/local/bin/torchrun"
        ),
        path=SYSTEM_PATH,
        python="/usr/bin/python3",
    ),
    # AWS's older containers: a Python of its own below a prefix, without pyvenv.cfg.
    "conda": Layout(
        move=(
            "mkdir -p /opt/conda/bin /opt/conda/lib /opt/conda/conda-meta && cp $(readlink -f"
            " /usr/bin/python3) /opt/conda/bin/python3 && ln -s python3 /opt/conda/bin/python && cp"
            " -r /usr/lib/python3.* /opt/conda/lib/ && rm -f"
            " /opt/conda/lib/python3*/EXTERNALLY-MANAGED && SITE=$(/opt/conda/bin/python3 -c"
            " 'import site; print(site.getsitepackages()[0])') && mkdir -p $SITE && mv $PACKAGES/*"
            " $SITE/ && (echo '#!/opt/conda/bin/python'; tail -n +2 $TORCHRUN) >"
            " /opt/conda/bin/torchrun"
        ),
        # The second folder is Debian's, for pip.
        path=f"/opt/conda/bin:/opt/conda/local/bin:{SYSTEM_PATH}",
        python="/opt/conda/bin/python3",
    ),
    # A user's own: a virtual environment that is on no PATH.
    "venv": Layout(
        move=(
            "python3 -m venv --without-pip /opt/pytorch && mv $PACKAGES/*"
            " /opt/pytorch/lib/python3*/site-packages/ && (echo '#!/opt/pytorch/bin/python'; tail"
            " -n +2 $TORCHRUN) > /opt/pytorch/bin/torchrun"
        ),
        path=SYSTEM_PATH,
        python="/opt/pytorch/bin/python3",
        train=("/opt/pytorch/bin/train",),
    ),
}

# Stand-ins for their own entry points: NVIDIA's prints a banner and becomes the command; AWS's
# stays, and runs the command as a child of a shell with job control.
ENTRY_POINTS = {
    "becomes-the-command": '#!/bin/sh\necho "a banner"\nexec "$@"\n',
    "runs-the-command": '#!/bin/bash -m\nif [ "$1" = train ]; then train; else eval "$@"; fi\n',
}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the launcher's wheel."""
    folder = tmp_path_factory.mktemp("launcher-wheel")
    shutil.copytree(
        ROOT / "launcher",
        folder / "tree",
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"),
    )
    uv = Path(sys.executable).with_name("uv")
    command = (
        str(uv),
        "build",
        "--quiet",
        "--wheel",
        "--out-dir",
        str(folder),
        str(folder / "tree"),
    )
    subprocess.run(command, check=True, timeout=600)
    (wheel_file,) = folder.glob("*.whl")
    return wheel_file


@dataclass(frozen=True)
class Theirs:
    """An image of others with the launcher in it."""

    engine: Engine
    reference: str
    layout: Layout


RECIPE = """\
FROM {base} AS donor
USER root
ENV PIP_CONSTRAINT= UV_CONSTRAINT= LD_LIBRARY_PATH=
RUN cd /opt/venv/lib/python3*/site-packages && ls -d * | grep -Ev '{kept}' | xargs rm -rf \\
 && mkdir /tmp/packages && mv * /tmp/packages/ && cp /opt/venv/bin/torchrun /tmp/torchrun
ENV PATH={system_path}
RUN PACKAGES=/tmp/packages TORCHRUN=/tmp/torchrun && rm -rf {ours} && {move} && rm -rf /tmp/*
RUN chmod 755 $(find /usr/local/bin /opt -name torchrun)

FROM scratch AS theirs
COPY --from=donor / /
ENV PATH={path}
CMD ["bash"]

FROM theirs
COPY *.whl /tmp/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 {python} -m pip install --no-index /tmp/*.whl
ENTRYPOINT {entry_point}
"""
"""Their image, and then the lines that the page asks for."""


def write_dockerfile(folder: Path, layout: Layout, base: str) -> None:
    """Write the recipe of an image."""
    names = "|".join(re.escape(name) for name in KEEP.split())
    text = RECIPE.format(
        base=base,
        kept=f"^({names})([-_.].*)?$",
        ours=OURS,
        move=layout.move,
        system_path=SYSTEM_PATH,
        path=layout.path,
        python=layout.python,
        entry_point=json.dumps(layout.train),
    )
    (folder / "Dockerfile").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module", params=LAYOUTS)
def theirs(
    request: pytest.FixtureRequest,
    docker_image: BuiltByCommand,
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Theirs]:
    """Give an image of each layout."""
    layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("theirs")
    shutil.copy(wheel, folder)
    write_dockerfile(folder, layout, docker_image.reference)
    name = f"localhost/trainworks-theirs-{uuid.uuid4().hex[:12]}:test"
    docker_image.engine.build(BuildRequest(name="test", context=folder, tags=(name,)), ignore)
    try:
        yield Theirs(docker_image.engine, name, layout)
    finally:
        docker_image.engine.remove(name)


def run_train(their_image: Theirs, folder: Path, *words: str) -> Completed:
    """Run a host's job in a container of the image."""
    mounts = (Mount(source=folder, target="/opt/ml"),)
    return their_image.engine.run(
        their_image.reference, Job(command=words, mounts=mounts, timeout=300)
    )


def test_two_ranks_train_on_one_host(theirs: Theirs, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", "torch_distributed")
    done = run_train(theirs, folder)
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)
    line = (
        rf"this image has no manifest; it has Python 3\.\d+\.\d+ \({theirs.layout.python}\),"
        r" torch \S+"
    )
    assert re.search(line, done.output), done.output[-4000:]


def test_two_hosts_train_and_no_user_is_root(theirs: Theirs, network: Any, tmp_path: Path) -> None:
    hosts = ("algo-1", "algo-2")
    folders = {
        host: prepare(
            tmp_path / host, "torch_distributed", processes=1, host=host, hosts=",".join(hosts)
        )
        for host in hosts
    }
    subprocess.run(("chown", "-R", "1000", str(tmp_path)), check=True)
    output = run_on_hosts(
        theirs.reference, network, folders, settings={**RESTRICTED, "user": "1000"}
    )
    assert_trained(output, 2, folders["algo-1"])


def test_a_dead_rank_is_named_on_both_hosts(theirs: Theirs, network: Any, tmp_path: Path) -> None:
    hosts = ("algo-1", "algo-2")
    folders = {}
    for host in hosts:
        folders[host] = prepare(
            tmp_path / host, "torch_distributed", processes=1, host=host, hosts=",".join(hosts)
        )
        script = folders[host] / "code" / "train.py"
        dies = "import os\nif os.environ['RANK'] == '1': raise ValueError('the label is 11')\n"
        script.write_text(dies + script.read_text(encoding="utf-8"), encoding="utf-8")
    run_on_hosts(theirs.reference, network, folders, status=1)
    causes = [
        json.loads((folder / "output" / "failure.json").read_text(encoding="utf-8"))
        for folder in folders.values()
    ]
    assert [(cause["host"], cause["rank"]) for cause in causes] == [("algo-2", 1)] * 2
    assert all("ValueError: the label is 11" in cause["cause"] for cause in causes)


def test_torch_of_the_image_is_kept(theirs: Theirs, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", "torch_distributed")
    (folder / "code" / "requirements.txt").write_text("torch>=99\n", encoding="utf-8")
    done = run_train(theirs, folder)
    assert done.status == 65, done.output[-4000:]
    assert "torch>=99, and this image has torch" in done.output


def test_a_mode_without_its_program_is_refused(theirs: Theirs, tmp_path: Path) -> None:
    done = run_train(theirs, prepare(tmp_path / "ml", "mpi"))
    assert done.status == 64, done.output
    assert "mpirun is not installed, and the job asks for mpi" in done.output


def test_failed_ranks_are_started_again(theirs: Theirs, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", "torch_distributed")
    script = folder / "code" / "train.py"
    fails_once = "import os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(3)\n"
    script.write_text(fails_once + script.read_text(encoding="utf-8"), encoding="utf-8")
    file = folder / "input" / "config" / "hyperparameters.json"
    hyperparameters = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(
        json.dumps({**hyperparameters, "sagemaker_torch_distributed_max_restarts": "1"}),
        encoding="utf-8",
    )
    done = run_train(theirs, folder)
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)


@pytest.mark.parametrize("kind", ENTRY_POINTS)
def test_their_own_entry_point_hands_on_to_the_launcher(
    theirs: Theirs, kind: str, tmp_path: Path
) -> None:
    if theirs.layout.train != ("train",):
        pytest.skip("their entry points look for programs on PATH")
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "their-entry").write_text(ENTRY_POINTS[kind], encoding="utf-8")
    lines = (
        f"FROM {theirs.reference}",
        "COPY --chmod=755 their-entry /usr/local/bin/",
        'ENTRYPOINT ["their-entry"]',
        'CMD ["train"]',
    )
    (tmp_path / "image" / "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    name = f"localhost/trainworks-theirs-{uuid.uuid4().hex[:12]}:test"
    theirs.engine.build(BuildRequest(name="test", context=tmp_path / "image", tags=(name,)), ignore)
    try:
        folder = prepare(tmp_path / "ml", "torch_distributed", processes=1)
        mounts = (Mount(source=folder, target="/opt/ml"),)
        done = theirs.engine.run(name, Job(command=("train",), mounts=mounts, timeout=300))
        assert done.status == 0, done.output[-4000:]
        assert_trained(done.output, 1, folder)
    finally:
        theirs.engine.remove(name)


def test_debians_mpirun_starts_ranks_on_two_hosts(
    theirs: Theirs, network: Any, tmp_path: Path
) -> None:
    """Open MPI 4, without ssh."""
    if theirs.layout.train != ("train",):
        pytest.skip("one layout with mpirun on PATH is enough")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").touch()
    name = f"localhost/trainworks-theirs-{uuid.uuid4().hex[:12]}:test"
    words = ("--base", theirs.reference, "--apt", "openmpi-bin", "--tag", name)
    source = ("--source", str(tmp_path / "source"), "--entry-point", "train.py")
    command = (sys.executable, str(ROOT / "build.py"), "extend", *words, *source)
    subprocess.run(command, check=True, timeout=900, capture_output=True)
    try:
        hosts = ("algo-1", "algo-2")
        folders = {
            host: prepare(tmp_path / host, "mpi", processes=1, host=host, hosts=",".join(hosts))
            for host in hosts
        }
        assert_trained(run_on_hosts(name, network, folders), 2, folders["algo-1"])
    finally:
        theirs.engine.remove(name)
