"""Extended images, for real: of our own `cpu` image, and of one that we did not make.

A step that engines could do differently is tried with each of them, the rest with Docker.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from documented import promised
from image.support import ROOT, BuiltByCommand
from proof.support import cyclonedx_problems, read_provenance
from trainworks.engine.docker import DockerEngine
from trainworks.engine.protocol import BuildRequest, Engine, Job, Mount, Secret
from trainworks.facts.load import load
from trainworks.host.settings import read_host_settings
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.variants import TITLE_LABEL
from trainworks.render.dockerfile import INPUTS_LABEL

pytestmark = pytest.mark.engine

SCRIPT = """
import einops, greeting, os, sys

print(
    "trained",
    greeting.text,
    einops.__version__,
    os.environ["SAGEMAKER_SUBMIT_DIRECTORY"],
    *sys.argv[1:],
)
"""

SETUP = "from setuptools import setup\n"
PATH = "../dist/by_path-2.0-py3-none-any.whl"


@dataclass(frozen=True, kw_only=True)
class Project:
    """A user's folder: code, requirements, and a folder of wheels that pip knows.

    ``engines`` were used.
    """

    folder: Path
    tag: str
    engines: list[Engine] = field(default_factory=list)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return this machine's environment with the folder of wheels."""
        links = f"{os.environ.get('PIP_FIND_LINKS', '')} {self.folder / 'wheels'}"
        return {
            **os.environ,
            "PIP_FIND_LINKS": links.strip(),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    @property
    def git_requirement(self) -> str:
        """Return the line that names the repository in the folder ``lib``."""
        return f"from_git @ git+{(self.folder / 'lib').as_uri()}@main"

    def write(self, files: Mapping[str, str]) -> None:
        """Write files below the folder."""
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")

    def commit(self) -> str:
        """Commit the files of the folder ``lib`` and return the commit."""

        def git(*words: str) -> str:
            names = ("-c", "user.name=a", "-c", "user.email=a@b.example")
            done = subprocess.run(
                ("git", *names, *words), cwd=self.folder / "lib", capture_output=True, check=True
            )
            return done.stdout.decode().strip()

        git("init", "--quiet", "--initial-branch", "main")
        git("add", ".")
        git("commit", "--quiet", "--message", "state")
        return git("rev-parse", "HEAD")

    def extend(self, engine: Engine, base: str, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the command with the files of the fixture."""
        files = (
            "--requirements",
            "requirements.txt",
            "--source",
            "src",
            "--entry-point",
            "train.py",
        )
        return self.command("extend", engine, base, *files, *more)

    def command(
        self, name: str, engine: Engine, base: str, *more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``extend``, or ``prove`` with the same choice."""
        if engine not in self.engines:
            self.engines.append(engine)
        image = (self.tag,) if name == "prove" else ("--tag", self.tag)
        words = (
            "--base",
            base,
            *image,
            "--engine",
            engine.name,
            "--format",
            "json",
            "--root",
            str(ROOT),
        )
        return subprocess.run(
            (sys.executable, str(ROOT / "build.py"), name, *words, *more),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )


def write_wheel(folder: Path, name: str, version: str, text: str, *requires: str) -> None:
    """Write a wheel of one module."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": text,
        f"{name}-{version}.dist-info/METADATA": (
            metadata + "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        ),
        f"{name}-{version}.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(
            f"{name}-{version}.dist-info/RECORD", "".join(f"{path},,\n" for path in files)
        )


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Give a project whose image is removed afterwards from the engines that were used."""
    (tmp_path / "src").mkdir()
    write_wheel(tmp_path / "wheels", "greeting", "1.0", "text = 'good day'\n")
    (tmp_path / "src" / "train.py").write_text(SCRIPT)
    (tmp_path / "requirements.txt").write_text("greeting==1.0\neinops==0.8.1\n")
    new_project = Project(folder=tmp_path, tag=f"trainworks-test/extended:{uuid.uuid4().hex[:12]}")
    yield new_project
    for engine in new_project.engines:
        engine.remove(new_project.tag)


def test_our_image_with_requirements_and_code_runs_a_job(
    image: BuiltByCommand, project: Project
) -> None:
    done = project.extend(image.engine, image.reference)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == promised("extend", "dockerfile", "files")
    assert report["requirements"] == ["einops==0.8.1", "greeting==1.0"]
    assert "from this machine's own folders: greeting-1.0-py3-none-any.whl" in done.stderr
    titles = {check["title"] for check in report["checks"] if check["passed"]}
    assert len(titles) == len(report["checks"])
    assert "`train --plan` would start train.py" in titles
    # einops and its bytecode: nothing of pip, no cache, no wheel.
    assert report["size"] - report["base"]["size"] < 1_000_000
    # Nothing is mounted, and no option names the program: both are in the image.
    job = image.engine.run(project.tag, Job(command=("train",), timeout=120))
    assert job.status == 0, job.output
    assert "trained good day 0.8.1 /opt/ml/code" in job.output
    again = project.extend(image.engine, image.reference, "--until", "build")
    assert "nothing changed since this image was built" in again.stderr
    assert json.loads(again.stdout)["identifier"] == report["identifier"]
    # Another script is another image, with the requirements' layer as it was.
    (project.folder / "src" / "train.py").write_text("print('other')\n")
    other = json.loads(project.extend(image.engine, image.reference, "--until", "build").stdout)
    assert other["identifier"] != report["identifier"]
    assert "other\n" in image.engine.run(project.tag, Job(command=(), timeout=120)).output


def files_of_last_layer(engine: Engine, tag: str) -> dict[str, tuple[object, ...]]:
    """Return the files of the highest layer: path to mode, time, type and content.

    Without folders that an engine touches.

    Docker before 26 makes files in /etc for the time of a step, so that folder
    has the time of the build.
    """
    members = {}
    with engine.layers(tag) as layers:
        *_, last = layers
        for member in last.archive:
            content = member.linkname
            if file := last.archive.extractfile(member) if member.isfile() else None:
                with file:
                    content = hashlib.sha256(file.read()).hexdigest()
            members[member.name.strip("./")] = (
                member.mode,
                int(member.mtime),
                member.type,
                content,
            )
    return {
        name: row
        for name, row in members.items()
        if name not in ("", "etc", "run") and not name.startswith("run/")
    }


def names_of_resolver_images(engine: Engine) -> set[str]:
    """Return the names of images in which extend runs a step for its answer alone."""
    prefixes = ("trainworks/question:", "trainworks/packages:")
    return {name for name in engine.names() if name.startswith(prefixes)}


def test_the_lock_alone_gives_the_same_layers(image: BuiltByCommand, project: Project) -> None:
    """Install requirements in the layer that stays, while they are resolved: the layer of their
    lock has the same files.
    """
    engine = image.engine
    dated = not isinstance(engine, DockerEngine) or engine.sets_times()
    # Old Docker also gives a whiteout (the file that hides a deleted one) the time of the deletion,
    # which no step can change.
    dated_line = "fsspec==2024.9.0\n" if dated else ""
    project.write({"requirements.txt": "greeting==1.0\nrich\n" + dated_line})
    earlier = names_of_resolver_images(engine)
    layer_lists: list[object] = []
    for lock_state in ("resolved and hashed", "locked already"):
        words = ("--requirements", "requirements.txt", "--until", "build", "--no-cache")
        done = project.command("extend", engine, image.reference, *words)
        assert (done.returncode, lock_state in done.stderr) == (0, True), done.stderr
        built = engine.inspect(project.tag)
        assert built is not None
        layers = built.layers if dated else files_of_last_layer(engine, project.tag)
        layer_lists.append((layers, built.labels[INPUTS_LABEL]))
        lock = engine.run(
            project.tag, Job(command=("cat", "/opt/trainworks/extension.lock"), timeout=120)
        ).output
        (path,) = project.folder.glob("requirements.*.locked.txt")
        assert path.read_text(encoding="utf-8").endswith(lock)
        engine.remove(project.tag)
    assert layer_lists[0] == layer_lists[1]
    # A test beside this one may have made some of these images. Its own go within its time limit.
    new = names_of_resolver_images(engine) - earlier
    deadline = time.monotonic() + 1200
    while left := new & names_of_resolver_images(engine):
        assert time.monotonic() < deadline, f"extend has left images: {left}"
        time.sleep(2)


def test_another_torch_is_answered_with_the_images_own(
    image: BuiltByCommand, project: Project
) -> None:
    (project.folder / "requirements.txt").write_text(
        "torch==2.10.0\nnvidia-cublas-cu12==12.4.5.8\ngreeting==1.0\n"
    )
    done = project.extend(image.engine, image.reference, "--until", "build")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requirements"] == ["greeting==1.0"]
    assert (
        "requirements.txt line 1: torch==2.10.0 is not installed: this image keeps torch 2.13.0+cpu"
        in done.stderr
    )
    assert "nvidia-cublas-cu12: not installed, only another build needs them" in done.stderr
    strict = project.extend(image.engine, image.reference, "--strict")
    assert strict.returncode == 12
    (project.folder / "requirements.txt").write_text("torch>=2.14\ntriton==99\n")
    newer = project.extend(image.engine, image.reference)
    assert newer.returncode == 12
    assert (
        "requirements.txt line 1: torch>=2.14, and this image has torch 2.13.0+cpu" in newer.stderr
    )


def test_what_the_base_does_not_keep_moves_and_archives_are_built(
    docker_image: BuiltByCommand, project: Project
) -> None:
    """A pin, a package of 2024 that takes something from the base, and one that
    has a source archive only.
    """
    # The base's tensorboard goes with this protobuf in an older release,
    # sagemaker-training in none: it stays.
    write_wheel(project.folder / "wheels", "of_last_year", "1.0", "", "protobuf<5")
    project.write(
        {
            "requirements.txt": (
                "fsspec==2024.9.0\nof_last_year==1.0\nhydra-core>=1.3,<1.4\n"
                "greeting==1.0\neinops==0.8.1\n"
            )
        }
    )
    done = project.extend(docker_image.engine, docker_image.reference)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    moved = {row["name"]: row["new"] for row in report["moved"]}
    assert moved.keys() == {"fsspec", "protobuf", "tensorboard"}
    assert moved["fsspec"] == "2024.9.0"
    for line in (
        r"fsspec \S+ -> 2024\.9\.0",
        r"protobuf \S+ -> 4\.\S+",
        r"tensorboard \S+ -> \S+",
        (
            r"sagemaker-training \S+ stays,"
            r" and does not go with the requirements: it requires protobuf"
        ),
    ):
        assert re.search(line, done.stderr), line
    assert [check["title"] for check in report["checks"] if not check["passed"]] == []
    titles = {check["title"] for check in report["checks"]}
    assert any("nothing is left of what was there" in title for title in titles)
    assert {
        "import torch succeeds",
        "import mpi4py.MPI succeeds",
    } <= titles, "the base's own tests ran again"
    (lock,) = project.folder.glob("requirements.*.locked.txt")
    archive = "f224469b4168294902bb1efa80a8bf7855f24c99aef99cbefc1bcd3cce77881b"
    assert f"antlr4-python3-runtime==4.9.3 \\\n    --hash=sha256:{archive}" in lock.read_text(
        encoding="utf-8"
    )
    # A leftover of the old versions would be found twice, or imported.
    program = (
        "import fsspec, importlib.metadata as m, importlib.util, os; names = [each.metadata['Name']"
        " for each in m.distributions()]; print(fsspec.__version__, len(names) - len(set(names)),"
        " bool(importlib.util.find_spec('sagemaker_training')))"
    )
    output = docker_image.engine.run(
        project.tag, Job(command=("python", "-c", program), timeout=120)
    ).output
    assert output.splitlines()[-1] == "2024.9.0 0 True"
    again = project.extend(docker_image.engine, docker_image.reference, "--until", "build")
    assert "nothing changed since this image was built" in again.stderr
    # Without archives there is no release of today, and the user is told.
    refused = project.extend(
        docker_image.engine, docker_image.reference, "--only-binary", ":all:", "--until", "render"
    )
    assert refused.returncode == 11
    assert "antlr4-python3-runtime" in refused.stderr


def test_a_real_project_needs_no_network_when_its_job_starts(
    docker_image: BuiltByCommand, project: Project
) -> None:
    """Code with setup.py.

    Requirements that include others, and name a wheel, a git repository and Debian packages.
    """
    write_wheel(project.folder / "dist", "by_path", "2.0", "text = 'from a file'\n")
    project.write(
        {
            "lib/setup.py": (
                f"{SETUP}setup(name='from_git', version='1', py_modules=['from_git'])\n"
            ),
            "lib/from_git.py": "text = 'from git'\n",
            "src/setup.py": (
                f"{SETUP}setup(name='mine', version='1', packages=['mine'],"
                " install_requires=['einops'])\n"
            ),
            "src/mine/__init__.py": "",
            "src/mine/train.py": (
                "import by_path, einops, from_git, greeting\n"
                "print('trained', by_path.text, from_git.text, greeting.text)\n"
            ),
            "src/requirements.txt": f"-r ../more.txt\n{PATH}\n{project.git_requirement}\n",
            "more.txt": "-c limits.txt\ngreeting==1.0\n",
            "limits.txt": "einops<0.8.2\n",
        }
    )
    commit = project.commit()
    # requirements.txt of the code is installed where no other file is named.
    words = ("--source", "src", "--entry-point", "mine/train.py", "--apt", "libxcb1")
    done = project.command("extend", docker_image.engine, docker_image.reference, *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["requirements"] == [
        "by-path==2.0",
        "einops==0.8.1",
        "from-git==1",
        "greeting==1.0",
        "mine==1",
    ]
    assert (report["apt"], list(report["commits"].values())) == (["libxcb1"], [commit])
    titles = {check["title"] for check in report["checks"] if check["passed"]}
    expected_titles = (
        "`train --plan` would install nothing at the start",
        "Debian package libxcb1 is installed",
    )
    assert titles.issuperset((*expected_titles, "4 distributions can be imported"))
    assert len(titles) == len(report["checks"])
    job = subprocess.run(
        ("docker", "run", "--rm", "--network", "none", project.tag, "train"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (job.returncode, job.stdout) == (
        0,
        "trained from a file from git good day\n",
    ), job.stderr
    # The branch goes on, and the lock has the commit.
    project.write({"lib/from_git.py": "text = 'later'\n"})
    assert project.commit() != commit
    again = project.command(
        "extend", docker_image.engine, docker_image.reference, *words, "--until", "build"
    )
    assert "nothing changed since this image was built" in again.stderr
    proof = ("prove", docker_image.engine, docker_image.reference, *words, "--output", "proof")
    proven = project.command(*proof)
    assert proven.returncode == 0, proven.stderr
    provenance = json.loads(
        (project.folder / "proof" / "provenance.json").read_text(encoding="utf-8")
    )
    inputs = provenance["buildDefinition"]["resolvedDependencies"]
    assert {"gitCommit": commit} in [document_input.get("digest") for document_input in inputs]


def test_code_that_changed_after_the_build_is_installed_again(
    docker_image: BuiltByCommand, project: Project
) -> None:
    """Install again where derived images and mounts bring other code: the packages are those of the
    new code.
    """
    project.write({"src/setup.py": f"{SETUP}setup(name='mine', packages=['mine'])\n"})
    project.write({"src/mine/__init__.py": "", "src/mine/train.py": "print('trained')\n"})
    words = ("--source", "src", "--entry-point", "mine/train.py", "--until", "build")
    done = project.command("extend", docker_image.engine, docker_image.reference, *words)
    assert done.returncode == 0, done.stderr
    changed = Mount(
        source=project.folder / "src" / "setup.py",
        target="/opt/ml/code/mine/__init__.py",
        read_only=True,
    )
    for mounts, expected in (((), '"requirements": [],'), ((changed,), '/programs/install.py",')):
        assert (
            expected
            in docker_image.engine.run(
                project.tag, Job(command=("train", "--plan"), mounts=mounts)
            ).output
        )


def test_what_cannot_be_imported_is_named_with_its_reason(
    docker_image: BuiltByCommand, project: Project
) -> None:
    write_wheel(
        project.folder / "wheels",
        "broken",
        "1.0",
        "raise RuntimeError('first\\noperator nms does not exist')\n",
    )
    project.write({"requirements.txt": "broken==1.0\ngreeting==1.0\neinops\n"})
    done = project.extend(docker_image.engine, docker_image.reference)
    assert done.returncode == 8
    assert "FAIL  extension  3 distributions can be imported" in done.stderr
    assert "broken 1.0: import broken: RuntimeError: operator nms does not exist" in done.stderr
    assert "broken is installed, and fails: ask for another version of it" in done.stderr


def test_a_torchvision_for_another_build_of_torch_is_refused(
    image: BuiltByCommand, project: Project
) -> None:
    """The package index has the one for CUDA, whose requirement the cpu image's torch fulfils."""
    broken = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    write_wheel(project.folder / "wheels", "torchvision", "0.28.0", broken, "torch==2.13.0")
    project.write({"requirements.txt": "torchvision\n"})
    done = project.extend(image.engine, image.reference)
    assert done.returncode == 12
    assert "torchvision 0.28.0 does not work with this image's torch 2.13.0+cpu" in done.stderr
    assert image.engine.inspect(project.tag) is None


def test_a_base_with_a_user_keeps_it(docker_image: BuiltByCommand, project: Project) -> None:
    context = project.folder / "base"
    context.mkdir()
    (context / "Dockerfile").write_text(
        f"FROM {docker_image.reference}\nRUN useradd -m someone\nUSER someone\n"
    )
    base = f"trainworks-test/user:{uuid.uuid4().hex[:12]}"
    engine = docker_image.engine
    engine.build(BuildRequest(name="user", context=context, tags=(base,)), lambda _event: None)
    try:
        done = project.extend(engine, base, "--until", "build")
        assert done.returncode == 0, done.stderr
        image = engine.inspect(project.tag)
        assert image is not None
        assert image.user == "someone"
    finally:
        engine.remove(project.tag)
        engine.remove(base)


def test_an_extension_without_a_compiler_says_so(
    docker_image: BuiltByCommand, project: Project
) -> None:
    setup = (
        "from setuptools import Extension, setup\n"
        "setup(name='mine', ext_modules=[Extension('c', ['c.c'])])\n"
    )
    project.write({"src/setup.py": setup, "src/c.c": "#error it is compiled\n"})
    done = project.command("extend", docker_image.engine, docker_image.reference, "--source", "src")
    assert done.returncode == 7
    has_compiler = "#error it is compiled" in done.stderr
    assert has_compiler or f"{docker_image.reference} has no C compiler" in done.stderr


@pytest.mark.core
def test_the_commands_of_the_page(docker_image: BuiltByCommand, tmp_path: Path) -> None:
    tag = f"trainworks-test/extended:{uuid.uuid4().hex[:12]}"
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    block, *_ = re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for text, own in (
        ("python build.py extend", f"{sys.executable} {ROOT / 'build.py'} extend --engine docker"),
        ("$(python build.py --framework pytorch --cuda cpu)", docker_image.reference),
        ("my/train:1", tag),
    ):
        assert text in block
        block = block.replace(text, own)
    words = ("bash", "-euc", block)
    try:
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
        )
    finally:
        docker_image.engine.remove(tag)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("trained with einops 0.8")


def test_given_hashes_are_what_counts(docker_image: BuiltByCommand, project: Project) -> None:
    wheel = project.folder / "wheels" / "greeting-1.0-py3-none-any.whl"
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (project.folder / "src" / "train.py").write_text("import greeting; print(greeting.text)\n")
    for digest, status in ((right, 0), (right[::-1], 11)):
        (project.folder / "requirements.txt").write_text(f"greeting==1.0 --hash=sha256:{digest}\n")
        done = project.extend(docker_image.engine, docker_image.reference, "--until", "build")
        assert done.returncode == status, done.stderr
    assert "Hash mismatch for" in done.stderr


def test_a_promise_that_is_broken_fails_the_command(
    docker_image: BuiltByCommand, project: Project
) -> None:
    (project.folder / "src" / "train.py").write_text("print('no end'\n")
    done = project.extend(docker_image.engine, docker_image.reference)
    assert done.returncode == 8
    assert "FAIL  extension  train.py compiles with the image's Python" in done.stderr
    broken = [check["title"] for check in json.loads(done.stdout)["checks"] if not check["passed"]]
    assert broken == ["train.py compiles with the image's Python"]


@pytest.mark.parametrize(
    ("program", "files"),
    [
        ("-m package.train", {"package/train.py": "print('started')\n"}),
        ("-m einops._torch_specific", {"unused.py": ""}),
        ("run.sh", {"run.sh": "echo started\n"}),
        ("tool", {"tool": "#!/bin/sh\necho started\n"}),
    ],
)
def test_every_kind_of_entry_point_is_what_the_launcher_starts(
    docker_image: BuiltByCommand, project: Project, program: str, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (project.folder / "src" / name).parent.mkdir(exist_ok=True)
        (project.folder / "src" / name).write_text(text)
        mode = 0o644 if "." in name else 0o755
        (project.folder / "src" / name).chmod(mode)
    words = ("--requirements", "requirements.txt", "--source", "src", "--entry-point", program)
    done = project.command("extend", docker_image.engine, docker_image.reference, *words)
    assert done.returncode == 0, done.stderr
    job = docker_image.engine.run(project.tag, Job(command=("train",), timeout=120))
    assert job.status == 0, job.output
    assert ("started" in job.output) == ("einops" not in program)


def prove(
    image: BuiltByCommand, project: Project, base: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """Run ``prove`` with the choice that the image was extended with."""
    words = (
        "--base",
        base,
        "--engine",
        image.engine.name,
        "--output",
        "proof",
        "--root",
        str(ROOT),
    )
    files = ("--requirements", "requirements.txt", "--source", "src", "--entry-point", "train.py")
    return subprocess.run(
        (sys.executable, str(ROOT / "build.py"), "prove", project.tag, *words, *files, *more),
        cwd=project.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_extension_of_our_image_is_proven(
    docker_image: BuiltByCommand, project: Project
) -> None:
    assert (
        project.extend(docker_image.engine, docker_image.reference, "--until", "build").returncode
        == 0
    )
    done = prove(docker_image, project, docker_image.reference)
    assert done.returncode == 0, done.stderr
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in (project.folder / "proof").iterdir()
    }
    assert cyclonedx_problems(texts["sbom.cdx.json"]) is None
    document = json.loads(texts["sbom.cdx.json"])
    components = {component["bom-ref"]: component for component in document["components"]}
    image_depends, base_depends = document["dependencies"][:2]
    own = {components[reference]["name"] for reference in image_depends["dependsOn"]}
    assert own == {
        docker_image.reference.rpartition(":")[0],
        "einops",
        "greeting",
        "/opt/ml/code/train.py",
    }
    torch = next(component for component in document["components"] if component["name"] == "torch")
    assert torch["bom-ref"] in base_depends["dependsOn"]
    base = docker_image.engine.inspect(docker_image.reference)
    assert base is not None
    lock = load(ROOT).locks[base.labels[TITLE_LABEL]]
    locked = next(row for row in lock.packages if row.name == "torch")
    assert torch["hashes"] == [{"alg": "SHA-256", "content": locked.sha256}]
    definition = read_provenance(json.loads(texts["provenance.json"])).build_definition
    inputs = {
        resolved_dependency.name: dict(resolved_dependency.digest)
        for resolved_dependency in definition.resolved_dependencies
    }
    assert f"sha256:{inputs['base image']['sha256']}" == base.identifier
    (path,) = project.folder.glob("requirements.*.locked.txt")
    pins = "".join(
        f"{line}\n" for line in path.read_text().splitlines() if not line.startswith("#")
    )
    assert inputs["requirements"] == {"sha256": hashlib.sha256(pins.encode()).hexdigest()}
    # Other code than the image has: no proof.
    (project.folder / "src" / "train.py").write_text("print('other')\n")
    refused = prove(docker_image, project, docker_image.reference)
    assert refused.returncode == 17
    assert f"{project.tag} was not built from this checkout as it is now" in refused.stderr
    # Other requirements: no proof tells the versions that they would be resolved to today.
    (project.folder / "requirements.txt").write_text("greeting==1.0\n")
    unlocked = prove(docker_image, project, docker_image.reference)
    assert unlocked.returncode == 11
    assert "no lock for these requirements and this base: " in unlocked.stderr


def test_an_unknown_base(image: BuiltByCommand, project: Project) -> None:
    done = project.extend(image.engine, "localhost:9/trainworks-test/none:1")
    assert done.returncode == 4
    assert "no image localhost:9/trainworks-test/none:1: " in done.stderr


FOREIGN = """\
FROM {base}
RUN --mount=type=secret,id=apt.conf --mount=type=secret,id=sources.list \\
    --mount=type=secret,id=ca.pem \\
    export APT_CONFIG=/run/secrets/apt.conf DEBIAN_FRONTEND=noninteractive; \\
    apt-get update && apt-get install --yes --no-install-recommends python3-pip \\
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
# AWS's images share one private key among all who pull them:
# that is not the fault of those who extend them.
RUN mkdir -p /root/.ssh && echo key > /root/.ssh/id_rsa
ENTRYPOINT ["python3"]
"""


@pytest.fixture
def foreign(docker_image: BuiltByCommand, tmp_path: Path) -> Iterator[str]:
    """Give an image that stands in for AWS's: another maker's, with Python and
    pip, and without our launcher.
    """
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), load(ROOT))
    settings = read_host_settings(os.environ)
    context = tmp_path / "foreign"
    context.mkdir()
    (context / "Dockerfile").write_text(FOREIGN.format(base=plan.image))
    tag = f"trainworks-test/foreign:{uuid.uuid4().hex[:12]}"
    secrets = settings.secrets(plan.base.suite, "")
    docker_image.engine.build(
        BuildRequest(
            name="foreign",
            context=context,
            tags=(tag,),
            secrets=tuple(
                Secret(identifier=name, content=content) for name, content in secrets.items()
            ),
            arguments=settings.proxies,
        ),
        lambda _event: None,
    )
    yield tag
    docker_image.engine.remove(tag)


def test_an_image_of_another_maker(
    docker_image: BuiltByCommand, foreign: str, project: Project
) -> None:
    done = project.extend(docker_image.engine, foreign)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["base"]["launcher"], report["requirements"]) == (
        False,
        ["einops==0.8.1", "greeting==1.0"],
    )
    environment = docker_image.engine.inspect(project.tag)
    assert environment is not None
    assert environment.environment["PATH"].startswith("/opt/ml/code:")
    assert environment.environment["SAGEMAKER_SUBMIT_DIRECTORY"] == "/opt/ml/code"
    assert environment.environment["SAGEMAKER_PROGRAM"] == "train.py"
    proven = prove(docker_image, project, foreign)
    assert proven.returncode == 0, proven.stderr
    assert f"{foreign} was not built from this checkout as it is now" in proven.stderr
    document = json.loads((project.folder / "proof" / "sbom.cdx.json").read_text(encoding="utf-8"))
    hashed = {component["name"] for component in document["components"] if component.get("hashes")}
    assert hashed == {foreign.rpartition(":")[0], "einops", "greeting", "/opt/ml/code/train.py"}
    # Its own entry point is kept; this one starts the program that its first argument names.
    job = docker_image.engine.run(
        project.tag, Job(command=("/opt/ml/code/train.py", "argument"), timeout=120)
    )
    assert job.output.splitlines()[-1] == "trained good day 0.8.1 /opt/ml/code argument"
