"""The launcher in images that are laid out as NVIDIA's, AWS's and a user's own: the lines of
docs/any-image.md.

Those with torch have the files of the `cpu` image: Python, torch and their requirements, and
nothing else of this project. Others have a Python of this machine, or are Ubuntu's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from documentation.blocks import Block, block_of
from image.jobs import (
    RESTRICTED,
    assert_trained,
    prepare,
    run_on_hosts,
    started_hosts,
    wait_for_hosts,
    wait_for_line,
)
from image.support import ROOT, BuiltByCommand
from image.test_imagetest import ignore
from trainworks.engine.protocol import BuildRequest, Completed, Engine, Job, Mount, Secret
from trainworks.host.bootstrap import SLIM
from trainworks.host.settings import HostSettings, read_host_settings

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
        python: The Python with torch. Its pip is beside it.
        replaced: Words in the lines of docs/any-image.md, and what the page says to write instead.
    """

    move: str
    path: str
    python: str
    replaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_on_path(self) -> bool:
        """Whether `train` is on PATH."""
        return str(Path(self.python).parent) in self.path.split(":")


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
        replaced={"pip install": "pip install --break-system-packages"},
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
        replaced={
            "pip install": "/opt/pytorch/bin/pip install",
            '"train"': '"/opt/pytorch/bin/train"',
        },
    ),
}

# Stand-ins for their own entry points: NVIDIA's prints a banner and becomes the command; AWS's
# stays, and runs the command as a child of a shell with job control.
ENTRY_POINTS = {
    "becomes-the-command": '#!/bin/sh\necho "a banner"\nexec "$@"\n',
    "runs-the-command": '#!/bin/bash -m\nif [ "$1" = train ]; then train; else eval "$@"; fi\n',
}


LEFT_OUT = shutil.ignore_patterns("*.egg-info", "__pycache__")
"""What is not part of the launcher's source."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the launcher's wheel."""
    folder = tmp_path_factory.mktemp("launcher-wheel")
    shutil.copytree(ROOT / "launcher", folder / "tree", ignore=LEFT_OUT)
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
    """An image of others.

    Attributes:
        engine: Has the image.
        plain: The image without the launcher.
        reference: The image with the launcher in it.
        layout: How it is laid out.
    """

    engine: Engine
    plain: str
    reference: str
    layout: Layout


PAGE = "docs/any-image.md"

PIP = (
    "printf '%s\\n' '#!{python}' 'from pip._internal.cli.main import main'"
    " 'raise SystemExit(main())' > {folder}/pip && chmod 755 {folder}/pip"
)
"""Shell that writes the program of pip, as pip itself installs it."""

RECIPE = """\
FROM {base} AS donor
USER root
ENV PIP_CONSTRAINT= UV_CONSTRAINT= LD_LIBRARY_PATH=
RUN cd /opt/venv/lib/python3*/site-packages && ls -d * | grep -Ev '{kept}' | xargs rm -rf \\
 && mkdir /tmp/packages && mv * /tmp/packages/ && cp /opt/venv/bin/torchrun /tmp/torchrun
ENV PATH={system_path}
RUN PACKAGES=/tmp/packages TORCHRUN=/tmp/torchrun && rm -rf {ours} && {move} && rm -rf /tmp/*
RUN chmod 755 $(find /usr/local/bin /opt -name torchrun) && {pip}

FROM scratch
COPY --from=donor / /
ENV PATH={path}
CMD ["bash"]
"""
"""Their image, without anything of ours."""


def recipe_of(layout: Layout, base: str) -> str:
    """Return the Dockerfile of an image without the launcher."""
    names = "|".join(re.escape(name) for name in KEEP.split())
    folder = Path(layout.python).parent
    return RECIPE.format(
        base=base,
        kept=f"^({names})([-_.].*)?$",
        ours=OURS,
        move=layout.move,
        pip=PIP.format(python=layout.python, folder=folder),
        system_path=SYSTEM_PATH,
        path=layout.path,
    )


def lines_of_the_page(image: str, replaced: Mapping[str, str]) -> str:
    """Return the Dockerfile of docs/any-image.md for an image, with other words in some places."""
    text = block_of(PAGE, "FROM your/image:tag")
    for words, own_words in {"your/image:tag": image, **replaced}.items():
        assert words in text
        text = text.replace(words, own_words)
    return text


@contextmanager
def built(
    engine: Engine, folder: Path, dockerfile: str, settings: HostSettings | None = None
) -> Iterator[str]:
    """Build an image from the text of a Dockerfile, and remove it afterwards.

    Args:
        engine: The engine that builds it.
        folder: The files that the Dockerfile copies; gets the Dockerfile.
        dockerfile: Its text.
        settings: Of this machine: for steps that download packages.
    """
    (folder / "Dockerfile").write_text(dockerfile, encoding="utf-8")
    name = f"localhost/trainworks-theirs-{uuid.uuid4().hex[:12]}:test"
    request = BuildRequest(name="test", context=folder, tags=(name,))
    if settings is not None:
        secrets = []
        for identifier, content in settings.secrets("bookworm", "").items():
            secrets.append(Secret(identifier=identifier, content=content))
        request = replace(request, secrets=tuple(secrets), arguments=settings.proxies)
    engine.build(request, ignore)
    try:
        yield name
    finally:
        engine.remove(name)


@pytest.fixture(scope="module", params=LAYOUTS)
def theirs(
    request: pytest.FixtureRequest,
    docker_image: BuiltByCommand,
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Theirs]:
    """Give an image of each layout."""
    layout = LAYOUTS[request.param]
    engine = docker_image.engine
    folder = tmp_path_factory.mktemp("theirs")
    shutil.copy(wheel, folder)
    with built(engine, folder, recipe_of(layout, docker_image.reference)) as plain:
        lines = lines_of_the_page(plain, layout.replaced)
        with built(engine, folder, lines) as reference:
            yield Theirs(engine, plain, reference, layout)


def run_train(engine: Engine, reference: str, folder: Path) -> Completed:
    """Run a host's job in a container of an image."""
    mounts = (Mount(source=folder, target="/opt/ml"),)
    return engine.run(reference, Job(command=("train",), mounts=mounts, timeout=300))


def lay_out(
    folder: Path, script: str, hosts: tuple[str, ...] = ("algo-1",), **switches: str
) -> dict[str, Path]:
    """Lay out /opt/ml of each host for a script of one file; return the folders.

    Args:
        folder: Gets a folder for each host.
        script: Text of the script.
        hosts: Names of the hosts.
        switches: Hyperparameters beside the name of the script.
    """
    folders = {}
    for host in hosts:
        for name in ("code", "input/config", "model", "output"):
            (folder / host / name).mkdir(parents=True)
        (folder / host / "code" / "train.py").write_text(script, encoding="utf-8")
        config = folder / host / "input" / "config"
        hyperparameters = json.dumps({"sagemaker_program": "train.py", **switches})
        (config / "hyperparameters.json").write_text(hyperparameters, encoding="utf-8")
        resources = {"current_host": host, "hosts": hosts, "network_interface_name": "eth0"}
        (config / "resourceconfig.json").write_text(json.dumps(resources), encoding="utf-8")
        folders[host] = folder / host
    return folders


HOSTS = ("algo-1", "algo-2")


def test_two_ranks_train_on_one_host(theirs: Theirs, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "ml", "torch_distributed")
    done = run_train(theirs.engine, theirs.reference, folder)
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)
    line = (
        rf"this image has no manifest; it has Python 3\.\d+\.\d+ \({theirs.layout.python}\),"
        r" torch \S+"
    )
    assert re.search(line, done.output), done.output[-4000:]


def test_two_hosts_train_and_no_user_is_root(theirs: Theirs, network: Any, tmp_path: Path) -> None:
    folders = {
        host: prepare(
            tmp_path / host, "torch_distributed", processes=1, host=host, hosts=",".join(HOSTS)
        )
        for host in HOSTS
    }
    subprocess.run(("chown", "-R", "1000", str(tmp_path)), check=True)
    output = run_on_hosts(
        theirs.reference, network, folders, settings={**RESTRICTED, "user": "1000"}
    )
    assert_trained(output, 2, folders["algo-1"])


def test_a_dead_rank_is_named_on_both_hosts(theirs: Theirs, network: Any, tmp_path: Path) -> None:
    folders = {}
    for host in HOSTS:
        folders[host] = prepare(
            tmp_path / host, "torch_distributed", processes=1, host=host, hosts=",".join(HOSTS)
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
    done = run_train(theirs.engine, theirs.reference, folder)
    assert done.status == 65, done.output[-4000:]
    assert "torch>=99, and this image has torch" in done.output


def test_a_mode_without_its_program_is_refused(theirs: Theirs, tmp_path: Path) -> None:
    done = run_train(theirs.engine, theirs.reference, prepare(tmp_path / "ml", "mpi"))
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
    done = run_train(theirs.engine, theirs.reference, folder)
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)


ALONE = """
import os, sys
print(os.environ["SM_CURRENT_HOST"], "runs in", sys.prefix, flush=True)
"""


def prefix_of(layout: Layout) -> Path:
    """Return the prefix of the Python with torch."""
    return Path(layout.python).parents[1]


def test_a_script_runs_alone_on_one_host(theirs: Theirs, tmp_path: Path) -> None:
    folders = lay_out(tmp_path, ALONE)
    done = run_train(theirs.engine, theirs.reference, folders["algo-1"])
    assert done.status == 0, done.output[-4000:]
    assert f"algo-1 runs in {prefix_of(theirs.layout)}\n" in done.output


def test_a_script_runs_on_each_of_two_hosts(theirs: Theirs, network: Any, tmp_path: Path) -> None:
    output = run_on_hosts(theirs.reference, network, lay_out(tmp_path, ALONE, HOSTS))
    for host in HOSTS:
        assert output.count(f"{host} runs in {prefix_of(theirs.layout)}\n") == 1


WAITS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("rank", os.environ["RANK"], "waits", flush=True)
signal.sigwait({signal.SIGTERM})
print("rank", os.environ["RANK"], "saves and ends", flush=True)
"""


def test_a_stop_of_one_host_ends_every_rank_once(
    theirs: Theirs, network: Any, tmp_path: Path
) -> None:
    """Both hosts end as stopped, with the status of the ranks."""
    switches = {
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
    }
    folders = lay_out(tmp_path, WAITS, HOSTS, **switches)
    with started_hosts(theirs.reference, network, folders) as containers:
        for container, ranks in zip(containers, ((0, 1), (2, 3)), strict=True):
            for rank in ranks:
                wait_for_line(container, f"rank {rank} waits")
        containers[1].kill(signal="SIGTERM")
        statuses, logs = wait_for_hosts(containers)
    assert statuses == [0, 0], "\n".join(logs)
    for log in logs:
        assert "job stopped (exit status 0" in log
    for rank in range(4):
        assert "".join(logs).count(f"rank {rank} saves and ends\n") == 1, "\n".join(logs)
    for folder in folders.values():
        assert not (folder / "output" / "success").exists()


@pytest.mark.parametrize("kind", ENTRY_POINTS)
def test_their_own_entry_point_hands_on_to_the_launcher(
    theirs: Theirs, kind: str, tmp_path: Path
) -> None:
    if not theirs.layout.is_on_path:
        pytest.skip("their entry points look for programs on PATH")
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "their-entry").write_text(ENTRY_POINTS[kind], encoding="utf-8")
    lines = (
        f"FROM {theirs.reference}",
        "COPY --chmod=755 their-entry /usr/local/bin/",
        'ENTRYPOINT ["their-entry"]',
        'CMD ["train"]',
    )
    with built(theirs.engine, tmp_path / "image", "\n".join(lines) + "\n") as name:
        folder = prepare(tmp_path / "ml", "torch_distributed", processes=1)
        done = run_train(theirs.engine, name, folder)
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 1, folder)


OPEN_MPI = """\
FROM {image}
RUN --mount=type=secret,id=apt.conf --mount=type=secret,id=sources.list \\
    --mount=type=secret,id=ca.pem export APT_CONFIG=/run/secrets/apt.conf \\
 && apt-get update && apt-get install --yes --no-install-recommends openmpi-bin
"""
"""Debian's mpirun, from the archive that this machine uses."""


@pytest.fixture(scope="module")
def with_mpirun(theirs: Theirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give their image with the launcher and Debian's mpirun: Open MPI 4, without ssh."""
    if not theirs.layout.is_on_path:
        pytest.skip("layouts with programs on PATH are enough")
    settings = read_host_settings(os.environ)
    folder = tmp_path_factory.mktemp("with-mpirun")
    dockerfile = OPEN_MPI.format(image=theirs.reference)
    with built(theirs.engine, folder, dockerfile, settings) as name:
        yield name


def test_debians_mpirun_starts_ranks_on_one_host(
    theirs: Theirs, with_mpirun: str, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "ml", "mpi")
    done = run_train(theirs.engine, with_mpirun, folder)
    assert done.status == 0, done.output[-4000:]
    assert_trained(done.output, 2, folder)


def test_debians_mpirun_starts_ranks_on_two_hosts(
    with_mpirun: str, network: Any, tmp_path: Path
) -> None:
    folders = {
        host: prepare(tmp_path / host, "mpi", processes=1, host=host, hosts=",".join(HOSTS))
        for host in HOSTS
    }
    assert_trained(run_on_hosts(with_mpirun, network, folders), 2, folders["algo-1"])


def test_the_lines_of_the_page_add_the_launcher(
    theirs: Theirs, page_blocks: list[Block], tmp_path: Path
) -> None:
    """Run both blocks in a folder with the launcher's source, as it stands in a checkout."""
    if theirs.layout.replaced:
        pytest.skip("the page says to write other words for this layout")
    build_wheel, dockerfile = page_blocks
    shutil.copytree(ROOT / "launcher", tmp_path / "launcher", ignore=LEFT_OUT)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    command = ("bash", "-euc", build_wheel.text)
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    folders = lay_out(tmp_path / "ml", ALONE)
    with built(theirs.engine, tmp_path, dockerfile.adapted(image=theirs.plain)) as name:
        done = run_train(theirs.engine, name, folders["algo-1"])
    assert done.status == 0, done.output[-4000:]
    assert (folders["algo-1"] / "output" / "success").exists()


# --- Pythons --------------------------------------------------------------------------------------
PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")

WITH_PYTHON = """\
FROM {base}
COPY python {folder}
RUN echo {folder}/lib > /etc/ld.so.conf.d/python.conf && ldconfig && {pip}
ENV PATH={folder}/bin:{system_path}
"""
"""An image with a Python below /opt and no other one."""

NOT_NEEDED = {"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "include", "share"}
"""Folders of a Python that an image does without."""


def leave_out(folder: str, names: list[str]) -> set[str]:
    """Return the files that are not copied into an image: tests, headers, packages but pip."""
    if Path(folder).name == "site-packages":
        return {name for name in names if name != "pip" and not name.startswith("pip-")}
    archives = {name for name in names if name.endswith(".a") or name.startswith("config-3")}
    return archives | (NOT_NEEDED & set(names))


@dataclass(frozen=True)
class WithPython:
    """An image with one Python and the launcher."""

    engine: Engine
    reference: str
    version: str
    prefix: str


@pytest.fixture(scope="module", params=PYTHONS)
def with_python(
    request: pytest.FixtureRequest,
    docker_image: BuiltByCommand,
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[WithPython]:
    """Give an image with a Python of this machine below /opt, and the launcher by its pip."""
    engine, version = docker_image.engine, request.param
    pythons = sorted(Path.home().glob(f".pyenv/versions/{version}.*"))
    if not pythons:
        pytest.skip(f"NOT TESTED: no Python {version} below ~/.pyenv/versions")
    bases = [name for name in engine.names() if name.startswith("trainworks/base:bookworm-")]
    if not bases:
        pytest.skip("NOT TESTED: docker has no base image of bookworm; a build makes one")
    folder = tmp_path_factory.mktemp("with-python")
    shutil.copy(wheel, folder)
    shutil.copytree(pythons[-1], folder / "python", symlinks=True, ignore=leave_out)
    prefix = f"/opt/python{version}"
    dockerfile = WITH_PYTHON.format(
        base=bases[0],
        folder=prefix,
        pip=PIP.format(python=f"{prefix}/bin/python3", folder=f"{prefix}/bin"),
        system_path=SYSTEM_PATH,
    )
    with built(engine, folder, dockerfile) as plain:
        lines = lines_of_the_page(plain, {})
        with built(engine, folder, lines) as reference:
            yield WithPython(engine, reference, version, prefix)


def test_every_python_of_an_image_runs_a_job(with_python: WithPython, tmp_path: Path) -> None:
    folders = lay_out(tmp_path, ALONE)
    done = run_train(with_python.engine, with_python.reference, folders["algo-1"])
    assert done.status == 0, done.output[-4000:]
    assert f"algo-1 runs in {with_python.prefix}\n" in done.output
    assert f"this image has no manifest; it has Python {with_python.version}." in done.output


DIES = 'raise ValueError("the label is 11")\n'


def test_every_python_of_an_image_says_why_a_script_died(
    with_python: WithPython, tmp_path: Path
) -> None:
    folders = lay_out(tmp_path, DIES)
    done = run_train(with_python.engine, with_python.reference, folders["algo-1"])
    assert done.status == 1, done.output[-4000:]
    failure = folders["algo-1"] / "output" / "failure.json"
    cause = json.loads(failure.read_text(encoding="utf-8"))["cause"]
    assert "ValueError: the label is 11" in cause


# --- Ubuntu ---------------------------------------------------------------------------------------
UBUNTU = "noble"
UBUNTU_ARCHIVE = "http://archive.ubuntu.com/ubuntu"
UBUNTU_KEYS = ROOT / ".cache/ubuntu/usr/share/keyrings/ubuntu-archive-keyring.gpg"
"""Where tools/set-up-engine puts the keys of Ubuntu's archive, which Debian's archive has."""

LINK_USR = 'for name in bin lib lib64 sbin; do mkdir -p "$1/usr/$name"; ln -s usr/$name "$1"; done'
"""Makes the links that Ubuntu's base-files has, before another package makes folders of them."""


def make_ubuntu(archive: Path) -> None:
    """Write the files of Ubuntu with its pip and its mpirun; skip where its archive is not reached.

    The packages are checked against the keys.
    """
    if shutil.which("mmdebstrap") is None or not UBUNTU_KEYS.is_file():
        pytest.skip("NOT TESTED: no mmdebstrap or no keys of Ubuntu (tools/set-up-engine all)")
    address = f"{UBUNTU_ARCHIVE}/dists/{UBUNTU}/InRelease"
    try:
        with urllib.request.urlopen(address, timeout=60):
            pass
    except OSError as error:
        pytest.skip(f"NOT TESTED: Ubuntu's archive does not answer: {error}")
    options = [f"--dpkgopt={option}" for option in SLIM]
    command = (
        *("mmdebstrap", "--variant=minbase", "--components=main,universe", *options),
        *("--include=python3-pip,openmpi-bin", f"--keyring={UBUNTU_KEYS}"),
        *(f"--setup-hook={LINK_USR}", UBUNTU, str(archive), UBUNTU_ARCHIVE),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def ubuntu(
    docker_image: BuiltByCommand, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Give an image of Ubuntu with its Python, its mpirun and the launcher."""
    engine = docker_image.engine
    folder = tmp_path_factory.mktemp("ubuntu")
    make_ubuntu(folder / "ubuntu.tar")
    plain = f"localhost/trainworks-theirs-{uuid.uuid4().hex[:12]}:test"
    imported = ("docker", "import", str(folder / "ubuntu.tar"), plain)
    subprocess.run(imported, check=True, capture_output=True, timeout=600)
    (folder / "ubuntu.tar").unlink()
    shutil.copy(wheel, folder)
    lines = lines_of_the_page(plain, LAYOUTS["dist-packages"].replaced)
    try:
        with built(engine, folder, lines) as reference:
            yield reference
    finally:
        engine.remove(plain)


RANKS = """
import os
print("rank", os.environ["OMPI_COMM_WORLD_RANK"], "of", os.environ["OMPI_COMM_WORLD_SIZE"])
"""


@pytest.mark.parametrize("hosts", [HOSTS[:1], HOSTS], ids=["one", "two"])
def test_ubuntus_mpirun_starts_ranks(
    ubuntu: str, network: Any, hosts: tuple[str, ...], tmp_path: Path
) -> None:
    switches = {
        "sagemaker_mpi_enabled": "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
    }
    output = run_on_hosts(ubuntu, network, lay_out(tmp_path, RANKS, hosts, **switches))
    ranks = 2 * len(hosts)
    for rank in range(ranks):
        assert output.count(f"rank {rank} of {ranks}\n") == 1, output[-4000:]
    assert "this image has no manifest; it has Python 3." in output
