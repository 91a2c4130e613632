"""The image tests themselves: the probe over small trees of real ELF files, the
scanner over real layers, whole runs.

Most need no engine: the probe runs as a child process here, and ``LocalEngine``
serves this machine as image.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import typing
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest
from testinfra.backend.local import LocalBackend  # type: ignore[import-untyped]

from image.here import Here
from image.libraries import Tree
from trainworks import engine as engines
from trainworks.engine.archive import ImageConfiguration, write_archive
from trainworks.engine.protocol import (
    BuildRequest,
    BuiltImage,
    Completed,
    Container,
    Engine,
    EngineInformation,
    HistoryEntry,
    Isolation,
    Job,
    Layer,
    Progress,
    Report,
    StepEvent,
)
from trainworks.errors import EngineUnavailableError, ImageTestError
from trainworks.imagetest import probe, probe_request, secrets
from trainworks.imagetest import test_promises as promises
from trainworks.imagetest.probe.answers import QUESTIONS, Answer, Request
from trainworks.imagetest.results import CheckResult, component_width, line
from trainworks.imagetest.run import run_checks
from trainworks.imagetest.test_promises import ImageUnderTest
from trainworks.plan.checks import (
    Check,
    CommandCheck,
    ConfigurationCheck,
    DebianPackageCheck,
    HardenedLibrariesCheck,
    ImportCheck,
    LabelCheck,
    LoadedLibraryCheck,
    OpenableLibrariesCheck,
    PathCheck,
    PythonPackageCheck,
    SearchPathCheck,
    SecretsCheck,
    SharedLibrariesCheck,
    SingleLibraryCheck,
    SizeCheck,
    StartCheck,
)
from trainworks.render.steps import image_steps

# A key in form only: its body says that it is one of a test.
PRIVATE_KEY = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + "bm90YWtleW5vdGFrZXlub3Rha2V5bm90YWtleW5vdGFrZXk\n" * 3
).encode() + b"-----END OPENSSH PRIVATE KEY-----\n"

IMAGE = BuiltImage(
    reference="local",
    identifier="sha256:0",
    size=5_000_000,
    labels={"maker": "trainworks"},
    environment={"PATH": "/usr/bin:/bin"},
)


# --- the probe ------------------------------------------------------------------------------------


def answer(root: Path, environment: Mapping[str, str] | None = None, **parts: object) -> Answer:
    """Ask as an image is asked, in a child, with a folder as the image's root."""
    request = probe_request.request_of((), IMAGE, python=sys.executable)
    request.update(typing.cast("Request", {"root": str(root), **parts}))
    container = Here({"PATH": "/usr/bin:/bin", **(environment or {})})
    return probe_request.ask(container, request, interpreter=sys.executable)


def ask(
    root: Path, *checks: Check, environment: Mapping[str, str] | None = None
) -> list[list[str]]:
    """Return the lines about each check: the problem, and last the advice."""
    return answer(root, environment, checks=probe_request.request_of(checks, IMAGE)["checks"])[
        "problems"
    ]


def missing(
    tree: Tree,
    *roots: str,
    provided: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> set[tuple[str, str]]:
    """Return the missing libraries: the file, as the tree calls it, and the name."""
    roots = tuple(f"{tree.root}{root}" for root in roots or ("/opt",))
    # The folder is the image's root for checks that look at all files; the loader knows only this
    # machine's.
    check = SharedLibrariesCheck(component="c", roots=roots, provided=provided)
    (detail,) = ask(tree.root, check, environment=environment)
    matches = (
        re.match(r"(\S+).* does not find ([^;]+)", line.replace(str(tree.root), ""))
        for line in detail
    )
    return {(match[1], match[2]) for match in matches if match}


def test_the_program_runs_on_an_old_python_with_nothing_installed() -> None:
    folder = Path(str(probe.__file__)).parent
    alone = {"probe.importing", "probe.frameworks"}
    assert {f"probe.{path.stem}" for path in folder.glob("*.py")} == {
        "probe.__init__",
        *alone,
        *probe_request.PROBE.modules,
    }
    for path in folder.glob("*.py"):
        module = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
        imported = {
            alias.name
            for node in ast.walk(module)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        imported |= {
            node.module or "" for node in ast.walk(module) if isinstance(node, ast.ImportFrom)
        }
        imported -= {f"trainworks.imagetest.{name}" for name in probe_request.PROBE.modules}
        assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names
    # One argument of a command line has at most 128 KiB.
    command = probe_request.command_of(
        ("python",),
        probe_request.PROBE,
        probe_request.request_of((), IMAGE),
        probe_request.new_mark(),
    )
    assert all(len(argument) < 100_000 for argument in command)


def test_missing_library_is_named_with_the_place_where_it_lies(tree: Tree) -> None:
    tree.library("/opt/a/liba.so", "libb.so", "libz9.so")
    tree.library("/opt/b/libb.so")
    check = SharedLibrariesCheck(component="c", roots=(f"{tree.root}/opt",))
    *lines, advice = ask(tree.root, check)[0]
    assert {line.partition("; it lies in ")[0] for line in lines} == {
        f"{tree.root}/opt/a/liba.so does not find {name}" for name in ("libb.so", "libz9.so")
    }
    (detail,) = (line for line in lines if "libb.so" in line)
    assert "; it lies in " in detail
    assert "/opt/b" in detail
    assert advice.startswith("install the library")


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("rpath", ["$ORIGIN/../b", "${ORIGIN}/../b", "/nowhere:{root}/opt/b"])
def test_library_is_found_by_rpath_and_runpath(tree: Tree, rpath: str, inherited: bool) -> None:
    tree.library(
        "/opt/a/liba.so",
        "libb.so",
        rpath=rpath.replace("{root}", str(tree.root)),
        inherited=inherited,
    )
    tree.library("/opt/b/libb.so")
    assert missing(tree) == set()


def test_a_file_is_asked_by_itself_unless_it_is_only_a_dependency(tree: Tree) -> None:
    tree.library("/opt/a/liba.so", "libb.so", rpath="$ORIGIN/links")
    tree.library("/opt/real/libb.so", "libz9.so", rpath="$ORIGIN")
    tree.library("/opt/a/links/libz9.so")
    (tree.root / "opt/a/links/libb.so").symlink_to("../../real/libb.so")
    assert missing(tree, "/opt/a") == set()
    assert missing(tree, "/opt") == set()
    # By itself, where no link leads to it, the file finds nothing.
    assert missing(tree, "/opt/real") == {("/opt/real/libb.so", "libz9.so")}


def test_the_file_that_names_a_library_is_told_not_the_one_that_loads_it(tree: Tree) -> None:
    tree.library("/opt/a/liba.so", "libb.so", rpath=f"{tree.root}/opt/b", inherited=False)
    tree.library("/opt/b/libb.so", "libz9.so")
    tree.library("/opt/b/libz9.so")
    assert missing(tree, "/opt/a") == {("/opt/b/libb.so", "libz9.so")}


@pytest.mark.parametrize("folder", ["/opt", "/opt/site-packages"])
def test_a_library_that_is_only_auxiliary_may_be_absent(tree: Tree, folder: str) -> None:
    """NVIDIA's nvtx has one, by a mistake in its linker's options: `-fvisibility=hidden`."""
    tree.library(f"{folder}/liba.so", auxiliary="visibility=hidden")
    check = SharedLibrariesCheck(component="c", roots=(f"{tree.root}/opt",))
    assert ask(tree.root, check)[0] == []


def test_a_library_that_is_found_and_cannot_be_loaded_is_told(tree: Tree) -> None:
    tree.library("/opt/a/liba.so", "libb.so", rpath="$ORIGIN")
    tree.library("/opt/site-packages/c.so", "libb.so", rpath=f"{tree.root}/opt/a")
    (tree.root / "opt/a/libb.so").write_text("INPUT(libc.so.6)")
    (detail,) = ask(tree.root, SharedLibrariesCheck(component="c", roots=(f"{tree.root}/opt",)))
    assert [
        line.split(" cannot be loaded: ")[0].replace(str(tree.root), "") for line in detail[:-1]
    ] == [
        "/opt/a/liba.so",
        "/opt/site-packages/c.so",
    ]


def test_library_path_driver_and_what_python_brings(tree: Tree) -> None:
    tree.library("/opt/liba.so", "libb.so", "libc.so.6", "libcuda.so.1")
    tree.library("/opt/site-packages/a b/c.so", "libgone.so")
    tree.library("/srv/b/libb.so")
    gone = ("/opt/site-packages/a", "libgone.so")
    assert missing(tree) == {
        *(("/opt/liba.so", name) for name in ("libb.so", "libcuda.so.1")),
        gone,
    }
    environment = {"LD_LIBRARY_PATH": f"/nowhere:{tree.root}/srv/b"}
    assert missing(tree, provided=("libcuda.so.1",), environment=environment) == {gone}


def test_preloaded_library_counts_for_its_package_and_those_that_require_it(tree: Tree) -> None:
    packages = "/opt/site-packages"
    tree.library(f"{packages}/nvidia/lib/libcudart.so.12")
    tree.library(
        f"{packages}/torch/lib/libtorch.so", "libcudart.so.12", rpath="$ORIGIN/../../nvidia/lib"
    )
    for user in ("torch/lib/plugin.so", "vision/_C.so", "stranger/_C.so"):
        tree.library(f"{packages}/{user}", "libcudart.so.12")
    tree.distribution("torch", "torch/lib/libtorch.so", "torch/lib/plugin.so")
    tree.distribution("vision", "vision/_C.so", requires=("Torch",))
    tree.distribution("stranger", "stranger/_C.so")
    assert missing(tree) == {(f"{packages}/stranger/_C.so", "libcudart.so.12")}


def test_preload_needs_a_library_that_finds_it(tree: Tree) -> None:
    packages = "/opt/site-packages"
    tree.library(f"{packages}/nvidia/lib/libcudart.so.12")
    tree.library(f"{packages}/torch/one.so", "libcudart.so.12")
    tree.library(f"{packages}/torch/two.so", "libcudart.so.12", rpath="$ORIGIN/wrong")
    assert len(missing(tree)) == 2


def test_damaged_file_is_told_and_other_machines_are_passed_by(tree: Tree) -> None:
    tree.library("/opt/ours.so", "libnone.so")
    content = bytearray((tree.root / "opt/ours.so").read_bytes())
    content[18:20] = struct.pack("<H", 190)  # EM_CUDA
    (tree.root / "opt/gpu.so").write_bytes(content)
    head = bytes((tree.root / "opt/ours.so").read_bytes()[:20])
    (tree.root / "opt/damaged.so").write_bytes(head + b"\xff" * 44)
    (tree.root / "opt/short.so").write_bytes(head)
    (tree.root / "opt/text.so").write_text("INPUT(libc.so)")
    roots = tuple(f"{tree.root}/{name}" for name in ("opt", "none"))
    (detail,) = ask(tree.root, SharedLibrariesCheck(component="c", roots=roots))
    gone, *damaged, missed, _ = (line.replace(str(tree.root), "") for line in detail)
    assert gone == "/none does not exist"
    for name, damage_line in zip(("damaged", "short"), damaged, strict=True):
        assert re.fullmatch(rf"/opt/{name}\.so: .* \(the file is damaged\)", damage_line)
    assert missed.startswith("/opt/ours.so does not find libnone.so")


def test_two_libraries_of_one_name_are_found(tree: Tree) -> None:
    tree.library("/usr/lib/libnccl.so.2.20.5")
    (tree.root / "usr/lib/libnccl.so.2").symlink_to("libnccl.so.2.20.5")
    (tree.root / "usr/lib/libnccl.so.2.txt").write_text("not a library")
    check = SingleLibraryCheck(component="c", soname="libnccl.so.2")
    assert ask(tree.root, check) == [[]]
    tree.library("/opt/wheel.libs/libnccl-0a1b2c3d.so.2")
    ((one, other, _),) = ask(tree.root, check)
    assert {one, other} == {"/usr/lib/libnccl.so.2.20.5", "/opt/wheel.libs/libnccl-0a1b2c3d.so.2"}


def test_loaded_library_is_read_from_the_process(tree: Tree) -> None:
    tree.library("/opt/libfine.so.1")
    tree.library("/srv/libfine.so.1")
    library = tree.root / "opt/libfine.so.1"
    (tree.root / "loads.py").write_text(
        f"import ctypes\nctypes.CDLL({str(library)!r})\nprint('loud')\n"
    )
    (tree.root / "twice.py").write_text(
        f"import loads\nloads.ctypes.CDLL({str(tree.root / 'srv/libfine.so.1')!r})\n"
    )
    checks = [
        LoadedLibraryCheck(component="c", module=module, library=str(library))
        for module in ("loads", "json", "twice", "no_such_module")
    ]
    loads, other, twice, absent = ask(
        tree.root, *checks, environment={"PYTHONPATH": str(tree.root)}
    )
    assert loads == []
    assert other[0].startswith("no library of this name is loaded")
    assert twice[0].startswith(f"it also loads {tree.root}/srv/libfine.so.1")
    assert "no_such_module" in absent[1]


def test_search_path_entries(tmp_path: Path) -> None:
    (tmp_path / "opt/bin").mkdir(parents=True)
    (tmp_path / "opt/file").touch()
    environment = {"GOOD": "/opt/bin:/opt", "BAD": "/opt/bin::bin:/opt/none:/opt/file", "EMPTY": ""}
    checks = [
        SearchPathCheck(component="c", variable=name) for name in ("GOOD", "EMPTY", "UNSET", "BAD")
    ]
    *good, bad = ask(tmp_path, *checks, environment=environment)
    assert good == [[], [], []]
    assert [problem.split()[-1] for problem in bad[:-1]] == ["colon", "program", "exist", "folder"]


def test_globs_distributions_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/deep/site-packages/big").mkdir(parents=True)
    (tmp_path / "usr/lib/deep/site-packages/big/file").write_bytes(bytes(1000))
    (tmp_path / "usr/gcc-12").symlink_to("nowhere")
    checks = [
        PathCheck(component="c", path=path, state="absent") for path in ("/usr/gcc*", "/opt/**")
    ]
    gcc, nothing = ask(tmp_path, *checks)
    assert (gcc[:-1], nothing) == (["/usr/gcc-12"], [])
    contents = answer(tmp_path, distributions=True, sizes=True)
    assert [
        distribution["version"]
        for distribution in contents["distributions"]
        if distribution["name"] == "pytest"
    ] == [pytest.__version__]
    assert [tuple(size) for size in contents["sizes"]] == [
        ("/usr/lib/deep/site-packages/big", 1000)
    ]


GUARDED = """
#include <string.h>
int longest(const char *text) {
    char copy[64];
    strcpy(copy, text);
    return (int)strlen(copy);
}
"""

HARDENED = (
    "-O2",
    "-fstack-protector-strong",
    "-D_FORTIFY_SOURCE=2",
    "-Wl,-z,relro,-z,now,-z,noexecstack",
)


@pytest.mark.parametrize(
    ("left_out", "messages"),
    [
        pytest.param("", (), id="all of them"),
        pytest.param(
            "-Wl,-z,relro,-z,now,-z,noexecstack",
            ("-z relro", "-z now", "-z noexecstack"),
            id="the linker's",
        ),
        pytest.param(
            "-fstack-protector-strong",
            ("no file is compiled with -fstack-protector-strong",),
            id="the stack's",
        ),
        pytest.param(
            "-D_FORTIFY_SOURCE=2",
            ("no file is compiled with -D_FORTIFY_SOURCE=2",),
            id="the buffers'",
        ),
    ],
)
def test_libraries_without_protections_are_found(
    tmp_path: Path, tree: Tree, left_out: str, messages: tuple[str, ...]
) -> None:
    unprotected = [
        "-fno-stack-protector",
        "-U_FORTIFY_SOURCE",
        "-Wl,-z,norelro,-z,lazy,-z,execstack",
    ]
    options = (*unprotected, *(option for option in HARDENED if option != left_out))
    library = tmp_path / "libguarded.so"
    command = (tree.compiler, "-shared", "-fPIC", *options, "-x", "c", "-", "-o", str(library))
    subprocess.run(command, input=GUARDED, text=True, check=True)
    problems, missing = ask(
        tmp_path,
        HardenedLibrariesCheck(component="c", libraries=("/lib*.so",)),
        HardenedLibrariesCheck(component="c", libraries=("/gone/lib*.so",)),
    )
    assert missing[:-1] == ["no file fits /gone/lib*.so"]
    assert len(problems) == len(messages) + bool(messages), problems
    for problem, words in zip(problems, messages, strict=False):
        assert words in problem, problems


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: only Linux has this loader")
def test_libraries_that_are_opened_late_are_opened(tree: Tree) -> None:
    tree.library("/opt/late/libfine.so.1")
    tree.library("/opt/late/libdriver.so.1", "libcuda.so.1")
    # Needs a library that lies beside it and names no folder, as libcufile_rdma: its only user is
    # that library.
    tree.library("/opt/late/libhelper.so.1", "libfine.so.1", "libother.so.1")
    tree.library("/opt/late/libother.so.1", "libfine.so.1")
    tree.library("/opt/gone/liblost.so.1", "libgone.so.1")
    tree.library("/opt/gone/libround.so.1", "libthere.so.1")
    tree.library("/opt/gone/libthere.so.1", "libround.so.1")
    (tree.root / "opt/gone/libcut.so.1").write_bytes(
        (tree.root / "opt/late/libfine.so.1").read_bytes()[:300]
    )
    (tree.root / "opt/gone/link.so.1").symlink_to("libcut.so.1")
    patterns = [f"{tree.root}/opt/{folder}/lib*.so*" for folder in ("late", "gone", "none")]
    fine, broken = (
        OpenableLibrariesCheck(component="c", libraries=tuple(some), provided=("libcuda.so.1",))
        for some in (patterns[:1], patterns)
    )
    request = [dataclasses.asdict(check) for check in (fine, broken)]
    good, (nothing, cut, lost, *circle, _) = answer(Path("/"), checks=request)["problems"]
    assert good == []
    assert nothing == f"no file fits {patterns[2]}"
    assert cut.startswith(f"{tree.root}/opt/gone/libcut.so.1 cannot be opened: ")
    assert lost == f"{tree.root}/opt/gone/liblost.so.1 does not find libgone.so.1"
    assert [line.split()[0].rpartition("/")[2] for line in circle] == [
        "libround.so.1",
        "libthere.so.1",
    ]


# --- history --------------------------------------------------------------------------------------


DOCKERFILE = """\
FROM base AS system
RUN --mount=type=cache,target=/x \\
    # A comment.
    apt-get install one
FROM system AS builder
RUN make
FROM system AS image
COPY --from=builder /opt/root /
RUN echo   a && b
LABEL x=y
"""


def test_a_history_has_the_steps_that_were_rendered() -> None:
    steps = image_steps(DOCKERFILE)
    assert steps == ("RUN apt-get install one", "COPY", "RUN echo a && b")
    of_docker = [
        "trainworks: root file system",
        "RUN /bin/sh -c apt-get install one # buildkit",
        "COPY /opt/root / # buildkit",
        "RUN /bin/sh -c echo   a && b # buildkit",
        "LABEL x=y",
    ]
    of_buildah = [
        "/bin/sh -c #(nop) ADD file:1 in / ",
        "|1 https_proxy=http://proxy /bin/sh -c apt-get install one",
        "/bin/sh -c #(nop) COPY dir:2 in / ",
        "/bin/sh -c echo a && b",
        "/bin/sh -c #(nop) LABEL x=y",
    ]
    of_old_buildah = [
        *of_buildah[:1],
        "|1 a=b /bin/sh -c --mount=type=cache,target=/x     --network=none apt-get install one",
        *of_buildah[2:],
    ]
    for texts in (of_docker, of_buildah, of_old_buildah):
        history = [HistoryEntry(created_by=text, size=0) for text in texts]
        assert promises.history_problems(steps, history) == []
        assert "should have 3" in promises.history_problems(steps, history[3:])[0]
        assert promises.history_problems(steps, []) != []
        other = [*history, HistoryEntry(created_by="RUN /bin/sh -c rm -rf / # buildkit", size=0)]
        assert "history says of step 1" in promises.history_problems(steps, other)[0]


# --- configuration --------------------------------------------------------------------------------


def configured(image: BuiltImage, *, others: bool = False) -> str:
    """Return the problems that the check finds in an image's configuration."""
    check = ConfigurationCheck(
        component="c",
        environment=(("LANG", "C.UTF-8"), ("PATH", "/usr/bin:/bin")),
        labels=("title",),
        entry_point=("/train",),
        command=("train",),
        working_folder="/code",
        others=others,
        architecture="amd64",
    )
    subject = ImageUnderTest(engine=LocalEngine(), image=image, checks=(check,))
    (result,) = run_checks(subject, report=lambda _: None)
    assert result.passed == (result.detail == "")
    return result.detail


CONFIGURED = dataclasses.replace(
    IMAGE,
    environment={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
    labels={"title": "x"},
    entry_point=("/train",),
    command=("train",),
    working_folder="/code",
    stop_signal="SIGTERM",
    user="root",
    architecture="amd64",
    system="linux",
    configuration={"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["train"], "ArgsEscaped": True},
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"entry_point": ("/bin/false",)},
            "ENTRYPOINT is ['/bin/false'], and should be ['/train']",
        ),
        ({"command": ()}, "CMD is [], and should be ['train']"),
        ({"working_folder": "/"}, "WORKDIR is '/', and should be '/code'"),
        ({"user": "nobody"}, "USER is 'nobody'"),
        ({"stop_signal": "SIGKILL"}, "STOPSIGNAL is 'SIGKILL'"),
        ({"volumes": ("/opt/ml",)}, "VOLUME is ['/opt/ml']"),
        ({"configuration": {"OnBuild": ["RUN false"]}}, "ONBUILD is ['RUN false']"),
        (
            {"configuration": {"Healthcheck": {"Test": ["CMD", "false"]}}},
            "HEALTHCHECK is {'Test': ['CMD', 'false']}",
        ),
        ({"configuration": {"ExposedPorts": {"22/tcp": {}}}}, "EXPOSE is {'22/tcp': {}}"),
        ({"configuration": {"Shell": ["/bin/false"]}}, "SHELL is ['/bin/false']"),
        ({"configuration": {"StopTimeout": 1}}, "StopTimeout is 1, and should be None"),
        ({"configuration": {"Hostname": "algo-1"}}, "Hostname is 'algo-1', and should be None"),
        ({"configuration": {"NetworkDisabled": True}}, "NetworkDisabled is True"),
        ({"architecture": "arm64"}, "architecture is 'arm64', and should be 'amd64'"),
        ({"system": "plan9"}, "os is 'plan9', and should be 'linux'"),
        ({"environment": {"PATH": "/usr/bin:/bin"}}, "ENV LANG is missing"),
        (
            {"labels": {"title": "x", "trainworks.inputs": "y", "evil": "z"}},
            "LABEL evil is 'z', and nothing sets it",
        ),
        (
            {"environment": {**CONFIGURED.environment, "LANG": "POSIX"}},
            "ENV LANG is 'POSIX', and should be 'C.UTF-8'",
        ),
        (
            {"environment": {**CONFIGURED.environment, "PYTHONPATH": "/tmp"}},
            "ENV PYTHONPATH is '/tmp', and nothing",
        ),
    ],
)
def test_the_configuration_is_the_plans(changes: dict[str, typing.Any], message: str) -> None:
    assert configured(CONFIGURED) == ""
    assert configured(dataclasses.replace(CONFIGURED, **changes)).startswith(message)


def test_variables_of_a_makers_base_image_are_its_own() -> None:
    image = dataclasses.replace(
        CONFIGURED, environment={**CONFIGURED.environment, "NVARCH": "x86_64"}
    )
    assert configured(image, others=True) == ""


# --- secrets --------------------------------------------------------------------------------------


def layer(name: str, files: Mapping[str, bytes]) -> Layer:
    """Return a layer as an engine streams it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    packed.seek(0)
    return Layer(name=name, archive=tarfile.open(fileobj=packed, mode="r|"))


def rules(files: Mapping[str, bytes], forbidden: tuple[str, ...] = ()) -> set[str]:
    return {finding.rule for finding in secrets.scan_layers([layer("one", files)], forbidden)}


def test_clean_layers_have_no_finding() -> None:
    files = {
        "etc/passwd": b"root:x:0:0\n",
        # Programs that read keys, AWS's example, public test data, mount points, locks: none of
        # them opens anything.
        "usr/lib/python3/dist-packages/reader.py": (
            b'START = b"-----BEGIN OPENSSH PRIVATE KEY-----"\n'
        ),
        "opt/venv/lib/python3.11/site-packages/botocore/examples.json": b'"AKIAIOSFODNN7EXAMPLE"',
        "opt/venv/lib/python3.11/site-packages/tornado/test/test.key": PRIVATE_KEY,
        "root/.netrc": b"",
        "var/lib/apt/lists/lock": b"",
        "etc/pip.conf": b"[global]\nindex-url = https://mirror.example/simple\n",
        "opt/model.bin": b"\0" + PRIVATE_KEY,
    }
    assert secrets.scan_layers([layer("one", files)], ("http://proxy.example:3128", "", " ")) == ()


def test_a_key_in_a_wheel_of_an_index_is_public_and_one_in_a_wheel_of_ones_own_is_not() -> None:
    """awscli's manual has private keys.

    Its file has to be the one that its RECORD says, in the same layer.
    """
    packages, path = "opt/venv/lib/python3.11/site-packages", "awscli/examples/create.rst"
    digest = base64.urlsafe_b64encode(hashlib.sha256(PRIVATE_KEY).digest()).decode().rstrip("=")
    record = (
        f"{path},sha256={digest},{len(PRIVATE_KEY)}\nawscli-1.45.26.dist-info/RECORD,,\n".encode()
    )
    files = {
        f"{packages}/{path}": PRIVATE_KEY,
        f"{packages}/awscli-1.45.26.dist-info/RECORD": record,
    }

    def kinds_of_secrets(files: Mapping[str, bytes], *published: str) -> list[str]:
        return [
            finding.rule for finding in secrets.scan_layers([layer("one", files)], (), published)
        ]

    assert kinds_of_secrets(files, "awscli") == []
    assert kinds_of_secrets(files) == kinds_of_secrets(files, "boto3") == ["private key"]
    assert kinds_of_secrets(files | {f"{packages}/{path}": PRIVATE_KEY + b"\n"}, "awscli") == [
        "private key"
    ]
    assert kinds_of_secrets(files | {"srv/key.pem": PRIVATE_KEY}, "awscli") == ["private key"]
    apart = [
        layer(str(number), {name: content}) for number, (name, content) in enumerate(files.items())
    ]
    assert [finding.rule for finding in secrets.scan_layers(apart, (), ("awscli",))] == [
        "private key"
    ]


@pytest.mark.parametrize("backwards", [False, True])
def test_key_that_another_layer_deletes_is_found(backwards: bool) -> None:
    layers = [
        layer("sha256:aaa", {"etc/ssh/ssh_host_rsa_key": PRIVATE_KEY, "srv/keys/one": PRIVATE_KEY}),
        layer("sha256:bbb", {"etc/ssh/.wh.ssh_host_rsa_key": b"", "srv/keys/.wh..wh..opq": b""}),
    ]
    layers_in_order = reversed(layers) if backwards else layers
    secrets_found = secrets.scan_layers(layers_in_order)
    assert {(finding.path, finding.where, finding.deleted_in) for finding in secrets_found} == {
        ("etc/ssh/ssh_host_rsa_key", "layer sha256:aaa", "layer sha256:bbb"),
        ("srv/keys/one", "layer sha256:aaa", "layer sha256:bbb"),
    }
    assert "deletes it" in secrets.summary(secrets_found)


@pytest.mark.parametrize(
    ("path", "content", "rule"),
    [
        ("srv/key.pem", PRIVATE_KEY, "private key"),
        ("srv/account.json", PRIVATE_KEY.replace(b"\n", b"\\n"), "private key"),
        ("srv/settings.py", b"KEY = 'AKIA" + b"Z" * 16 + b"'", "AWS access key"),
        ("root/.ssh/id_ed25519", b"x", "ssh key or authorization of a user"),
        ("root/.ssh/authorized_keys", b"x", "ssh key or authorization of a user"),
        ("root/.netrc", b"machine x", "credentials (.netrc)"),
        ("home/user/.aws/credentials", b"x", "AWS credentials"),
        ("etc/apt/auth.conf.d/90private", b"x", "apt credentials"),
        ("root/.docker/config.json", b'{"auths": {"r": {"auth": "eDp5"}}}', "registry credentials"),
        (
            "root/.config/pip/pip.conf",
            b"index-url = https://me:word@index.example/",
            "package index credentials",
        ),
        (
            "etc/apt/apt.conf.d/01proxy",
            b'Acquire::http::Proxy "http://p.example";',
            "proxy of the build host",
        ),
        (
            "etc/environment",
            b"PATH=/bin\nhttps_proxy=http://p.example\n",
            "proxy of the build host",
        ),
        ("usr/local/share/ca-certificates/x.crt", b"x", "certificate authority of the build host"),
        ("var/lib/apt/lists/index_main", b"x", "package cache (apt)"),
        ("var/cache/apt/pkgcache.bin", b"x", "package cache (apt)"),
        ("root/.cache/pip/http/0/1", b"x", "package cache"),
        ("opt/.cache/uv/archive/1", b"x", "package cache"),
    ],
)
def test_rules(path: str, content: bytes, rule: str) -> None:
    assert rules({path: content}) == {rule}


def test_forbidden_string_is_found_and_never_shown() -> None:
    word = "http://proxy.example:3128"
    layers = [
        layer(
            "one",
            {"srv/a.conf": f"x {word} y".encode(), f"srv/list_{word.replace('/', '_')}": b"x"},
        )
    ]
    exposed_secrets = secrets.scan_layers(layers, ("other", word, word.replace("/", "_")))
    exposed_secrets += secrets.scan_texts(
        [("step 1 of the history", f"RUN fetch {word}")], ("other", word)
    )
    assert len(exposed_secrets) == 3
    text = secrets.summary(exposed_secrets)
    assert "number 2" in text
    assert "proxy.example" not in text


def test_history_labels_and_environment() -> None:
    texts = [
        ("step 1 of the history", "|1 http_proxy=http://p.example /bin/sh -c true"),
        ("step 2 of the history", "ENV AWS_SECRET_ACCESS_KEY=abcdefghijklmnop"),
        ("step 3 of the history", "RUN pip install -i https://me:word@index.example/simple x"),
        (
            "step 4 of the history",
            'RUN http_proxy= HTTPS_PROXY="$proxy" TOKEN=$(cat /run/secrets/token) true',
        ),
    ]
    assert [(finding.where[5], finding.rule) for finding in secrets.scan_texts(texts)] == [
        ("1", "proxy of the build host"),
        ("2", "secret in a variable"),
        ("3", "credentials in a URL"),
    ]


# --- whole runs -----------------------------------------------------------------------------------


@dataclass
class LocalContainer:
    """This machine as a container; its Python stands for the image's own."""

    identifier: str = "this machine"
    interrupt: bool = False
    lost: int = 0  # outputs that do not arrive

    def run(self, command: tuple[str, ...], *, timeout: float = 120.0) -> Completed:
        if self.interrupt:
            raise KeyboardInterrupt
        program = (
            sys.executable
            if command[0].startswith(("/usr/bin/python3", "/opt/venv/bin/"))
            else command[0]
        )
        child = subprocess.run(
            (program, *command[1:]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        self.lost -= 1
        output = "" if self.lost >= 0 else child.stdout
        return Completed(status=child.returncode, output=output)

    def testinfra_backend(self) -> object:
        return LocalBackend()


@dataclass
class LocalEngine:
    """An engine whose only image is this machine, with layers and a history that the test gives."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    steps: tuple[HistoryEntry, ...] = ()
    starts: bool = True
    ends: bool = True
    interrupt: bool = False
    open_containers: int = 0
    name: str = "local"

    @contextlib.contextmanager
    def container(self, reference: str, *, isolated: Isolation = "") -> Iterator[Container]:  # noqa: ARG002
        if not self.starts:
            raise EngineUnavailableError(
                f"{reference} does not start", hint="Look at its entry point."
            )
        self.open_containers += 1
        try:
            yield LocalContainer(interrupt=self.interrupt)
        finally:
            self.open_containers -= 1
        if not self.ends:
            raise EngineUnavailableError("the container does not end")

    @contextlib.contextmanager
    def layers(self, reference: str) -> Iterator[Iterator[Layer]]:
        yield iter([layer(reference, self.files)])

    def history(self, reference: str) -> tuple[HistoryEntry, ...]:
        return self.steps if reference == "local" else ()

    def probe(self, report: Report = print) -> EngineInformation:
        raise NotImplementedError

    def inspect(self, reference: str) -> BuiltImage | None:
        raise NotImplementedError

    def names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def load(self, archive: Path) -> None:
        raise NotImplementedError

    def pull(self, reference: str, *, timeout: float) -> bool:
        raise NotImplementedError

    def tag(self, reference: str, name: str) -> None:
        raise NotImplementedError

    def build(self, request: BuildRequest, progress: Progress) -> BuiltImage:
        raise NotImplementedError

    def push_command(
        self, image: BuiltImage, name: str, *, plain: bool
    ) -> contextlib.AbstractContextManager[tuple[str, ...]]:
        raise NotImplementedError

    def archive(self, reference: str) -> contextlib.AbstractContextManager[typing.IO[bytes]]:
        raise NotImplementedError

    def run(self, reference: str, job: Job) -> Completed:
        raise NotImplementedError

    def contents(self, reference: str) -> contextlib.AbstractContextManager[Iterator[Layer]]:
        raise NotImplementedError

    def isolates(self) -> str:
        return ""

    def remove(self, reference: str) -> None:
        raise NotImplementedError


def run(
    engine: LocalEngine, *checks: Check, forbidden: tuple[str, ...] = ()
) -> tuple[CheckResult, ...]:
    reported: list[CheckResult] = []
    subject = ImageUnderTest(engine=engine, image=IMAGE, checks=checks, forbidden=forbidden)
    results = run_checks(subject, report=reported.append)
    assert list(results) == reported
    return results


def test_an_answer_that_the_engine_loses_is_asked_for_again() -> None:
    request = probe_request.request_of([ImportCheck(component="python", module="json")], IMAGE)
    assert probe_request.ask(LocalContainer(lost=2), request) == probe_request.ask(
        LocalContainer(), request
    )
    assert probe_request.run_printing(LocalContainer(lost=1), ("false",), timeout=60).status == 1
    assert probe_request.run_printing(
        LocalContainer(lost=3), ("echo", "a"), timeout=60
    ) == Completed(status=0, output="")


def test_every_kind_of_promise_has_its_function() -> None:
    kinds = {kind.__dataclass_fields__["kind"].default for kind in typing.get_args(Check)}
    assert set(promises.PROMISES) == kinds
    for kind, function in promises.PROMISES.items():
        name = f"test_{kind.replace('-', '_')}"
        assert function.__name__ == ("test_probe" if kind in QUESTIONS and kind != "path" else name)


def test_kept_and_broken_promises_in_the_order_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "program").touch(mode=0o755)
    path = functools.partial(PathCheck, component="files")
    expected: list[tuple[Check, bool]] = [
        (LabelCheck(component="labels", label="maker", value="trainworks"), True),
        (path(path=str(tmp_path), state="directory"), True),
        (SizeCheck(component="image", megabytes=5), True),
        (path(path=str(tmp_path / "file"), state="file"), True),
        (path(path=str(tmp_path / "file"), state="executable"), False),
        (path(path=str(tmp_path / "file"), state="directory"), False),
        (path(path=str(tmp_path / "program"), state="executable"), True),
        (path(path=str(tmp_path / "no*"), state="absent"), True),
        (path(path=str(tmp_path / "fi*"), state="absent"), False),
        (path(path=str(tmp_path / "none"), state="file"), False),
        (
            CommandCheck(
                component="c", command=("sh", "-c", "echo out; echo err >&2"), expect="out\nerr"
            ),
            True,
        ),
        (CommandCheck(component="c", command=("sh", "-c", "echo some; exit 3")), False),
        (CommandCheck(component="c", command=("echo", "some"), expect="other"), False),
        (ImportCheck(component="python", module="json"), True),
        (ImportCheck(component="python", module="no_such_module"), False),
        (
            PythonPackageCheck(
                component="python", distribution="pytest", version=pytest.__version__
            ),
            False,
        ),
        (SearchPathCheck(component="c", variable="NO_SUCH_VARIABLE"), True),
        (LabelCheck(component="labels", label="maker", value="other"), False),
        (LabelCheck(component="labels", label="none", value=""), False),
        (SecretsCheck(component="secrets"), True),
    ]
    results = run(LocalEngine(), *(check for check, _ in expected))
    assert [(result.component, result.passed) for result in results] == [
        (check.component, passed) for check, passed in expected
    ]
    details = "\n".join(result.detail for result in results)
    for part in (
        "status 3",
        "its mode is 644",
        "is not a directory",
        "no_such_module",
        "it is 'trainworks'",
        "no label",
    ):
        assert part in details
    assert all(bool(result.detail) != result.passed for result in results)
    assert capsys.readouterr() == ("", "")


def test_lines_for_a_person() -> None:
    checks = (
        PythonPackageCheck(component="torch", distribution="torch", version="2.4.1"),
        SecretsCheck(component="image"),
    )
    assert component_width(checks) == 5
    result = CheckResult(
        component="torch", title="torch 2.4.1 is installed", passed=True, detail="", seconds=0.0
    )
    assert line(result, width=5) == "ok    torch  torch 2.4.1 is installed"
    result = CheckResult(component="torch", title="t", passed=False, detail="one\ntwo", seconds=0.0)
    assert line(result, width=5) == "FAIL  torch  t\n      one\n      two"


def test_secrets_of_layers_and_history_reach_the_report() -> None:
    engine = LocalEngine(
        files={"root/.netrc": b"machine x"},
        steps=(
            HistoryEntry(created_by="RUN true", size=0),
            HistoryEntry(created_by="RUN fetch index.example", size=0),
        ),
    )
    (result,) = run(engine, SecretsCheck(component="image"), forbidden=("index.example",))
    assert not result.passed
    assert "/root/.netrc" in result.detail
    assert "step 2 of the history" in result.detail
    assert "index.example" not in result.detail


def test_an_engine_that_does_not_start_a_container_ends_the_run_and_breaks_no_promise() -> None:
    label = LabelCheck(component="labels", label="maker", value="trainworks")
    reported: list[CheckResult] = []
    checks = (
        label,
        CommandCheck(component="a", command=("true",)),
        PathCheck(component="a", path="/", state="file"),
    )
    subject = ImageUnderTest(engine=LocalEngine(starts=False), image=IMAGE, checks=checks)
    with pytest.raises(EngineUnavailableError, match="local does not start"):
        run_checks(subject, report=reported.append)
    assert [result.passed for result in reported] == [True], (
        "what the image alone can tell, before it"
    )


def test_an_image_that_is_too_large_is_told_without_a_container() -> None:
    (oversized,) = run(LocalEngine(starts=False), SizeCheck(component="image", megabytes=4))
    assert not oversized.passed
    assert "5 MB" in oversized.detail
    assert "local does not start" in oversized.detail


def test_an_engine_that_does_not_end_a_container_ends_the_run() -> None:
    reported: list[CheckResult] = []
    checks = [CommandCheck(component=name, command=("true",)) for name in "ab"]
    subject = ImageUnderTest(engine=LocalEngine(ends=False), image=IMAGE, checks=tuple(checks))
    with pytest.raises(EngineUnavailableError, match="the container does not end"):
        run_checks(subject, report=reported.append)
    assert all(result.passed for result in reported)


def test_interrupt_ends_the_run_and_the_container() -> None:
    engine = LocalEngine(interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        run(engine, CommandCheck(component="a", command=("true",)))
    assert engine.open_containers == 0


def test_programs_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other, and is reported in the order of the plan."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    os.mkfifo(tmp_path / "meeting")
    words = ("timeout", "60", "sh", "-ec")
    engine = LocalEngine()
    first, second = run(
        engine,
        CommandCheck(component="a", command=(*words, f"cat {tmp_path}/meeting"), expect="met"),
        CommandCheck(component="b", command=(*words, f"echo met > {tmp_path}/meeting")),
    )
    assert (first.component, first.passed, second.component, second.passed) == (
        "a",
        True,
        "b",
        True,
    )
    assert engine.open_containers == 0


def test_image_without_python_says_so() -> None:
    (result,) = run(LocalEngine(), CommandCheck(component="a", command=("/no/such/program",)))
    assert "FileNotFoundError" in result.detail
    with pytest.raises(ImageTestError, match="no such file"):
        probe_request.answer_in(
            Completed(status=127, output="exec: /usr/bin/python3: no such file"), "mark", Answer
        )


def test_equal_promises_are_asked_once() -> None:
    check = CommandCheck(component="a", command=("true",))
    assert len(run(LocalEngine(), check, check)) == 1
    assert run(LocalEngine()) == ()


def test_folder_and_environment_of_the_caller_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise SystemExit('loaded')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -k nothing")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    before = dict(os.environ)
    (result,) = run(LocalEngine(), CommandCheck(component="a", command=("true",)))
    assert result.passed
    assert dict(os.environ) == before
    assert {path.name for path in tmp_path.iterdir()} == {"pytest.ini", "conftest.py"}


def test_run_outside_of_pytest_prints_only_its_lines(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import image.test_imagetest as tests\n"
        "from trainworks.imagetest.results import line\n"
        "from trainworks.imagetest.run import run_checks\n"
        "from trainworks.imagetest.test_promises import ImageUnderTest\n"
        "from trainworks.plan.checks import CommandCheck\n"
        "checks = (CommandCheck(component='a', command=('true',)),"
        " CommandCheck(component='b', command=('false',)))\n"
        "subject = ImageUnderTest("
        "engine=tests.LocalEngine(), image=tests.IMAGE, checks=checks)\n"
        "run_checks(subject, report=lambda result: print(line(result, width=1)))\n"
    )
    child = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stderr == ""
    assert (
        child.stdout
        == "ok    a  true succeeds\nFAIL  b  false succeeds\n      false\n      ended with status 1"
        " and printed\n      (it printed nothing)\n"
    )


def test_junit_report(tmp_path: Path) -> None:
    file = tmp_path / "results.xml"
    checks = (
        CommandCheck(component="a", command=("true",)),
        CommandCheck(component="b", command=("false",)),
    )
    subject = ImageUnderTest(engine=LocalEngine(), image=IMAGE, checks=checks)
    run_checks(subject, report=lambda _: None, junit=file)
    cases = list(ElementTree.parse(file).iter("testcase"))
    assert [case.get("name") for case in cases] == [
        "test_command[a: true succeeds]",
        "test_command[b: false succeeds]",
    ]
    assert [len(case) for case in cases] == [0, 1]


def test_upstream_versions() -> None:
    assert promises.upstream_version("1:9.2p1-2+deb12u3") == "9.2p1"
    assert promises.upstream_version("5.1.0.dfsg-7") == "5.1.0.dfsg"
    assert promises.upstream_version("2.0") == "2.0"
    assert DebianPackageCheck(component="c", package="p").version == ""


# --- a real image ---------------------------------------------------------------------------------


def copy_program(root: Path, program: Path, *, name: str = "") -> None:
    """Copy a program or library of this machine with all that it is linked to."""
    linked = subprocess.run(
        ("ldd", str(program)), capture_output=True, text=True, check=False
    ).stdout
    for source in (program, *(Path(word) for word in linked.split() if word.startswith("/"))):
        target = (
            root / (name or str(source)).lstrip("/")
            if source == program
            else root / str(source).lstrip("/")
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.resolve(), target)


def small_root(root: Path) -> None:
    """Make a file system of nothing but this machine's shell and Python: enough
    to be asked, made without a network.
    """
    for folder in (
        "tmp",
        "etc",
        "proc",
        "sys",
        "dev",
        "run",
        "usr/lib",
        "usr/bin",
        "bin",
        "lib",
        "lib64",
    ):
        (root / folder).mkdir(parents=True)
    # testinfra asks with uname, stat and test, the last of which the shell has.
    for program in ("sh", "rm", "uname", "stat", "cat"):
        copy_program(root, Path(shutil.which(program) or f"/bin/{program}"), name=f"/bin/{program}")
    python = Path(sys.executable).resolve()
    copy_program(root, python)
    if not (root / "usr/bin/python3").exists():
        (root / "usr/bin/python3").symlink_to(python)
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    unused = shutil.ignore_patterns(
        "test", "site-packages", "dist-packages", "__pycache__", "config-*", "idlelib"
    )
    shutil.copytree(
        library, root / str(library).lstrip("/"), ignore=unused, symlinks=True, dirs_exist_ok=True
    )
    for extension in library.glob("lib-dynload/*.so"):
        copy_program(root, extension)
    (root / "etc/ssh").mkdir()
    (root / "etc/ssh/ssh_host_rsa_key").write_bytes(PRIVATE_KEY)


def ignore(event: StepEvent) -> None:
    """Take no notice of a build's progress."""


@pytest.fixture(params=sorted(engines.ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    created_engine = engines.create(request.param)
    try:
        created_engine.probe()
    except EngineUnavailableError as error:
        pytest.skip(f"NOT TESTED with {request.param}: {error.message}")
    return created_engine


INTERFACES = "import socket; print('its interfaces:', [name for _, name in socket.if_nameindex()])"
ONLY_LO = "its interfaces: ['lo']"


@pytest.mark.engine
def test_checks_of_a_real_image(engine: Engine, tmp_path: Path) -> None:
    base, name = (f"localhost/trainworks-imagetest-{uuid.uuid4().hex[:12]}:test" for _ in range(2))
    small_root(tmp_path / "root")
    archive = tmp_path / "image.tar"
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/usr/lib:/none"}
    write_archive(
        tmp_path / "root",
        archive,
        name=base,
        configuration=ImageConfiguration(
            created=1_700_000_000, environment=environment, command=("/bin/sh",)
        ),
    )
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(
        f"FROM {base}\nLABEL maker=trainworks\nRUN rm /etc/ssh/ssh_host_rsa_key\n"
    )
    expected: list[tuple[Check, str]] = [
        (PathCheck(component="a", path="/etc/ssh", state="directory"), ""),
        (PathCheck(component="a", path="/usr/bin/python3", state="executable"), ""),
        (PathCheck(component="a", path="/etc/ssh/ssh_host_*", state="absent"), ""),
        (PathCheck(component="a", path="/opt/ml", state="directory"), "/opt/ml does not exist"),
        (CommandCheck(component="a", command=("python3", "-c", "print(6 * 7)"), expect="42"), ""),
        (CommandCheck(component="a", command=("no-such-program",)), "no-such-program"),
        (ImportCheck(component="a", module="json"), "/opt/venv/bin/python"),
        (SharedLibrariesCheck(component="a", roots=(sys.base_prefix,)), ""),
        (SingleLibraryCheck(component="a", soname="libc.so.6"), ""),
        (SearchPathCheck(component="a", variable="PATH"), ""),
        (SearchPathCheck(component="a", variable="LD_LIBRARY_PATH"), "/none does not exist"),
        (LabelCheck(component="a", label="maker", value="trainworks"), ""),
        (SizeCheck(component="a", megabytes=1), "MB  /"),
        (SecretsCheck(component="a"), "deletes it"),
        (
            StartCheck(
                component="a", arguments=("python3", "-c", INTERFACES), expect=ONLY_LO, alone=True
            ),
            "",
        ),
        (
            StartCheck(component="a", arguments=("python3", "-c", INTERFACES), expect=ONLY_LO),
            "its interfaces: ['",
        ),
    ]
    try:
        engine.load(archive)
        image = engine.build(BuildRequest(name="test", context=context, tags=(name,)), ignore)
        checks = tuple(check for check, _ in expected)
        subject = ImageUnderTest(engine=engine, image=image, checks=checks)
        results = run_checks(subject, report=lambda _: None)
    finally:
        engine.remove(name)
        engine.remove(base)
    for result, (_, reason) in zip(results, expected, strict=True):
        assert result.passed == (not reason), f"{result.title}: {result.detail}"
        assert reason in result.detail


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("librdmacm1", "librdmacm1t64"),
        ("libssl3", "libssl3t64"),
        ("librdmacm", ""),
        ("awk", "mawk"),
    ],
)
def test_a_debian_package_may_be_provided_by_one_of_another_name(name: str, package: str) -> None:
    listing = (
        "librdmacm1t64\tlibrdmacm1 (= 56.1-1)\n"
        "libssl3t64\tlibcrypto3, libssl3 (= 3.5)\n"
        "mawk\tawk\n"
        "bash\t\n"
    )
    assert promises.provider_in(listing, name) == package
