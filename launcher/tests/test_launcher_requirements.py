"""Test that a job's requirements do not replace the versions that the image was built around: the
real uv, with wheels of the test.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import pytest
from launcher_pip import python_of_an_image, wheel
from launcher_support import (
    Launcher,
    environment,
    manifest_document,
    plan,
    write_inputs,
    write_manifest,
)

from trainworks_launcher.command.explain import explain
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.entry_point import Code
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.manifest import parse_manifest
from trainworks_launcher.programs import install
from trainworks_launcher.supervise.preparation.installing import reason_of

PROGRAM = Path(install.__file__)
INDEX = "https://wheels.example/cpu"
PROTECTED = {"torch": "2.13.0+cpu", "triton": "3.0.0", "mpi4py": "4.1.2"}
COMPANIONS = {"torchvision": "torch", "torchaudio": "torch"}
WHEELS = (
    *(("torch", version, ()) for version in ("2.1.0", "2.13.0", "2.15.0")),
    ("triton", "3.9.0", ()),
    ("vision", "1.0", ("torch==2.1.0",)),
    ("vision", "1.1", ("torch==2.13.0",)),
    ("vision", "1.2", ("torch==2.15.0",)),
    ("modern", "1.0", ("torch>=2.15",)),
    ("modern", "1.1", ("torch>=2.15", "triton==3.9.0")),
    ("wraps", "1.0", ("modern",)),
    ("plain", "1.0", ()),
    *(("core", version, ()) for version in ("1.0", "2.0")),
    *(("client", version, (f"core=={version}",)) for version in ("1.0", "2.0")),
    ("command", "1.0", ("core==1.0",)),
    ("storage", "1.0", ()),
    ("storage", "2.0", ("core==1.0",)),
    *(("symbols", version, ()) for version in ("1.0", "2.0")),
    ("older", "1.0", ("torch==2.1.0",)),
    ("kernels-of-cuda", "12.4", ()),
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip finds wheels in."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, version, requires in WHEELS:
        file, content = wheel(name, "", version, requires)
        (folder / file).write_bytes(content)
    broken = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    for version, content_of_module in (("0.28.0", broken), ("0.28.0+cpu", "")):
        file, content = wheel("torchvision", content_of_module, version, ["torch==2.13.0"])
        place = folder / "cpu" if "+" in version else folder
        place.mkdir(exist_ok=True)
        (place / file).write_bytes(content)
    return folder


class Image:
    """An image's Python, its manifest, and jobs that are run in it."""

    def __init__(self, base: Path, wheels: Path, installed: Mapping[str, str]) -> None:
        self.base = base
        self.python = python_of_an_image(base / "venv", installed)
        self.document: dict[str, Json] = {
            "protected": dict(PROTECTED),
            "companions": dict(COMPANIONS),
            "wheel_index": INDEX,
            "libraries": ["kernels-of-cuda"],
        }
        self.variables = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_NO_CACHE_DIR": "1",
            "HOME": str(base),
            # pip asks `rustc` and `lsb_release` for their versions where it finds them.
            "PATH": str(self.python.parent),
        }

    def run(
        self, requirements: str, files: Mapping[str, str] | None = None, **variables: str
    ) -> Launcher:
        """A job with this requirements.txt, to its end."""
        write_inputs(self.base, "print('THE SCRIPT RAN')", {}, {})
        for name, text in {"requirements.txt": requirements, **(files or {})}.items():
            (self.base / "code" / name).write_text(text, encoding="utf-8")
        path = write_manifest(
            self.base / "image.json", {"python": str(self.python)}, "", **self.document
        )
        host_variables = {**self.variables, "TRAINWORKS_IMAGE_MANIFEST": str(path), **variables}
        with Launcher(self.base, variables=host_variables) as launcher:
            launcher.status = launcher.wait()
        return launcher

    def program(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The program by itself, in the folder of the test."""
        path = write_manifest(
            self.base / "image.json", {"python": str(self.python)}, "", **self.document
        )
        return subprocess.run(
            (self.python, "-I", str(PROGRAM), "--", *words),
            cwd=self.base,
            env={**self.variables, "TRAINWORKS_IMAGE_MANIFEST": str(path)},
            capture_output=True,
            text=True,
            check=False,
        )

    def versions(self) -> dict[str, str]:
        """Return the installed versions, without pip itself."""
        (site,) = self.base.glob("venv/lib/python*/site-packages")
        return {
            distribution.name: distribution.version
            for distribution in distributions(path=[str(site)])
        }


@pytest.fixture
def image(tmp_path: Path, wheels: Path) -> Image:
    return Image(tmp_path, wheels, PROTECTED)


def refused(launcher: Launcher, reason: str) -> None:
    """The job ended before its script, with this reason first in the failure text, and whole."""
    assert (launcher.status, launcher.failure.splitlines()[0]) == (65, reason), launcher.text
    assert "installing " in launcher.failure.splitlines()[1]
    assert "THE SCRIPT RAN" not in launcher.text


def replaced(image: Image, name: str, version: str, *requires: str, module: str = "") -> None:
    """Write the requirements into the image's distribution, and the version into its module."""
    (site,) = image.base.glob("venv/lib/python*/site-packages")
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    (site / name).mkdir(exist_ok=True)
    (site / name / "version.py").write_text(module)
    _, content = wheel(name, "", version, requires)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(site)


@pytest.mark.parametrize(
    ("before", "requirements", "expected"),
    [
        # As boto3 has to when an old awscli brings its botocore; `build.py extend` does the same.
        ("client==2.0\n", "command\n", {"command": "1.0", "core": "1.0", "client": "1.0"}),
        # pip alone would keep boto3 and take an s3fs of six years ago, when asked for both.
        ("client==2.0\n", "storage\n", {"storage": "2.0", "core": "1.0", "client": "1.0"}),
        ("", "vision\n-c mine.txt\n", {"vision": "1.1"}),
        ("", "torch\nvision>=1\nplain\n", {"vision": "1.1", "plain": "1.0"}),
        ("", "plain==1.0 \\\n    --hash=sha256:DIGEST\n", {"plain": "1.0"}),
        ("", "torch==2.13.0\ntorch>=2\ntorch==2.13.0+cpu\ntorch\nplain\n", {"plain": "1.0"}),
        (
            "",
            "torch==2.1; python_version < '3'\ntriton==3.*\nFOLDER/plain-1.0-py3-none-any.whl\n",
            {"plain": "1.0"},
        ),
    ],
)
def test_what_fits_is_installed_and_what_the_image_has_is_kept(
    image: Image, wheels: Path, before: str, requirements: str, expected: dict[str, str]
) -> None:
    assert not before or image.run(before).status == 0
    digest = hashlib.sha256((wheels / "plain-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    lines = requirements.replace("DIGEST", digest).replace("FOLDER", str(wheels))
    launcher = image.run(lines, {"mine.txt": "plain==1.0\n"})
    assert launcher.status == 0, launcher.text
    assert "THE SCRIPT RAN" in launcher.text
    assert "is not installed" not in launcher.text
    assert image.versions() == {**PROTECTED, **expected}


def test_what_cannot_move_is_said_and_what_is_kept_is_not_broken(image: Image) -> None:
    assert image.run("core==2.0\n").status == 0
    replaced(image, "toolkit", "5.0", "core>=2")
    launcher = image.run("command\n")
    assert launcher.status == 0, launcher.text
    assert (
        "toolkit 5.0 stays, and does not go with the requirements: it requires core>=2"
        in launcher.text
    )
    assert "trainworks: core 2.0 -> 1.0" in launcher.text
    assert image.run("core==2.0\n").status == 0
    replaced(image, "torch", "2.13.0+cpu", "core>=2")
    message = "the requirements take from this image's torch 2.13.0+cpu what it requires (core>=2)"
    assert message in image.run("command\n").failure.splitlines()[0]


def test_a_build_of_torch_may_be_named_with_its_local_version(tmp_path: Path, wheels: Path) -> None:
    """The package index's file is ``VERSION``, and says of itself for which CUDA it was built."""
    image = Image(tmp_path, wheels, {**PROTECTED, "torch": "2.13.0"})
    replaced(image, "torch", "2.13.0", module="__version__ = '2.13.0+cu121'\n")
    files = {"more.txt": "torch[x] == 2.13.0+cu121 ; python_version > '3'\n"}
    launcher = image.run("-r more.txt\nTorch==2.13.0+cu121\nplain\n", files)
    assert launcher.status == 0, launcher.text
    assert (image.versions()["torch"], image.versions()["plain"]) == ("2.13.0", "1.0")
    launcher = image.run("torch==2.13.0+cu118\n")
    assert launcher.status == 0, launcher.text
    message = (
        "requirements.txt line 1: torch==2.13.0+cu118 is not installed:"
        " this image keeps torch 2.13.0"
    )
    assert f"trainworks: {message}\n" in launcher.text


# --- kept versions --------------------------------------------------------------------------------
def test_an_image_that_does_not_say_what_it_keeps_is_asked_nothing_new(image: Image) -> None:
    """An older image: as always before, the newest wins."""
    image.document = {}
    launcher = image.run("vision\n")
    assert launcher.status == 0, launcher.text
    assert image.versions() == {**PROTECTED, "torch": "2.15.0", "vision": "1.2"}


def test_a_version_that_an_image_built_on_ours_installed_is_kept(
    tmp_path: Path, wheels: Path
) -> None:
    """Install on top of an image whose manifest is of the image below; the installed version
    counts.
    """
    image = Image(tmp_path, wheels, {**PROTECTED, "torch": "2.15.0"})
    launcher = image.run("vision\nmodern==1.0\n")
    assert launcher.status == 0, launcher.text
    assert image.versions() == {**PROTECTED, "torch": "2.15.0", "vision": "1.2", "modern": "1.0"}


@pytest.mark.parametrize("has_uv", [True, False])
def test_the_constraints_of_the_image_below_do_not_count_and_the_users_do(
    tmp_path: Path, wheels: Path, *, has_uv: bool
) -> None:
    """An image built on ours has another torch, and the variables of the image below."""
    image = Image(tmp_path, wheels, {**PROTECTED, "torch": "2.15.0"})
    if not has_uv:
        (image.base / "venv/bin/uv").unlink()
    (image.base / "constraints.txt").write_text("torch==2.13.0+cpu\n")
    (image.base / "mine.txt").write_text("symbols<2\n")
    both = f"{image.base / 'constraints.txt'} {image.base / 'mine.txt'}"
    launcher = image.run("vision\nsymbols\n", PIP_CONSTRAINT=both, UV_CONSTRAINT=both)
    assert launcher.status == 0, launcher.text
    assert image.versions() == {**PROTECTED, "torch": "2.15.0", "vision": "1.2", "symbols": "1.0"}


# --- direct contradictions ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        (
            "plain\n\ntorch==2.1\n",
            "requirements.txt line 3: torch==2.1 is not installed: this image keeps",
        ),
        (
            "# torch\nTorch >= 2,  <2.3  # older\nplain\n",
            "requirements.txt line 2: torch<2.3,>=2 is not installed",
        ),
        ("-r more/wanted.txt\nplain\n", "more/wanted.txt line 2: torch<2 is not installed"),
        ("-c more/wanted.txt\nplain\n", "more/wanted.txt line 2: torch<2 is not installed"),
        (
            "plain\ntorch @ git+https://me:secret@host/torch\n",
            "requirements.txt line 2: an address is not installed",
        ),
        (
            "plain\nhttps://host/torch-2.1.0%2Bcu1-py3-none-any.whl\n",
            "line 2: torch==2.1.0+cu1 is not installed",
        ),
        (
            "plain\nsymbols==1.0\n",
            "symbols==1.0 is not installed: this image's torch 2.13.0+cpu needs symbols>=2",
        ),
        (
            "plain\ntorch==2.1\nkernels_of_cuda==12.4\n",
            "kernels-of-cuda: not installed, only another build needs them",
        ),
        (
            "plain\npywin32==306\npkg_resources==0.0.0\n",
            "pywin32==306 is left out: it is not for this system",
        ),
        ("plain\ntorch==2.1.0\nvision\n", "torch==2.1.0 is not installed"),
    ],
)
def test_a_line_of_another_build_is_answered_with_what_the_image_has(
    image: Image, requirements: str, message: str
) -> None:
    """Answer lines of ``pip freeze`` of another image, which most projects have."""
    replaced(image, "torch", "2.13.0+cpu", "symbols>=2")
    assert image.run("symbols\n").status == 0
    (image.base / "code/more").mkdir(parents=True)
    launcher = image.run(requirements, {"more/wanted.txt": "plain\ntorch<2\n"})
    assert launcher.status == 0, launcher.text
    assert message in launcher.text
    assert "secret" not in launcher.text
    installed = image.versions()
    assert installed.pop("vision", "1.1") == "1.1"
    assert installed == {**PROTECTED, "plain": "1.0", "symbols": "2.0"}


def test_lines_with_hashes_of_another_build_are_answered_too(image: Image, wheels: Path) -> None:
    digest = hashlib.sha256((wheels / "plain-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    launcher = image.run(
        f"torch==2.1.0 --hash=sha256:{digest}\nplain==1.0 \\\n    --hash=sha256:{digest}\n"
    )
    assert launcher.status == 0, launcher.text
    assert image.versions() == {**PROTECTED, "plain": "1.0"}


FAST = "https://host/fast-1.0-cp27-cp27m-linux_x86_64.whl"


@pytest.mark.parametrize(
    ("requirements", "reasons"),
    [
        (
            "torch>=2.14\ntriton==3.9\npytorch\n",
            (
                (
                    "requirements.txt line 1: torch>=2.14, and this image has torch 2.13.0+cpu:"
                    " choose an image with"
                ),
                (
                    "requirements.txt line 2: triton==3.9, and this image has triton 3.0.0: choose"
                    " an image with triton"
                ),
                (
                    "requirements.txt line 3: pytorch of the"
                    " package index is something else: ask for torch"
                ),
            ),
        ),
        (
            "plain\nmodern==1.0\n",
            ("No solution found when resolving dependencies: Because ", "modern", "torch"),
        ),
        ("wraps\n", ("No solution found when resolving dependencies: Because ", "modern", "torch")),
        (
            f"{FAST} ; python_version < '3'\n{FAST}\n",
            (
                (
                    "line 2: fast-1.0-cp27-cp27m-linux_x86_64.whl"
                    " is for another Python or system; this is cp"
                ),
            ),
        ),
        (
            "plain\nkernels==1.0\nothers\n",
            (
                "requirements.txt line 2: kernels is compiled by nvcc, which is not there",
                "requirements.txt line 3: others is compiled by nvcc, which is not there",
            ),
        ),
    ],
)
def test_what_the_image_cannot_give_is_refused_all_at_once(
    image: Image, requirements: str, reasons: tuple[str, ...]
) -> None:
    image.document["needs"] = {"kernels": "nvcc", "others": "nvcc", "plain": "nvcc"}
    launcher = image.run(requirements)
    assert (launcher.status, "THE SCRIPT RAN" in launcher.text) == (65, False)
    assert [reason for reason in reasons if reason not in launcher.failure.splitlines()[0]] == []
    assert image.versions() == PROTECTED


def test_strict_refuses_a_line_of_another_build(image: Image) -> None:
    launcher = image.run("plain\ntorch==2.1\n", TRAINWORKS_STRICT_REQUIREMENTS="on")
    refused(launcher, "--strict: lines are not answered with what the image has")
    assert "torch==2.1 is not installed" in launcher.text
    assert image.versions() == PROTECTED
    launcher = image.run("plain\n", TRAINWORKS_STRICT_REQUIREMENTS="yes")
    assert "TRAINWORKS_STRICT_REQUIREMENTS" in launcher.failure


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("requirements.txt", "plain=1.0=py_0", "line 1: plain=1.0=py_0 is conda's"),
        (
            "requirements.txt",
            "plain=1.0=py_0\nother=2=0\n",
            "plain=1.0=py_0 (and 1 more) is conda's",
        ),
        ("requirements.txt", "conda-forge::plain=1.0", "conda-forge::plain=1.0 is conda's"),
        (
            "requirements.txt",
            "# Name  Version  Build\nplain   1.0   py311h64a7726_0   conda-forge",
            "line 2: plain   1.0   py311h64a7726_0   conda-forge is conda's",
        ),
        (
            "requirements.txt",
            "@EXPLICIT\nhttps://conda.example/linux-64/plain-1.0-py_0.conda",
            "line 1: @EXPLICIT is conda's",
        ),
        (
            "requirements.txt",
            "name: work\ndependencies:\n  - plain=1.0\n  - pip:\n    - other",
            "line 1: name: work (and 4 more) is conda's",
        ),
        (
            "requirements.txt",
            "plain @ file:///croot/plain_1/work",
            "/croot/plain_1/work does not exist. A line that",
        ),
        (
            "environment.yml",
            "",
            "is conda's: `conda run -n NAME python -m pip list --format=freeze",
        ),
        ("Pipfile", "", "is pipenv's: `pipenv requirements > requirements.txt`"),
        ("poetry.lock", "", "is Poetry's: `poetry export"),
        (
            "requirements.txt",
            "plain --config-settings a=b",
            "line 1: options of a build are not handed to it",
        ),
        (
            "requirements.txt",
            "plain\n--config-settings=a=b",
            "line 2: options of a build are not handed to it",
        ),
        ("requirements.txt", "--require-hashes\nplain", "all requirements must"),
    ],
)
def test_files_of_other_tools_are_refused_with_what_converts_them(
    image: Image, name: str, line: str, message: str
) -> None:
    (image.base / "code").mkdir()
    (image.base / name).write_text(f"{line}\n")
    assert message in image.program("-r", name).stderr


def test_all_lines_that_cannot_be_read_are_named_at_once(image: Image) -> None:
    lines = ("plain=1.0=py_0", "--indx-url x", "plain -C a=b", "plain @ file:///croot/plain_1/work")
    launcher = image.run("".join(f"{line}\n" for line in lines))
    assert launcher.status == 65
    for reason in (
        "line 1: plain=1.0=py_0 is conda's",
        "line 2: unrecognized arguments: --indx-url x",
        "line 3: options of a build are not handed to it",
        "/croot/plain_1/work does not exist",
    ):
        assert reason in launcher.text
    assert image.versions() == PROTECTED


# --- an image without uv --------------------------------------------------------------------------
def test_an_image_without_uv_says_so_and_pip_installs(image: Image) -> None:
    (image.base / "venv/bin/uv").unlink()
    launcher = image.run("vision\n")
    assert launcher.status == 0, launcher.text
    assert "trainworks: this image has no uv: pip installs" in launcher.text
    assert image.versions() == {**PROTECTED, "vision": "1.1"}


# --- contradictions of others ---------------------------------------------------------------------
def test_what_is_pinned_for_another_torch_is_refused_although_torch_itself_is_answered(
    image: Image,
) -> None:
    launcher = image.run("torch==2.1.0\nolder==1.0\n")
    refused(
        launcher,
        "older 1.0 requires torch==2.1.0, and this image has torch 2.13.0+cpu; ask for a version of"
        " older that fits 2.13.0+cpu, or choose an image with torch==2.1.0",
    )


WHEEL_OF_PROJECT = """
    import zipfile

    with zipfile.ZipFile(os.path.join(_[0], "project-1.0-py3-none-any.whl"), "w") as out:
        head = "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\nRequires-Dist: torch==2.1\\n"
        out.writestr("project-1.0.dist-info/METADATA", head)
        wheel = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        out.writestr("project-1.0.dist-info/WHEEL", wheel)
        out.writestr("project-1.0.dist-info/RECORD", "")
    return "project-1.0-py3-none-any.whl"
"""


def source_of(name: str, requires: str = "", build: str = "") -> dict[str, str]:
    """Return a project whose build backend is its own, so that pip needs no index. build: the code
    that a build runs.
    """
    head = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n" + (
        f"Requires-Dist: {requires}\\n" if requires else ""
    )
    return {
        "pyproject.toml": (
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            f'[project]\nname = "{name}"\nversion = "1.0"\n'
        ),
        "backend.py": (
            "import os, subprocess\n"
            "def prepare_metadata_for_build_wheel(directory, settings=None):\n"
            f"    os.mkdir(os.path.join(directory, '{name}-1.0.dist-info'))\n"
            "    with open(os.path.join(directory,"
            f" '{name}-1.0.dist-info/METADATA'), 'w') as out:\n"
            f"        out.write('{head}')\n"
            f"    return '{name}-1.0.dist-info'\n"
            "def build_wheel(*_):\n"
            f"    {build or 'raise NotImplementedError'}\n"
        ),
    }


def test_a_project_that_wants_another_torch(image: Image) -> None:
    """The project's own file names the version where the file is static.

    The requirements that only its build tells are the resolver's to refuse.
    """
    files = source_of("project", "torch==2.1")
    dynamic = files["pyproject.toml"].replace(
        'version = "1.0"\n', 'version = "1.0"\ndynamic = ["dependencies"]\n'
    )
    launcher = image.run("plain\n", {**files, "pyproject.toml": dynamic})
    assert launcher.status == 65
    assert "project==1.0 depends on torch==2.1" in launcher.failure
    static = files["pyproject.toml"].replace(
        'version = "1.0"\n', 'version = "1.0"\ndependencies = ["torch==2.1"]\n'
    )
    files["backend.py"] = files["backend.py"].replace("raise NotImplementedError", WHEEL_OF_PROJECT)
    launcher = image.run("plain\n", {**files, "pyproject.toml": static})
    assert launcher.status == 0, launcher.text
    assert (
        "pyproject.toml: torch==2.1 is not installed: this image keeps torch 2.13.0+cpu"
        in launcher.text
    )
    assert image.versions() == {**PROTECTED, "plain": "1.0", "project": "1.0"}


# --- companions -----------------------------------------------------------------------------------
def test_a_companion_that_was_built_for_another_torch_is_refused(image: Image) -> None:
    refused(
        image.run("plain\ntorchvision\n"),
        "torchvision 0.28.0 does not work with this image's torch 2.13.0+cpu (RuntimeError:"
        f" operator torchvision::nms does not exist); add --extra-index-url {INDEX} to the"
        " requirements file, or remove it",
    )


def test_a_companion_that_fits_is_taken_where_it_is_found(image: Image, wheels: Path) -> None:
    launcher = image.run(f"--find-links {wheels}/cpu\ntorchvision\n")
    assert launcher.status == 0, launcher.text
    assert image.versions() == {**PROTECTED, "torchvision": "0.28.0+cpu"}


# --- packages that cannot be compiled -------------------------------------------------------------
def test_what_may_compile_for_gpus_is_named_where_the_image_has_no_nvcc(image: Image) -> None:
    image.document["compiled_by"] = {"plain": "nvcc", "absent": "nvcc"}
    launcher = image.run("plain\n")
    assert launcher.status == 0, launcher.text
    warning = (
        "warning: plain may compile code for GPUs when it is first used, and this image has no"
        " nvcc: take an image"
    )
    assert f"trainworks: {warning} that was built --with nvcc" in launcher.text
    assert "absent" not in launcher.text.replace("absent=nvcc", "")


@pytest.mark.parametrize(
    "line", ["./thing", "thing @ {uri}", "thing/", "./thing[extra]; python_version > '3'"]
)
def test_a_folder_of_a_line_is_built_in_a_copy(image: Image, line: str) -> None:
    """Hosts that share the code would build into each other.

    A folder beside the project is there as well.
    """
    code = image.base / "code"
    file, content = wheel("thing", "", "1.0", ())
    (code / "thing").mkdir(parents=True)
    (code / "thing" / file).write_bytes(content)
    build = (
        f"open('built', 'w'); open('../beside.txt'); import shutil; shutil.copy({file!r}, _[0]);"
        f" return {file!r}"
    )
    files = source_of("thing", build=build)
    files = {f"thing/{name}": text for name, text in files.items()}
    launcher = image.run(
        f"{line.format(uri=(code / 'thing').as_uri())}\n", {**files, "beside.txt": ""}
    )
    assert launcher.status == 0, launcher.text
    assert "thing" in image.versions()
    assert sorted(path.name for path in (code / "thing").iterdir()) == sorted(
        [*source_of("thing"), file]
    )
    assert not (code / "beside.txt").is_symlink()


def test_folders_of_one_file_are_all_built_in_copies(image: Image) -> None:
    code, places = image.base / "code", ("one", "libs/two", "libs/three")
    sources: dict[str, str] = {}
    for place in places:
        name = Path(place).name
        file, content = wheel(name, "", "1.0", ())
        (code / place).mkdir(parents=True)
        (code / place / file).write_bytes(content)
        build = f"open('built', 'w'); import shutil; shutil.copy({file!r}, _[0]); return {file!r}"
        sources.update(
            {f"{place}/{path}": text for path, text in source_of(name, build=build).items()}
        )
    launcher = image.run("".join(f"./{place}\n" for place in places), sources)
    assert launcher.status == 0, launcher.text
    assert {"one", "two", "three"} <= set(image.versions())
    assert not list(code.rglob("built"))


def test_the_reason_of_a_failed_build_is_the_builds_own(image: Image) -> None:
    files = source_of("thing", build="subprocess.run(['gcc', '-c', 'thing.c'])")
    (image.base / "code/thing").mkdir(parents=True)
    launcher = image.run(
        "./thing\n", {f"thing/{name}": text for name, text in files.items()}, PATH=str(image.base)
    )
    assert launcher.status == 65
    reason = launcher.failure.splitlines()[0]
    assert reason.startswith("Failed to build `thing @ file://")
    assert reason.endswith("FileNotFoundError: [Errno 2] No such file or directory: 'gcc'")


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("ERROR: Exception:\nTraceback (most recent call last):\n  File x\nKeyError: 'a'\n", ""),
        (
            "ERROR: first\nERROR: No matching distribution found for x\n",
            "No matching distribution found for x",
        ),
        ("nothing\n", ""),
        ("error: cannot\n  cause: outer\n  cause: inner\n\nhint: ask\n", "cannot: inner (ask)"),
        ("error: cannot\n  cause: outer\ntrainworks: the last word\n", "the last word"),
        ("error: cannot\n  cause: two\n         lines\n", "cannot: two lines"),
    ],
)
def test_last_words(printed: str, reason: str) -> None:
    assert reason_of(printed.encode()) == reason


def native(folder: Path, version: str, content: str) -> None:
    """Write a wheel with a file that looks compiled, which an import checks."""
    file, data = wheel("native", content, version)
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(folder / file, "w") as new:
        for name in old.namelist():
            data = old.read(name).replace(b"native.py", b"native/__init__.py,,\nnative/c.so")
            new.writestr(name.replace("native.py", "native/__init__.py"), data)
        new.writestr("native/c.so", "")


@pytest.mark.parametrize(("line", "taken"), [("native", "2.0"), ("native==3.0", "3.0")])
def test_what_fails_beside_what_went_back_is_taken_in_an_older_release(
    image: Image, tmp_path: Path, line: str, taken: str
) -> None:
    """Fail as pyarrow 26 beside numpy 1, which its metadata do not say."""
    (tmp_path / "native").mkdir()
    native(tmp_path / "native", "2.0", "")
    native(tmp_path / "native", "3.0", "raise ImportError('native requires Core 2.0 or newer')\n")
    assert image.run("core==2.0\n").status == 0
    launcher = image.run(f"--find-links {tmp_path / 'native'}\ncore<2\n{line}\n")
    assert launcher.status == 0, launcher.text
    assert image.versions()["native"] == taken
    assert (
        "native 3.0 cannot be imported beside the requirements (ImportError:"
        " native requires Core 2.0" in launcher.text
    )


def test_an_index_of_another_build_is_left_out(image: Image) -> None:
    """Send no request to that index: a strict job too goes on."""
    lines = (
        "--extra-index-url https://wheels.example/cu130\n"
        "--find-links https://wheels.example/stable.html\n"
        "plain\n"
    )
    launcher = image.run(lines, TRAINWORKS_STRICT_REQUIREMENTS="on")
    assert launcher.status == 0, launcher.text
    assert launcher.text.count("is not needed: it has another build than this image") == 2


def test_a_file_in_another_encoding(image: Image) -> None:
    (image.base / "r.txt").write_bytes("plain # é\n".encode("latin-1"))
    assert "r.txt is not UTF-8: `iconv -f LATIN1" in image.program("-r", "r.txt").stderr
    (image.base / "r.txt").write_bytes("plain # é\n".encode("utf-16"))
    assert image.program("-r", "r.txt").returncode == 0


# --- projects that uv reads itself ----------------------------------------------------------------
SELF = """
[project]
name = "client"
version = "9"
requires-python = ">=3.8"
dependencies = ["torch==2.1"]
[project.optional-dependencies]
all = ["client[some]", "plain"]
some = ["symbols<2"]
[dependency-groups]
dev = [{include-group = "more"}]
more = ["vision"]
[tool.uv.sources]
torchvision = {index = "of-another-build"}
[[tool.uv.index]]
name = "of-another-build"
url = "https://wheels.example/cu130"
explicit = true
"""


def test_a_project_is_uvs_to_read(image: Image) -> None:
    """Put `client` on the index, too: the package of that name there is another project's."""
    (image.base / "pyproject.toml").write_text(SELF)
    done = image.program("-r", "pyproject.toml", "--extra", "all", "--group", "dev")
    assert done.returncode == 0, done.stderr
    assert image.versions() == {**PROTECTED, "plain": "1.0", "symbols": "1.0", "vision": "1.1"}
    assert (
        "pyproject.toml: torch==2.1 is not installed: this image keeps torch 2.13.0+cpu"
        in done.stderr
    )
    assert "the source of torchvision is not used" in done.stderr
    (image.base / "pyproject.toml").write_text(SELF.replace(">=3.8", "<3.8"))
    done = image.program("-r", "pyproject.toml")
    assert done.returncode == 1
    assert "pyproject.toml: requires-python is <3.8, and this image has Python 3." in done.stderr


def test_what_a_project_has_compiled_is_refused_first(image: Image) -> None:
    image.document["needs"] = {"kernels": "nvcc", "others": "nvcc"}
    text = (
        '[project]\nname = "a"\nversion = "1"\ndependencies = ["plain", "kernels; sys_platform =='
        " 'linux'\"]\n"
    )
    (image.base / "pyproject.toml").write_text(text)
    done = image.program("-r", "pyproject.toml")
    assert done.returncode == 1
    assert (
        "pyproject.toml: kernels is compiled by nvcc, which is not there, and no wheel fits"
        in done.stderr
    )
    # A package that a project has from a place of its own is uv's to find.
    wheel_of_theirs, content = wheel("kernels", "", "1.0", ())
    (image.base / wheel_of_theirs).write_bytes(content)
    source = f'[tool.uv.sources]\nkernels = {{path = "{wheel_of_theirs}"}}\n'
    (image.base / "pyproject.toml").write_text(text + source)
    done = image.program("-r", "pyproject.toml")
    assert done.returncode == 0, done.stderr
    assert image.versions() == {**PROTECTED, "plain": "1.0", "kernels": "1.0"}


def test_a_script_says_what_it_requires(image: Image) -> None:
    (image.base / "train.py").write_text(
        "# /// script\n# dependencies = ['torch==2.1', 'plain']\n# ///\nimport plain\n"
    )
    done = image.program("-r", "train.py")
    assert done.returncode == 0, done.stderr
    assert image.versions() == {**PROTECTED, "plain": "1.0"}
    (image.base / "train.py").write_text("import plain\n")
    assert "train.py has no requirements in its head" in image.program("-r", "train.py").stderr


def test_uvs_settings_of_the_user_do_not_count(image: Image) -> None:
    """Ignore settings that are of one machine.

    Those of other programs in that folder count: git and keyring read them there.
    """
    own = image.base / ".config" / "uv" / "uv.toml"
    own.parent.mkdir(parents=True)
    own.write_text('constraint-dependencies = ["core<2"]\n')
    (image.base / "r.txt").write_text("core\n")
    done = image.program("-r", "r.txt")
    assert done.returncode == 0, done.stderr
    assert image.versions() == {**PROTECTED, "core": "2.0"}
    assert f"{own} is not used: name an index in pip's settings" in done.stderr
    # Those of a project do.
    (image.base / "pyproject.toml").write_text(
        '[project]\nname = "a"\nversion = "1"\ndependencies = ["core"]\n[tool.uv]\n'
        'constraint-dependencies = ["core<2"]\n'
    )
    done = image.program("-r", "pyproject.toml")
    assert done.returncode == 0, done.stderr
    assert image.versions()["core"] == "1.0"


def test_without_uv_only_files_of_pips_are_read(image: Image) -> None:
    (image.base / "venv/bin/uv").unlink()
    (image.base / "pyproject.toml").write_text(SELF)
    assert (
        "pyproject.toml is read by uv, and this image has no uv"
        in image.program("-r", "pyproject.toml").stderr
    )


# --- shown beforehand -----------------------------------------------------------------------------
def environment_with(document: Mapping[str, Json]) -> Environment:
    image_manifest = parse_manifest(json.dumps({**manifest_document(), **document}), "made-up")
    return environment(
        manifest=image_manifest, code=Code("/opt/ml/code", entries=("requirements.txt", "train.py"))
    )


def test_the_plan_shows_what_is_kept() -> None:
    protected = {f"nvidia-{name}": "1" for name in "abc"}
    job_environment = environment_with({"protected": {**PROTECTED, **protected}})
    program = "/opt/trainworks/lib/trainworks_launcher/programs/install.py"
    assert plan(job_environment).requirements == (
        "/usr/bin/python",
        "-I",
        program,
        "--",
        "-r",
        "requirements.txt",
    )
    (row,) = [
        row
        for row in explain(plan(job_environment), {})
        if row.kind == "choice" and row.name == "requirements"
    ]
    message = "torch 2.13.0+cpu, triton 3.0.0, mpi4py 4.1.2, nvidia-a 1 and 2 more"
    assert (row.origin, row.why) == ("image", f"the image's {message} stay: they are constraints")


def test_a_plan_without_requirements_says_nothing_of_them() -> None:
    job_environment = environment(manifest=environment_with({"protected": {**PROTECTED}}).manifest)
    assert plan(job_environment).requirements == ()
    assert [row for row in explain(plan(job_environment), {}) if row.name == "requirements"] == []
