"""The user's code: which program it is, where it comes from, and that no archive can do harm."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launcher_network import PREFIX
from launcher_pip import pip_variables, project_files, python_of_an_image
from launcher_support import Launcher, environment, plan, write_inputs, write_manifest

from trainworks_launcher.contract.errors import RefusalError
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.environment.command_line import Invocation
from trainworks_launcher.environment.entry_point import Code, parse_entry_point
from trainworks_launcher.environment.environment import read_environment
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.programs.unpack import main as unpack_main
from trainworks_launcher.programs.unpack import unpack

MPI = "sagemaker_mpi_enabled"
TORCH = "sagemaker_torch_distributed_enabled"
PROJECT = Code(
    "/opt/ml/code",
    entries=("deep/er/train.py", "my-dir/train.py", "run.sh", "setup.py", "tool", "train.py"),
    executable=("tool",),
    project="setup.py",
)
PYTHON, BASH = "/usr/bin/python", "/usr/bin/bash"


# --- entry points ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("train.py", "package", (PYTHON, "-m", "train")),
        ("deep/er/train.py", "package", (PYTHON, "-m", "deep.er.train")),
        ("my-dir/train.py", "script", (PYTHON, "my-dir/train.py")),
        ("mypackage.train", "package", (PYTHON, "-m", "mypackage.train")),
        ("-m mypackage.train", "module", (PYTHON, "-m", "mypackage.train")),
        ("run.sh", "shell", (BASH, "run.sh")),
        ("tool", "command", ("./tool",)),
    ],
)
def test_the_program_of_a_project(program: str, kind: str, words: tuple[str, ...]) -> None:
    job_environment = environment({"sagemaker_program": program}, code=PROJECT)
    assert parse_entry_point(program, PROJECT).kind == kind
    assert plan(job_environment).argv == words
    installed = kind in ("package", "module")
    assert plan(job_environment).requirements[-1:] == ((".",) if installed else ())


@pytest.mark.parametrize(
    ("program", "alone", "under_mpi"),
    [
        ("train.py", (PYTHON, "train.py"), (PYTHON, "-m", "mpi4py", "train.py")),
        ("-m a.b", (PYTHON, "-m", "a.b"), (PYTHON, "-m", "mpi4py", "-m", "a.b")),
        ("run.sh", (BASH, "run.sh"), (BASH, "run.sh")),
        ("tool", ("./tool",), ("./tool",)),
    ],
)
def test_every_kind_under_every_starter(
    program: str, alone: tuple[str, ...], under_mpi: tuple[str, ...]
) -> None:
    arguments = ("--text", "a  b; $HOME")
    for mode, words in (("", alone), (TORCH, alone), (MPI, under_mpi)):
        chosen: dict[str, Json] = {mode: True} if mode else {}
        argv = plan(
            environment({"sagemaker_program": program, "text": "a  b; $HOME", **chosen})
        ).argv
        assert argv[-len(words + arguments) :] == words + arguments
        assert not mode or argv[-len(words + arguments) - 1] == "--"


def test_requirements_go_with_the_project_in_one_installation() -> None:
    code = PROJECT._replace(entries=(*PROJECT.entries, "requirements.txt"))
    assert plan(environment(code=code)).requirements[-3:] == (".", "-r", "requirements.txt")
    assert plan(environment({"sagemaker_program": "run.sh"}, code=code)).requirements[-2:] == (
        "-r",
        "requirements.txt",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ()),
        ({"new.txt": "written by an earlier job"}, ()),
        ({"package/train.py": "print(1)"}, (".", "-r", "requirements.txt")),
        ({".trainworks-installed": "["}, (".", "-r", "requirements.txt")),
        (
            {".trainworks-installed": '{"installed": ["setup.py"], "files": []}'},
            (".", "-r", "requirements.txt"),
        ),
        (
            {".trainworks-installed": '{"installed": ["setup.py"], "files": {}}'},
            ("-r", "requirements.txt"),
        ),
    ],
)
def test_what_the_image_has_installed_with_this_code_is_not_installed_again(
    change: Mapping[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    """``build.py extend`` leaves a marker; a job that brings other code installs it as ever."""
    files = {"setup.py": "", "requirements.txt": "x\n", "package/train.py": "", "train.py": ""}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    marker = json.dumps({"installed": ["setup.py", "requirements.txt"], "files": hashes})
    for name, text in {**files, ".trainworks-installed": marker, **change}.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text, encoding="utf-8")
    requirements = planned(tmp_path, program="package/train.py").requirements
    assert requirements[len(requirements) - len(words) :] == words
    assert bool(requirements) == bool(words)


def test_requirements_beside_a_program_of_the_command_line_are_said_not_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").touch()

    def warnings_of(*words: str) -> list[str]:
        read = read_environment({"PATH": "/usr/bin:/bin"}, Invocation(words))
        return [line for line in plan(read).warnings if "is not installed: build.py extend" in line]

    assert warnings_of("src/train.py") == []
    (tmp_path / "src/requirements.txt").touch()
    assert warnings_of("src/train.py") == [f"{tmp_path}/src/{INSTALL}"]
    assert warnings_of("-m", "train") == warnings_of("sh", "-c", "true") == []
    (tmp_path / "requirements.txt").touch()
    assert (
        warnings_of("-m", "train")
        == warnings_of("sh", "-c", "true")
        == warnings_of("src/train.py")
        == [f"{tmp_path}/{INSTALL}"]
    )


INSTALL = "requirements.txt is not installed: build.py extend puts its packages into an image"


def test_a_lock_that_no_installation_reads_is_said() -> None:
    code = PROJECT._replace(entries=(*PROJECT.entries, "uv.lock", "environment.yml"))
    warning = "uv.lock is not read when a job starts; a requirements.txt is"
    assert warning in plan(environment(code=code)).warnings
    for read in (
        code._replace(entries=(*code.entries, "requirements.txt")),
        code._replace(installed=("pyproject.toml",)),
    ):
        assert warning not in plan(environment(code=read)).warnings


# --- where code is --------------------------------------------------------------------------------
def planned(
    base: Path, location: str = "", program: str = "train.py", **variables: str
) -> NodePlan:
    """The plan of a job whose files are below ``base``."""
    manifest = write_manifest(base / "image.json", {"python": "/usr/bin/python3"})
    hyperparameters = {"sagemaker_program": program} | (
        {"sagemaker_submit_directory": location} if location else {}
    )
    write_inputs(base, "", {}, {})
    (base / "input/config/hyperparameters.json").write_text(
        str(hyperparameters).replace("'", '"'), encoding="utf-8"
    )
    variables = {
        "SAGEMAKER_BASE_DIR": str(base),
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
        **variables,
    }
    return plan(read_environment({"PATH": "/usr/bin:/bin", **variables}))


def warned(node_plan: NodePlan) -> list[str]:
    """Return the warnings of a plan, but for the results: pytest's own folders may be in memory,
    which keeps nothing.
    """
    return [
        line
        for line in node_plan.warnings
        if not line.startswith("results end with this container: ")
    ]


def refused(base: Path, location: str, program: str = "train.py", **variables: str) -> str:
    with pytest.raises(RefusalError) as caught:
        planned(base, location, program, **variables)
    return str(caught.value)


def pack(path: Path, files: Mapping[str, str | bytes], mode: int = 0o644) -> Path:
    """A tar.gz of regular files."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return path


def test_an_archive_is_laid_over_what_the_image_has_and_says_so(tmp_path: Path) -> None:
    archive = pack(tmp_path / "source.tar.gz", {"train.py": "", "new.py": ""})
    (tmp_path / "code").mkdir()
    for name in ("requirements.txt", "helper.py"):
        (tmp_path / "code" / name).write_text("", encoding="utf-8")
    node_plan = planned(tmp_path, str(archive))
    assert node_plan.code.entries == ("helper.py", "new.py", "requirements.txt", "train.py")
    assert node_plan.requirements[-2:] == ("-r", "requirements.txt")
    (note,) = warned(node_plan)
    assert note.endswith(
        f"is laid over 3 file(s) that are in {tmp_path}/code already, and replaces train.py"
    )


def test_a_directory_elsewhere_leaves_the_images_code_alone_and_says_so(tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("", encoding="utf-8")
    for location in (str(elsewhere), f"file://{elsewhere}".replace(" ", "%20")):
        node_plan = planned(tmp_path, location)
        assert node_plan.cwd == str(elsewhere)
        assert warned(node_plan) == [
            f"the code is taken from {elsewhere}; the 1 file(s) in {tmp_path}/code are not used"
        ]


def test_the_usual_place_needs_no_words(tmp_path: Path) -> None:
    assert warned(planned(tmp_path, f"{tmp_path}/code/")) == []


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("gs://bucket/code.tar.gz", "code cannot be fetched from gs://"),
        ("s3://bucket", "'s3://bucket' is not the address of an archive"),
        (
            "s3://bucket/prefix/",
            (
                "is not the address of an archive (code); give the address of a tar.gz:"
                " s3://BUCKET/KEY"
            ),
        ),
        ("/absent", "no code found (/absent)"),
        ("/absent.tar.gz", "no code found (/absent.tar.gz)"),
        ("/etc/hostname", "the code archive cannot be used: "),
    ],
)
def test_what_is_no_place_of_code_is_refused(tmp_path: Path, location: str, words: str) -> None:
    assert words in refused(tmp_path, location)


def test_code_at_s3_needs_boto3_or_the_aws_command_line() -> None:
    job_environment = environment(code=Code("/opt/ml/code", "s3://bucket/code.tar.gz"))
    with pytest.raises(
        RefusalError, match="neither boto3 nor the aws command line is installed, and the code"
    ):
        plan(job_environment)
    tail = ("s3://bucket/code.tar.gz", "", "")
    library = plan(job_environment._replace(aws_client="boto3"))
    assert library.code.fetch[0] == PYTHON
    assert library.code.fetch[-4:] == (*tail, "")
    line = plan(job_environment._replace(aws_client="/usr/bin/aws"))
    assert line.code.fetch[0] == "/usr/bin/python3"
    assert line.code.fetch[-4:] == (*tail, "/usr/bin/aws")


@pytest.mark.parametrize(
    ("variables", "endpoint", "region"),
    [
        ({"S3_ENDPOINT_URL": "http://a"}, "http://a", ""),
        ({"AWS_ENDPOINT_URL": "http://b", "S3_ENDPOINT_URL": "http://a"}, "http://b", ""),
        (
            {"AWS_ENDPOINT_URL_S3": "http://c", "AWS_ENDPOINT_URL": "http://b", "AWS_REGION": "r"},
            "http://c",
            "r",
        ),
        ({"AWS_DEFAULT_REGION": "d", "AWS_REGION": "s"}, "", "s"),
        ({"AWS_DEFAULT_REGION": "d"}, "", "d"),
    ],
)
def test_the_endpoint_and_the_region_of_s3(
    variables: dict[str, str], endpoint: str, region: str
) -> None:
    code = Code("/opt/ml/code", "s3://bucket/code.tar.gz")
    node_plan = plan(
        environment(code=code, aws_client="boto3", variables={"PATH": "/usr/bin", **variables})
    )
    assert node_plan.code.fetch[-3:] == (endpoint, region, "")


def test_credentials_in_an_endpoint_are_refused_and_not_shown() -> None:
    variables = {"PATH": "/usr/bin", "S3_ENDPOINT_URL": "http://me:hidden@host"}
    code = Code("/opt/ml/code", "s3://bucket/code.tar.gz")
    with pytest.raises(
        RefusalError, match=r"credentials in it \(variable S3_ENDPOINT_URL\)"
    ) as caught:
        plan(environment(code=code, aws_client="boto3", variables=variables))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "project"),
    [
        ("setup.py", "", "setup.py"),
        ("pyproject.toml", "[build-system]\nrequires = []\n", "pyproject.toml"),
        ("pyproject.toml", '[project]\nname = "x"\n', "pyproject.toml"),
        ("pyproject.toml", "[tool.ruff]\nline-length = 99\n", ""),
        ("pyproject.toml", "[project.urls]\n# [project]\n", ""),
    ],
)
def test_what_makes_a_project(tmp_path: Path, name: str, content: str, project: str) -> None:
    (tmp_path / "code").mkdir()
    archive = pack(tmp_path / "source.tar.gz", {"train.py": "", name: content})
    assert planned(tmp_path, str(archive)).code.project == project
    (tmp_path / "code" / name).write_text(content, encoding="utf-8")
    assert planned(tmp_path).code.project == project


def test_the_entry_point_is_found_beside_any_number_of_files(tmp_path: Path) -> None:
    names = [f"{number:05d}" for number in range(20_100)]
    data = tmp_path / "code" / "a_data"
    data.mkdir(parents=True)
    for name in names:
        os.mknod(data / name)
    (tmp_path / "code/z").mkdir()
    (tmp_path / "code/z/train.py").write_text("", encoding="utf-8")
    assert planned(tmp_path, program="z/train.py").argv == ("/usr/bin/python3", "z/train.py")


# --- malicious archives ---------------------------------------------------------------------------
KINDS = {
    "file": tarfile.REGTYPE,
    "directory": tarfile.DIRTYPE,
    "link": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "pipe": tarfile.FIFOTYPE,
    "device": tarfile.CHRTYPE,
}
Member = tuple[str, str, str]
"""(kind, name, target of a link)."""


def archive_of(path: Path, members: Sequence[Member]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for kind, name, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = KINDS[kind], target, 0o6777
            member.size = len(b"written") if kind == "file" else 0
            archive.addfile(member, io.BytesIO(b"written"))
    return path


def listing(directory: Path) -> dict[str, str]:
    """Return the files below a directory, links not followed: path -> content, target, or kind."""
    entries: dict[str, str] = {}
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = Path(parent, name)
            relative = str(path.relative_to(directory))
            if path.is_symlink():
                entries[relative] = f"-> {path.readlink()}"
            elif path.is_dir():
                entries[relative] = "directory"
            else:
                entries[relative] = (
                    path.read_text(encoding="utf-8") if path.is_file() else "special"
                )
    return entries


def try_to_unpack(place: Path, members: Sequence[Member]) -> tuple[bool, dict[str, str]]:
    """Unpack into ``place/root``; return whether it was accepted, and the names in the root then.

    Nothing outside may change.
    """
    place.mkdir()
    outside = place / "outside"
    outside.mkdir()
    (outside / "precious").write_text("untouched", encoding="utf-8")
    (place / "root").mkdir()
    archive = archive_of(place / "a.tar", members)
    before = {name: text for name, text in listing(place).items() if not name.startswith("root/")}
    try:
        unpack(str(archive), str(place / "root"))
        accepted = True
    except (ValueError, OSError, tarfile.TarError):
        accepted = False
    assert {
        name: text for name, text in listing(place).items() if not name.startswith("root/")
    } == before
    return accepted, listing(place / "root")


LONG = "d" * 200
DEEP = "/".join(f"{letter}" * 200 for letter in "abcdefghijklmnopqrstuvwxy")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("file", "/etc/x", "")], "its path leaves the directory"),
        ([("file", "../x", "")], "its path leaves the directory"),
        ([("file", "a/../../x", "")], "its path leaves the directory"),
        ([("file", "a/..", "")], "its path leaves the directory"),
        ([("link", "l", "/etc/passwd")], "it links out of the directory"),
        ([("link", "l", "../outside")], "it links out of the directory"),
        ([("link", "a/l", "../../outside")], "it links out of the directory"),
        ([("link", "l", "")], "it links out of the directory"),
        # Each link is inside by its words; the two together are not.
        (
            [("link", "here", "."), ("link", "out", "here/../outside")],
            "it links out of the directory",
        ),
        (
            [("link", "out", "here/../outside"), ("link", "here", ".")],
            "it links out of the directory",
        ),
        ([("link", "a", "b"), ("link", "b", "a")], "it links out of the directory"),
        # Python's own filter let these through, or was walked around:
        # CVE-2025-4138, -4330, -4517, CVE-2024-12718.
        (
            [("link", "d/e/s", "../../f"), ("hard", "h", "d/e/s")],
            "it is a hard link to something that is not a file of the archive",
        ),
        (
            [("hard", "h", "../outside/precious")],
            "it is a hard link to something that is not a file of the archive",
        ),
        ([("hard", "h", "h")], "it is a hard link to something that is not a file of the archive"),
        ([("link", "l", "sub"), ("file", "l/x", "")], "it is below a file or a link"),
        ([("file", "l/x", ""), ("link", "l", "sub")], "it is below a file or a link"),
        (
            [("file", "x", ""), ("link", "x", "y")],
            "it is in the archive twice, as different things",
        ),
        ([("file", "x", ""), ("file", "x/y", "")], "it is below a file or a link"),
        ([("file", f"{DEEP}/x", "")], "its path is too long"),
        ([("link", "l", f"{LONG}/" * 21)], "it links out of the directory"),
        ([("pipe", "p", "")], "it is a device or a pipe"),
        ([("device", "p", "")], "it is a device or a pipe"),
        ([("link", ".", "sub")], "as different things"),
        ([("file", "", "")], "as different things"),
    ],
)
def test_an_archive_that_may_not_be_unpacked(
    tmp_path: Path, members: list[Member], words: str
) -> None:
    innocent: Member = ("file", "train.py", "")
    for order in ([innocent, *members], [*members, innocent]):
        place = tmp_path / str(order.index(innocent))
        accepted, inside = try_to_unpack(place, order)
        assert (accepted, inside) == (False, {})
        with pytest.raises(ValueError, match=r"^member ") as refusal:
            unpack(str(place / "a.tar"), str(place / "root"))
        assert words in str(refusal.value)


def test_an_honest_archive_arrives_as_it_is(tmp_path: Path) -> None:
    members: list[Member] = [
        ("directory", "./", ""),
        ("directory", "./package", ""),
        ("file", "./package/a.py", ""),
        ("link", "./package/b.py", "a.py"),
        ("link", "./up", "package/../package"),
        ("hard", "./c.py", "./package/a.py"),
        ("hard", "./d.py", "c.py"),
        ("file", "implied/x", ""),
        ("link", "dangling", "not/here"),
    ]
    accepted, inside = try_to_unpack(tmp_path / "place", members)
    assert accepted
    assert inside == {
        "package": "directory",
        "package/a.py": "written",
        "package/b.py": "-> a.py",
        "up": "-> package/../package",
        "c.py": "written",
        "d.py": "written",
        "implied": "directory",
        "implied/x": "written",
        "dangling": "-> not/here",
    }
    mode = (tmp_path / "place/root/c.py").stat().st_mode
    assert stat.S_IMODE(mode) == 0o755, "no set-user-id, nobody else writes"


NAMES = st.sampled_from(
    ("a", "b", "a/b", "b/a", "a/b/c", "./a", "a/../b", "../a", "/a", "c/../../x", ".", "x/./y")
)
TARGETS = st.sampled_from(
    ("a", "b", "..", "../..", ".", "a/..", "a/../..", "b/../a", "../outside", "/etc", "a/b", "c")
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), NAMES, TARGETS), max_size=6))
@example([("link", "a", "."), ("link", "b", "a/.."), ("file", "b/x", "")])
def test_no_archive_writes_outside_or_leaves_a_way_out(
    tmp_path_factory: pytest.TempPathFactory, members: list[Member]
) -> None:
    place = tmp_path_factory.mktemp("archive") / "place"
    accepted, inside = try_to_unpack(place, members)
    assert accepted or inside == {}
    root = os.path.realpath(place / "root")
    for name in inside:
        assert f"{os.path.realpath(place / 'root' / name)}/".startswith(f"{root}/"), (name, inside)
    assert "special" not in inside.values()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_broken_archive_is_one_line_and_never_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("broken")
    members: list[Member] = [
        ("file", "a.py", ""),
        ("link", "l", "a.py"),
        ("hard", "h", "a.py"),
        ("file", "ü" * 120, ""),
    ]
    content = bytearray(archive_of(place / "a.tar", members).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (place / "a.tar").write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    (place / "root").mkdir()
    assert unpack_main([str(place / "a.tar"), str(place / "root")]) in (0, 1)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_damaged_archive_is_refused_or_all_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut short, or with a changed byte: never a part of the files, and never
    other bytes in them.
    """
    place = tmp_path_factory.mktemp("damaged")
    files = {f"f{number}.py": bytes(range(256)) * (number + 1) for number in range(4)}
    content = bytearray(pack(place / "a.tar.gz", files).read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(1, len(content) - 1))]
    else:
        content[data.draw(st.integers(10, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (place / "a.tar.gz").write_bytes(bytes(content))
    if unpack_main([str(place / "a.tar.gz"), str(place / "root")]) == 0:
        assert {path.name: path.read_bytes() for path in (place / "root").iterdir()} == files
    else:
        assert not (place / "root").exists()


def test_what_the_image_has_may_not_be_walked_around(tmp_path: Path) -> None:
    """The directory itself has links: nothing is written through them."""
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "root/data").symlink_to(tmp_path / "outside")
    for members, words in (
        ([("file", "data/x", "")], "there is a link in its place, and it is a directory"),
        ([("link", "l", "data/x")], "it links out of the directory"),
        ([("directory", "data", "")], "there is a link in its place"),
    ):
        with pytest.raises(ValueError, match=words):
            unpack(str(archive_of(tmp_path / "a.tar", members)), str(tmp_path / "root"))
    assert list((tmp_path / "outside").iterdir()) == []
    unpack(str(archive_of(tmp_path / "a.tar", [("file", "data", "")])), str(tmp_path / "root"))
    assert (tmp_path / "root/data").read_text(encoding="utf-8") == "written"
    assert not (tmp_path / "root/data").is_symlink()


def test_a_file_linked_from_elsewhere_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "other").write_text("kept", encoding="utf-8")
    (tmp_path / "root/train.py").hardlink_to(tmp_path / "other")
    unpack(str(archive_of(tmp_path / "a.tar", [("file", "train.py", "")])), str(tmp_path / "root"))
    assert (tmp_path / "other").read_text(encoding="utf-8") == "kept"


def test_an_archive_larger_than_the_disk_is_refused_before_it_fills_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("x")
        # A sparse file: a few bytes in the archive, an exabyte on a disk.
        member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 60)}
        archive.addfile(member)
    (tmp_path / "root").mkdir()
    with pytest.raises(ValueError, match="its files have 1,152,921,504,606,846,976 bytes, and"):
        unpack(str(tmp_path / "a.tar"), str(tmp_path / "root"))
    assert list((tmp_path / "root").iterdir()) == []


# --- real processes -------------------------------------------------------------------------------
ECHO = "import json, sys; print('GOT', json.dumps(sys.argv[1:]), flush=True)"
NASTY = {
    "a": "two  words",
    "b": 'it\'s "quoted"',
    "c": "$HOME `id` ; exit 3",
    "d": "line\nbreak",
    "e": "",
    "f": "-x",
}
PROGRAMS: Mapping[str, Mapping[str, str]] = {
    "train.py": {"train.py": ECHO},
    "-m package.train": {"package/train.py": ECHO},
    "run.sh": {"run.sh": f'exec "$PYTHON_OF_THE_TEST" -c "{ECHO}" "$@"\n'},
    "tool": {"tool": f"#!/usr/bin/env python3\n{ECHO}\n"},
    "package/train.py": {**project_files(), "package/train.py": ECHO},
}


def test_a_project_is_built_in_a_copy_of_its_own(tmp_path: Path) -> None:
    """Hosts that share the code do not build into each other, and nothing is
    left there: it may not be written.
    """
    code = tmp_path / "code"
    files = {
        **project_files(),
        "package/train.py": ECHO,
        "build/left.py": "",
        "dist/__init__.py": "",
    }
    files["backend.py"] = f"""
import os
open("built", "w").close()
assert not os.path.exists("build")
assert os.path.exists("dist/__init__.py")
assert os.path.samefile(".git", {str(code / ".git")!r})
assert open("outside.txt").read() == "of another folder"
{files["backend.py"]}"""
    for name, text in files.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(text, encoding="utf-8")
    (code / ".git").mkdir()
    (tmp_path / "shared.txt").write_text("of another folder", encoding="ascii")
    (code / "outside.txt").symlink_to("../shared.txt")
    before = sorted(code.rglob("*"))
    write_inputs(tmp_path, "", {"sagemaker_program": "package/train.py"}, {})
    (code / "train.py").unlink()
    python = python_of_an_image(tmp_path / "image", {})
    manifest = write_manifest(tmp_path / "image.json", {"python": str(python)})
    host_variables = {
        "PIP_NO_INDEX": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    variables = pip_variables(tmp_path, **host_variables)
    with Launcher(
        tmp_path, variables={**variables, "TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
    ) as launcher:
        assert launcher.wait() == 0, launcher.text
    assert sorted(code.rglob("*")) == before


def arguments_received(launcher: Launcher) -> list[list[str]]:
    """Return the arguments of each process, from the lines that it printed."""
    return [
        json.loads(line.partition("GOT ")[2])
        for line in launcher.text.splitlines()
        if "GOT [" in line
    ]


def echo(
    base: Path, program: str, programs: Mapping[str, str], **hyperparameters: Json
) -> Launcher:
    """Run a program that prints its arguments, with arguments that a shell
    would not leave alone.
    """
    files = PROGRAMS[program]
    mode = 0o644 if program.endswith(".sh") else 0o755
    archive = pack(base / "source.tar.gz", files, mode)
    all_hyperparameters = {
        **NASTY,
        "sagemaker_program": program,
        "sagemaker_submit_directory": str(archive),
        **hyperparameters,
    }
    write_inputs(base, "", all_hyperparameters, {})
    manifest = write_manifest(base / "image.json", programs)
    # The machine's own PATH: Open MPI looks for ssh even on one host.
    variables = pip_variables(
        base, PIP_NO_INDEX="1", PYTHON_OF_THE_TEST=sys.executable, PATH=os.environ["PATH"]
    )
    with Launcher(
        base, variables={**variables, "TRAINWORKS_IMAGE_MANIFEST": str(manifest)}
    ) as launcher:
        launcher.status = launcher.wait()
    return launcher


EXPECTED = [word for name, value in NASTY.items() for word in (f"-{name}", value)]


@pytest.mark.parametrize(
    "program", [program for program in PROGRAMS if program != "package/train.py"]
)
def test_arguments_arrive_as_they_are(tmp_path: Path, program: str) -> None:
    launcher = echo(tmp_path, program, {"python": sys.executable})
    assert launcher.status == 0, launcher.text
    assert arguments_received(launcher) == [EXPECTED]


@pytest.mark.engine
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("starter", ["mpirun", "mpirun of Debian", "torchrun"])
def test_every_kind_of_program_runs_under_the_real_starters(
    tmp_path: Path, program: str, starter: str
) -> None:
    prefix = PREFIX / "bin"
    name = starter.partition(" ")[0]
    path = Path("/usr/bin/mpirun") if "Debian" in starter else prefix / name
    if not path.exists() or not (prefix / "python").exists():
        pytest.skip(f"no {path}; make it with: tools/set-up-peers programs")
    switch = MPI if name == "mpirun" else TORCH
    hyperparameters: dict[str, Json] = {
        switch: "true",
        "sagemaker_mpi_num_of_processes_per_host": "2",
    }
    launcher = echo(
        tmp_path, program, {"python": str(prefix / "python"), name: str(path)}, **hyperparameters
    )
    assert launcher.status == 0, launcher.text
    assert arguments_received(launcher) == [EXPECTED, EXPECTED]
