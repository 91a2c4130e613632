"""A job's requirements do not replace what the image was built around: real pip, with small wheels made by the test."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

import pytest
from launcher_pip import python_of_an_image, wheel
from launcher_support import Launcher, environment, manifest_document, plan, write_inputs, write_manifest

from ports import free_port
from trainworks_launcher.command.explain import explain
from trainworks_launcher.contract.values import Json
from trainworks_launcher.given.entry import Code
from trainworks_launcher.given.environment import Environment
from trainworks_launcher.given.manifest import parse_manifest
from trainworks_launcher.programs.install import contradictions, misfit, refusal
from trainworks_launcher.supervise.preparation.installing import reason_of

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

    def run(self, requirements: str, files: Mapping[str, str] | None = None, **variables: str) -> Launcher:
        """A job with this requirements.txt, to its end."""
        write_inputs(self.base, "print('THE SCRIPT RAN')", {}, {})
        for name, text in {"requirements.txt": requirements, **(files or {})}.items():
            (self.base / "code" / name).write_text(text, encoding="utf-8")
        path = write_manifest(self.base / "image.json", {"python": str(self.python)}, "", **self.document)
        given = {**self.variables, "TRAINWORKS_IMAGE_MANIFEST": str(path), **variables}
        with Launcher(self.base, variables=given) as made:
            made.status = made.wait()
        return made

    def versions(self) -> dict[str, str]:
        """What is installed, without pip itself."""
        (site,) = self.base.glob("venv/lib/python*/site-packages")
        return {found.name: found.version for found in distributions(path=[str(site)])}


@pytest.fixture
def image(tmp_path: Path, wheels: Path) -> Image:
    return Image(tmp_path, wheels, PROTECTED)


def refused(made: Launcher, reason: str) -> None:
    """The job ended before its script, with this reason first in the failure text, and whole."""
    assert (made.status, made.failure.splitlines()[0]) == (65, reason), made.text
    assert "installing " in made.failure.splitlines()[1]
    assert "THE SCRIPT RAN" not in made.text


def replaced(image: Image, name: str, version: str, *requires: str, module: str = "") -> None:
    """Write into the image's distribution what it requires, and what its module says of its version."""
    (site,) = image.base.glob("venv/lib/python*/site-packages")
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    (site / name).mkdir(exist_ok=True)
    (site / name / "version.py").write_text(module)
    _, content = wheel(name, "", version, requires)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        archive.extractall(site)


def test_what_would_lose_its_requirement_moves_too(image: Image) -> None:
    """As boto3 has to when an old awscli brings its botocore; ``build.py extend`` does the same."""
    assert image.run("client==2.0\n").status == 0
    made = image.run("command\n")
    assert made.status == 0, made.text
    versions = image.versions()
    assert (versions["core"], versions["client"]) == ("1.0", "1.0")
    assert "THE SCRIPT RAN" in made.text


def test_what_was_installed_stays_when_others_move_for_it(image: Image) -> None:
    """pip alone would keep boto3 and take an s3fs of six years ago, when asked for both."""
    assert image.run("client==2.0\n").status == 0
    made = image.run("storage\n")
    assert made.status == 0, made.text
    versions = image.versions()
    assert (versions["storage"], versions["core"], versions["client"]) == ("2.0", "1.0", "1.0")


def test_what_cannot_move_is_said_and_what_is_kept_is_not_broken(image: Image) -> None:
    assert image.run("core==2.0\n").status == 0
    replaced(image, "toolkit", "5.0", "core>=2")
    made = image.run("command\n")
    assert made.status == 0, made.text
    assert "toolkit 5.0 of the image does not go with the requirements: it requires core>=2" in made.text
    assert image.run("core==2.0\n").status == 0
    replaced(image, "torch", "2.13.0+cpu", "core>=2")
    said = "the requirements take from this image's torch 2.13.0+cpu what it requires (core>=2)"
    assert said in image.run("command\n").failure.splitlines()[0]


def test_a_build_of_torch_may_be_named_with_its_local_version(tmp_path: Path, wheels: Path) -> None:
    """The package index's file is ``VERSION``, and says of itself for which CUDA it was built."""
    image = Image(tmp_path, wheels, {**PROTECTED, "torch": "2.13.0"})
    replaced(image, "torch", "2.13.0", module="__version__ = '2.13.0+cu121'\n")
    files = {"more.txt": "torch[x] == 2.13.0+cu121 ; python_version > '3'\n"}
    made = image.run("-r more.txt\nTorch==2.13.0+cu121\nplain\n", files)
    assert made.status == 0, made.text
    assert (image.versions()["torch"], image.versions()["plain"]) == ("2.13.0", "1.0")
    refused(
        image.run("torch==2.13.0+cu118\n"),
        "requirements.txt line 1: torch==2.13.0+cu118 conflicts with this image's torch 2.13.0; remove the line, or "
        "choose an image with torch==2.13.0+cu118",
    )


# ------------------------------------------------------------------------------------------------- no way to the index
def test_an_index_that_cannot_be_reached_is_the_reason(image: Image) -> None:
    nowhere = {"PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}/simple", "PIP_NO_INDEX": "", "PIP_FIND_LINKS": ""}
    made = image.run("plain\n", {}, **nowhere, PIP_RETRIES="1", NO_PROXY="127.0.0.1")
    assert made.status == 65
    first = made.failure.splitlines()[0]
    assert first.startswith("the package index 127.0.0.1"), made.text
    assert first.endswith("cannot be reached: Failed to establish a new connection: [Errno 111] Connection refused")


OBJECT = "<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f>"
POOL = "HTTPSConnection(host='a.example', port=443)"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            f"""NameResolutionError("{POOL}: Failed to resolve 'a.example' ([Errno -3] x)")""",
            "Failed to resolve 'a.example'",
        ),
        (f"NewConnectionError('{OBJECT}: Failed to establish: [Errno 101] no')", "Failed to establish: [Errno 101] no"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: X] self-signed (_ssl.c:9)'))", "[SSL: X] self-signed (_ssl.c:9)"),
        (f"ConnectTimeoutError({OBJECT}, 'Connection timed out. (timeout=15)')", "Connection timed out. (timeout=15)"),
        (f"""ReadTimeoutError("{POOL}: Read timed out.")""", "Read timed out."),
        ("ProxyError('Cannot connect to proxy.', OSError('Tunnel failed: 403'))", "the proxy: Tunnel failed: 403"),
        ("ProtocolError('Connection aborted.', RemoteDisconnected('Remote end'))", "Remote end"),
    ],
)
def test_what_pip_25_and_26_print_of_an_index_that_cannot_be_reached(broken: str, reason: str) -> None:
    printed = (
        f"WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by '{broken}': /simple/einops/\n"
        "ERROR: No matching distribution found for einops\n"
    )
    host = " a.example" if POOL in broken else ""
    assert reason_of(printed.encode()).startswith(f"the package index{host} cannot be reached: {reason}")
    assert reason_of(printed.replace("total=0", "total=2").encode()) == "No matching distribution found for einops"


# ------------------------------------------------------------------------------------------------------- what is kept
@pytest.mark.parametrize("requirements", ["vision\n-c mine.txt\n", "torch\nvision>=1\nplain\n"])
def test_pip_takes_the_version_that_fits_and_keeps_what_the_image_has(image: Image, requirements: str) -> None:
    made = image.run(requirements, {"mine.txt": "plain==1.0\n"})
    assert made.status == 0, made.text
    assert "THE SCRIPT RAN" in made.text
    found = image.versions()
    assert found.pop("vision") == "1.1"
    found.pop("plain", None)
    assert found == PROTECTED


def test_an_image_that_does_not_say_what_it_keeps_is_asked_nothing_new(image: Image) -> None:
    """An older image: as it always was, the newest wins."""
    image.document = {}
    made = image.run("vision\n")
    assert made.status == 0, made.text
    assert image.versions() == {**PROTECTED, "torch": "2.15.0", "vision": "1.2"}


def test_a_version_that_an_image_built_on_ours_installed_is_kept(tmp_path: Path, wheels: Path) -> None:
    """The manifest is of the image below; what counts is what is installed."""
    image = Image(tmp_path, wheels, {**PROTECTED, "torch": "2.15.0"})
    made = image.run("vision\nmodern==1.0\n")
    assert made.status == 0, made.text
    assert image.versions() == {**PROTECTED, "torch": "2.15.0", "vision": "1.2", "modern": "1.0"}


def test_lines_with_hashes_and_constraints_go_together(image: Image, wheels: Path) -> None:
    digest = hashlib.sha256((wheels / "plain-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    made = image.run(f"plain==1.0 \\\n    --hash=sha256:{digest}\n")
    assert made.status == 0, made.text
    assert image.versions() == {**PROTECTED, "plain": "1.0"}


# ------------------------------------------------------------------------------------------------ direct contradictions
@pytest.mark.parametrize(
    ("requirements", "where", "wanted"),
    [
        ("plain\n\ntorch==2.1\n", "requirements.txt line 3", "torch==2.1"),
        ("# torch\nTorch >= 2.14, \\\n  <3  # newer\n", "requirements.txt line 2", "torch<3,>=2.14"),
        ("torch==2.1 --hash=sha256:00\n", "requirements.txt line 1", "torch==2.1"),
        ("-r more/wanted.txt\n", "more/wanted.txt line 2", "torch<2"),
        ("torch @ git+https://me:secret@host/torch\n", "requirements.txt line 1", ""),
        ("https://host/torch-2.1.0-cp311-cp311-linux_x86_64.whl\n", "requirements.txt line 1", ""),
    ],
)
def test_a_line_that_contradicts_the_image_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirements: str, where: str, wanted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("more").mkdir()
    Path("more/wanted.txt").write_text("plain\ntorch<2\n", encoding="utf-8")
    Path("requirements.txt").write_text(requirements, encoding="utf-8")
    another = f", or choose an image with {wanted}" if wanted else ""
    assert refusal(contradictions(Path("requirements.txt"), PROTECTED)) == (
        f"{where}: {wanted or 'an address'} conflicts with this image's torch 2.13.0+cpu; remove the line{another}"
    )


def test_all_contradictions_are_said_at_once_before_pip_is_asked(image: Image) -> None:
    made = image.run("torch==2.1\ntriton>3\ntorch @ git+https://me:secret@host/torch\n")
    refused(
        made,
        "requirements.txt line 1: torch==2.1 conflicts with this image's torch 2.13.0+cpu; requirements.txt line 2:"
        " triton>3 conflicts with this image's triton 3.0.0; requirements.txt line 3: an address conflicts with this"
        " image's torch 2.13.0+cpu; remove these lines, or choose an image with torch==2.1 and triton>3",
    )
    assert "Looking in links" not in made.text, "pip was started"
    assert "secret" not in made.text + made.failure
    assert image.versions() == PROTECTED


def test_lines_that_fit_or_do_not_apply_are_no_contradiction(image: Image, wheels: Path) -> None:
    lines = (
        "torch==2.13.0\ntorch>=2\ntorch==2.13.0+cpu\ntorch\n",
        "torch==2.1; python_version < '3'\ntriton==3.*\n",
        f"{wheels}/plain-1.0-py3-none-any.whl\n",
    )
    made = image.run("".join(lines))
    assert made.status == 0, made.text
    assert image.versions() == {**PROTECTED, "plain": "1.0"}


# -------------------------------------------------------------------------------------------- contradictions of others
NEEDS = (
    "depends on torch>=2.15, and this image has torch 2.13.0+cpu; ask for a version of modern that fits torch"
    " 2.13.0+cpu, or choose an image with torch>=2.15"
)


@pytest.mark.parametrize(
    ("requirements", "package"),
    [("plain\nmodern==1.0\n", "modern 1.0"), ("wraps\n", "modern 1.1 (and 1 other version)")],
)
def test_a_requirement_whose_every_version_wants_another_torch(image: Image, requirements: str, package: str) -> None:
    made = image.run(requirements)
    who = made.failure.partition(": ")[0]  # as this pip names it
    assert who in ("cannot install requirements.txt line 2", "cannot install wraps")
    refused(made, f"{who}: {package} {NEEDS}")
    assert image.versions() == PROTECTED


def source_of(name: str, requires: str = "", build: str = "") -> dict[str, str]:
    """A project whose build backend is its own, so that pip needs no index. build: what building runs."""
    head = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n" + (
        f"Requires-Dist: {requires}\\n" if requires else ""
    )
    return {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "1.0"\n',
        "backend.py": "import os, subprocess\n"
        "def prepare_metadata_for_build_wheel(directory, settings=None):\n"
        f"    os.mkdir(os.path.join(directory, '{name}-1.0.dist-info'))\n"
        f"    with open(os.path.join(directory, '{name}-1.0.dist-info/METADATA'), 'w') as out:\n"
        f"        out.write('{head}')\n"
        f"    return '{name}-1.0.dist-info'\n"
        f"def build_wheel(*_):\n    {build or 'raise NotImplementedError'}\n",
    }


def test_a_project_that_wants_another_torch(image: Image) -> None:
    made = image.run("plain\n", source_of("project", "torch==2.1"))
    who = made.failure.partition(": ")[0]
    assert who.startswith("cannot install project")
    fits = "ask for a version of project that fits torch 2.13.0+cpu, or choose an image with torch==2.1"
    refused(made, f"{who}: project 1.0 depends on torch==2.1, and this image has torch 2.13.0+cpu; {fits}")
    assert image.versions() == PROTECTED


def test_requirements_that_contradict_each_other_are_not_said_to_be_the_images(image: Image) -> None:
    made = image.run("plain==1.0\n-c mine.txt\n", {"mine.txt": "plain==2\n"})
    refused(
        made,
        "cannot install plain==1.0: The user requested plain==1.0; The user requested (constraint) plain==2",
    )


# ---------------------------------------------------------------------------------------------------------- companions
def test_a_companion_that_was_built_for_another_torch_is_refused(image: Image) -> None:
    refused(
        image.run("plain\ntorchvision\n"),
        "torchvision 0.28.0 does not work with this image's torch 2.13.0+cpu (RuntimeError: operator torchvision::nms"
        f" does not exist); add --extra-index-url {INDEX} to the requirements file, or remove it",
    )


def test_without_an_index_of_its_own_the_framework_is_named() -> None:
    have = f"pytest {pytest.__version__}"
    assert misfit("absent-companion", "pytest", "").endswith(
        f"this image's {have} (ModuleNotFoundError: No module named 'absent_companion'); ask for a build for {have}, or"
        " remove it"
    )


def test_a_companion_that_fits_is_taken_where_pip_finds_it(image: Image, wheels: Path) -> None:
    made = image.run(f"--find-links {wheels}/cpu\ntorchvision\n")
    assert made.status == 0, made.text
    assert image.versions() == {**PROTECTED, "torchvision": "0.28.0+cpu"}


# ---------------------------------------------------------------------------------------------- what cannot be compiled
def test_what_may_compile_for_gpus_is_named_where_the_image_has_no_nvcc(image: Image) -> None:
    image.document["compiled_by"] = {"plain": "nvcc", "absent": "nvcc"}
    made = image.run("plain\n")
    assert made.status == 0, made.text
    warning = (
        "warning: plain may compile code for GPUs when it is first used, and this image has no nvcc: take an image"
    )
    assert f"trainworks: {warning} that was built --with nvcc" in made.text
    assert "absent" not in made.text.replace("absent=nvcc", "")


def test_the_reason_of_a_failed_build_names_the_package_and_the_compiler(image: Image) -> None:
    """pip's own last word is a token; what is missing stands far above it."""
    files = source_of("thing", build="subprocess.run(['gcc', '-c', 'thing.c'])")
    (image.base / "code/thing").mkdir(parents=True)
    nowhere = str(image.base / "nowhere")
    made = image.run("./thing\n", {f"thing/{name}": text for name, text in files.items()}, PATH=nowhere)
    refused(
        made,
        "thing has to be compiled, and no compiler was found (FileNotFoundError: [Errno 2] No such file or directory:"
        " 'gcc'); ask for a version that has a wheel, or choose an image with a compiler",
    )


BUILD_FAILED = """\
  error: subprocess-exited-with-error

  \u00d7 {doing} did not run successfully.
  \u2502 exit code: 1
  \u2570\u2500> [6 lines of output]
      running build_ext
{said}
      [end of output]

  note: This error originates from a subprocess, and is likely not a problem with pip.
{end}"""
WHEEL_26 = """  ERROR: Failed building wheel for fast_thing
Failed to build fast_thing
error: failed-wheel-build-for-install

\u00d7 Failed to build installable wheels for some pyproject.toml based projects
\u2570\u2500> fast_thing
"""
WHEEL_25 = """  ERROR: Failed building wheel for fast_thing
Failed to build fast_thing
ERROR: Failed to build installable wheels for some pyproject.toml based projects (fast_thing)
"""
NO_COMPILER = (
    "fast_thing has to be compiled, and no compiler was found ({}); ask for a version that has a wheel, or choose an"
    " image with a compiler"
)


@pytest.mark.parametrize(
    ("said", "end", "reason"),
    [
        ("error: [Errno 2] No such file or directory: 'gcc'", WHEEL_26, NO_COMPILER),
        ("error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory", WHEEL_25, NO_COMPILER),
        ("/bin/sh: 1: c++: not found", WHEEL_26, NO_COMPILER),
        ("Building Linux wheels for Python 3.11 requires a compiler (e.g gcc).", WHEEL_26, NO_COMPILER),
        ("CMake Error: CMAKE_C_COMPILER not set, after EnableLanguage", WHEEL_26, NO_COMPILER),
        ("../meson.build:1:0: ERROR: Unknown compiler(s): [['cc'], ['gcc']]", WHEEL_25, NO_COMPILER),
        (
            "x.c:1:10: fatal error: nothere.h: No such file or directory",
            WHEEL_26,
            "fast_thing could not be built: {} (Building wheel for fast_thing (pyproject.toml))",
        ),
        (
            "ModuleNotFoundError: No module named 'torch'",
            "ERROR: Failed to build 'fast_thing' when getting requirements to build wheel\n",
            "fast_thing could not be built: {} (Building wheel for fast_thing (pyproject.toml))",
        ),
    ],
)
def test_what_pip_25_and_26_print_of_a_failed_build(said: str, end: str, reason: str) -> None:
    printed = BUILD_FAILED.format(doing="Building wheel for fast_thing (pyproject.toml)", said=f"      {said}", end=end)
    assert reason_of(printed.encode()) == reason.format(said)


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        (WHEEL_26, "Failed to build installable wheels for some pyproject.toml based projects: fast_thing"),
        (
            "error: resolution-too-deep\n\n\u00d7 Resolution exceeded maximum depth\n\u2570\u2500> Pip cannot go on\n",
            "Resolution exceeded maximum depth: Pip cannot go on",
        ),
        ("ERROR: Exception:\nTraceback (most recent call last):\n  File x\nKeyError: 'a'\n", ""),
        ("ERROR: first\nERROR: No matching distribution found for x\n", "No matching distribution found for x"),
        ("nothing\n", ""),
    ],
)
def test_other_last_words_of_pip(printed: str, reason: str) -> None:
    assert reason_of(printed.encode()) == reason


# ----------------------------------------------------------------------------------------------------- shown beforehand
def made_for(document: Mapping[str, Json]) -> Environment:
    found = parse_manifest(json.dumps({**manifest_document(), **document}), "made-up")
    return environment(manifest=found, code=Code("/opt/ml/code", entries=("requirements.txt", "train.py")))


def test_the_plan_shows_what_pip_keeps() -> None:
    protected = {f"nvidia-{name}": "1" for name in "abc"}
    made = made_for({"protected": {**PROTECTED, **protected}, "companions": {**COMPANIONS}, "wheel_index": INDEX})
    words = plan(made).requirements
    assert words[:3] == ("/usr/bin/python", "-I", "/opt/trainworks/lib/trainworks_launcher/programs/install.py")
    assert words[3:6] == ("--keep", "torch==2.13.0+cpu", "triton==3.0.0")
    assert words[-8:] == (
        "--",
        "/usr/bin/python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-r",
        "requirements.txt",
    )
    (row,) = [row for row in explain(plan(made), {}) if row.kind == "choice" and row.name == "requirements"]
    kept = "torch 2.13.0+cpu, triton 3.0.0, mpi4py 4.1.2, nvidia-a 1 and 2 more"
    assert (row.origin, row.why) == ("image", f"pip keeps the image's {kept}: they are its constraints")


def test_a_plan_without_requirements_says_nothing_of_them() -> None:
    made = environment(manifest=made_for({"protected": {**PROTECTED}}).manifest)
    assert plan(made).requirements == ()
    assert [row for row in explain(plan(made), {}) if row.name == "requirements"] == []
