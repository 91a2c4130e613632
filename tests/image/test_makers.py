"""The lists that makers of packages send, from wheels and Debian packages made
here, and those of an image.
"""

from __future__ import annotations

import base64
import hashlib
import io
import lzma
import re
import shlex
import tarfile
import zipfile
from pathlib import Path

import pytest

from trainworks.errors import LockError
from trainworks.facts.rows import Facts
from trainworks.imagetest.makers import (
    DebianContent,
    DebianName,
    WheelList,
    debian_problems,
    list_problems,
    wheel_problems,
)
from trainworks.imagetest.probe.files import Image
from trainworks.imagetest.probe.lists import (
    DebianList,
    PackageLists,
    PythonList,
    lists_of,
    unneeded,
)
from trainworks.inputs.makers import read_debian_content, read_wheel_list
from trainworks.inspect.targets import plan_of_target
from trainworks.plan.checks import DeliveredFilesCheck, MakersListsCheck

SITE = "/opt/venv/lib/python3.11/site-packages"
RECORD = f"{SITE}/one-1.dist-info/RECORD"
CHECK = MakersListsCheck(
    component="image",
    distributions=("one",),
    debian=("git",),
    trims=("one/tests", "one/**/samples", "one/bin/*[Tt]est*"),
    strips=("one/lib*.so",),
)


def sum_of(content: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(
        hashlib.sha256(content.encode()).digest()
    ).decode().rstrip("=")


def make_wheel(path: Path, files: dict[str, str]) -> Path:
    listed = "".join(f"{name},{sum_of(text)},{len(text)}\n" for name, text in files.items())
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {
            **files,
            "one-1.dist-info/RECORD": f"{listed}one-1.dist-info/RECORD,,\n",
        }.items():
            wheel.writestr(name, text)
    return path


def make_package(path: Path, control: dict[str, str], data: dict[str, str]) -> Path:
    def packed(files: dict[str, str]) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name, text in files.items():
                member = tarfile.TarInfo(f"./{name}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        return lzma.compress(stream.getvalue())

    content = b"!<arch>\n"
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": packed(control),
        "data.tar.xz": packed(data),
    }
    for name, part in parts.items():
        content += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(part):<10}`\n".encode()
            + part
            + b"\n" * (len(part) % 2)
        )
    path.write_bytes(content)
    return path


def listed(**changes: str) -> PythonList:
    """Return the list of an installed distribution; a sum of ``""`` takes a file away."""
    files = {
        f"{SITE}/one/a.py": "sha256=a",
        f"{SITE}/one/lib1.so": "sha256=smaller",
        "/opt/venv/share/one.txt": "sha256=t",
        "/opt/venv/bin/one": "sha256=program",
        RECORD: "",
        f"{SITE}/one-1.dist-info/INSTALLER": "sha256=i",
        f"{SITE}/one/__pycache__/a.cpython-311.pyc": "",
    }
    files |= {name.replace("__", "/"): digest for name, digest in changes.items()}
    return PythonList(
        name="one",
        version="1",
        record=RECORD,
        files={key: file for key, file in files.items() if file != "-"},
    )


WHEEL = WheelList(
    files={
        "one/a.py": "sha256=a",
        "one/lib1.so": "sha256=larger",
        "one/tests/test_a.py": "sha256=x",
        "one/deep/down/samples/a": "sha256=x",
        "one/bin/aTestProgram": "sha256=x",
        "one-1.data/data/share/one.txt": "sha256=t",
    },
    written={"one": "sha256=program"},
)


def test_a_list_is_that_of_its_wheel_but_for_what_recipes_remove_and_installations_add() -> None:
    assert list(wheel_problems(CHECK, listed(), WHEEL)) == []


@pytest.mark.parametrize(
    ("path", "digest", "message"),
    [
        (
            f"{SITE}/one/a.py",
            "sha256=other",
            f"{RECORD} has another sum of {SITE}/one/a.py than its wheel",
        ),
        (f"{SITE}/one/a.py", "-", f"{RECORD} lacks {SITE}/one/a.py, which its wheel has"),
        (
            f"{SITE}/one/b.py",
            "sha256=b",
            f"{RECORD} has {SITE}/one/b.py, which its wheel does not have",
        ),
        (
            "/opt/venv/bin/one",
            "sha256=other",
            f"{RECORD} has another sum of /opt/venv/bin/one than its wheel",
        ),
        (
            "/opt/venv/share/one.txt",
            "sha256=o",
            f"{RECORD} has another sum of /opt/venv/share/one.txt than its wheel",
        ),
        (
            f"{SITE}/one/testsuite.py",
            "sha256=b",
            f"{RECORD} has {SITE}/one/testsuite.py, which its wheel does not have",
        ),
    ],
)
def test_a_list_that_was_changed_with_its_file_is_named(
    path: str, digest: str, message: str
) -> None:
    wheel_list = listed()
    if digest == "-":
        del wheel_list["files"][path]
    else:
        wheel_list["files"][path] = digest
    assert list(wheel_problems(CHECK, wheel_list, WHEEL)) == [message]


def test_the_list_of_a_wheel_has_the_programs_as_they_are_installed(tmp_path: Path) -> None:
    files = {
        "one/a.py": "a = 1\n",
        "one-1.data/scripts/run": "#!python\nprint(1)\n",
        "one-1.data/scripts/native": "\x7fELF",
        "one-1.dist-info/entry_points.txt": "[console_scripts]\ntool = one.a:main.run [extra]\n",
    }
    wheel_list = read_wheel_list(make_wheel(tmp_path / "one-1-py3-none-any.whl", files))
    assert wheel_list.files.keys() == files.keys() - {"one-1.data/scripts/run"}
    assert wheel_list.files["one/a.py"] == sum_of("a = 1\n")
    assert wheel_list.written["run"] == sum_of("#!/opt/venv/bin/python\nprint(1)\n")
    assert wheel_list.written.keys() == {"run", "tool"}
    (tmp_path / "no.whl").write_text("not a wheel")
    with pytest.raises(LockError, match=r"no\.whl is not a wheel"):
        read_wheel_list(tmp_path / "no.whl")


def test_the_members_of_a_debian_package_and_its_configuration_are_read(tmp_path: Path) -> None:
    control = {"control": "Package: git", "md5sums": "0  usr/bin/git\n", "postinst": "#!/bin/sh\n"}
    control["conffiles"] = "/etc/git.conf\nremove-on-upgrade /etc/old.conf\n"
    package = make_package(
        tmp_path / "git.deb", control, {"etc/git.conf": "safe", "usr/bin/git": "x"}
    )
    content = read_debian_content(package)
    assert content.links == {}
    assert content.members.keys() == {"md5sums", "postinst", "conffiles"}
    assert content.members["postinst"] == hashlib.sha256(b"#!/bin/sh\n").hexdigest()
    assert content.conffiles == {
        "/etc/git.conf": hashlib.md5(b"safe", usedforsecurity=False).hexdigest()
    }
    package.write_bytes(package.read_bytes()[:100])
    with pytest.raises(LockError, match=r"git\.deb cannot be read"):
        read_debian_content(package)


def test_what_dpkg_keeps_of_a_package_is_held_to_the_package() -> None:
    debian_list = DebianList(
        name="git",
        version="1",
        architecture="amd64",
        members={"md5sums": "a", "postinst": "b"},
        conffiles={"/etc/git.conf": "c", "/etc/more.conf": "d"},
        links={"/usr/bin/g": "git"},
    )
    assert (
        list(
            debian_problems(
                debian_list,
                DebianContent(members=debian_list["members"], conffiles={"/etc/git.conf": "c"}),
            )
        )
        == []
    )
    links = {"/usr/bin/g": "git-1", "/usr/share/doc/left-out": "x"}
    content = DebianContent(
        members={"md5sums": "x", "prerm": "y"}, conffiles={"/etc/git.conf": "z"}, links=links
    )
    assert list(debian_problems(debian_list, content)) == [
        "/var/lib/dpkg/info/git.md5sums is not the one of package git 1",
        "/var/lib/dpkg/info/git.postinst is there, and package git 1 does not have it",
        "/var/lib/dpkg/info/git.prerm is missing, and package git 1 has it",
        "/var/lib/dpkg/status has another sum of /etc/git.conf than package git 1",
        "/usr/bin/g is a link to git, and to git-1 in package git 1",
    ]


def test_packages_that_nothing_of_the_plan_needs_are_named(tmp_path: Path) -> None:
    def row(name: str, **fields: str) -> dict[str, str]:
        return {"Package": name, **{key.replace("_", "-"): value for key, value in fields.items()}}

    installed = [
        row("base-files", Essential="yes"),
        row("git", Depends="libc6 (>= 2), perl:any | mawk", Recommends="less"),
        row("perl-base", Provides="perl (= 5)"),
        row("less"),
        row("libc6", Pre_Depends="libgcc"),
        row("libgcc"),
        row("apt"),
        row("telnetd"),
    ]
    assert unneeded(installed, ["git"]) == ["telnetd"]
    assert unneeded(installed, ["git", "telnet*"]) == []
    assert unneeded(installed, ["git", "telnet"]) == ["telnetd"]
    folder = tmp_path / RECORD.lstrip("/")
    folder.parent.mkdir(parents=True)
    folder.write_text(
        "one/a.py,sha256=a,1\n../../../bin/one,sha256=b,1\none-1.dist-info/RECORD,,\n"
    )
    extra = folder.parents[1] / "Extra_Part-2.dist-info/RECORD"
    extra.parent.mkdir()
    extra.write_text("")
    info = tmp_path / "var/lib/dpkg/info"
    info.mkdir(parents=True)
    (info / "git.postinst").write_text("x")
    (info / "git.list").write_text("/etc/link\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/link").symlink_to("a")
    (info / "git.lfs.postinst").write_text("of another package")
    status = "Package: git\nStatus: install ok installed\nVersion: 1\nArchitecture: amd64\n"
    status += "Conffiles:\n /etc/a 0\n /etc/b 0 obsolete\n"
    (tmp_path / "var/lib/dpkg/status").write_text(status)
    package_lists = lists_of(Image(str(tmp_path), ""), ["git"])
    (one, other) = sorted(
        package_lists["python"], key=lambda package_list: package_list["name"], reverse=True
    )
    assert one["files"].keys() == {f"{SITE}/one/a.py", "/opt/venv/bin/one", RECORD}
    (debian,) = package_lists["debian"]
    assert {*debian["members"]} == {"postinst"}
    assert debian["conffiles"] == {"/etc/a": "0"}
    assert debian["links"] == {"/etc/link": "a"}
    assert list_problems(CHECK, package_lists, None) == [
        f"{other['record']}: no package of the plan is called extra-part",
    ]


class Known:
    """The lists of one wheel and of no Debian package."""

    def wheels(self) -> dict[str, WheelList]:
        return {"one": WHEEL}

    def debian(self, _packages: object) -> dict[DebianName, DebianContent]:
        return {}


def test_what_no_maker_is_known_of_is_left_to_the_image() -> None:
    other = PythonList(
        name="one",
        version="1",
        record=RECORD,
        files={**listed()["files"], f"{SITE}/one/a.py": "sha256=b"},
    )
    package = DebianList(
        name="git",
        version="1",
        architecture="amd64",
        members={"postinst": "a"},
        conffiles={},
        links={},
    )
    package_lists = PackageLists(python=[other], debian=[package], unneeded=["telnetd"])
    assert list_problems(CHECK, package_lists, Known()) == [
        "Debian package telnetd: nothing of the plan needs it",
        f"{RECORD} has another sum of {SITE}/one/a.py than its wheel",
    ]


def test_recipes_declare_what_they_trim(facts: Facts) -> None:
    """``trims`` and ``strips`` are the patterns of the command, and nothing else."""
    declared = 0
    for recipe in facts.recipes.values():
        text = recipe.text.partition("#}")[2]
        trimmed: dict[str, set[str]] = {"--remove": set(), "--strip": set()}
        for option, pattern in (
            re.findall(r"(--remove|--strip) (\S+)", text) if "trim-python-packages" in text else ()
        ):
            trimmed[option] |= {*shlex.split(pattern)}
        if recipe.name != "builder":
            assert (trimmed["--remove"], trimmed["--strip"]) == (
                {*recipe.trims},
                {*recipe.strips},
            ), recipe.name
            declared += len(recipe.trims)
    assert declared >= 10


def test_links_of_a_debian_package_are_read(tmp_path: Path) -> None:
    package = tmp_path / "linked.deb"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        link = tarfile.TarInfo("./usr/lib/libnuma.so.1")
        link.type, link.linkname = tarfile.SYMTYPE, "libnuma.so.1.0.0"
        archive.addfile(link)
    make_package(package, {"control": "Package: linked"}, {})
    content = package.read_bytes()
    data = lzma.compress(stream.getvalue())
    begin = content.index(b"data.tar.xz")
    head = content[begin : begin + 48] + f"{len(data):<10}`\n".encode()
    package.write_bytes(content[:begin] + head + data + b"\n" * (len(data) % 2))
    assert read_debian_content(package).links == {"/usr/lib/libnuma.so.1": "libnuma.so.1.0.0"}


def test_the_folders_of_all_users_are_in_the_promise(facts: Facts) -> None:
    plan = plan_of_target("pytorch-2.13.0-cpu-py311-debian12", facts)
    assert plan is not None
    (check,) = (check for check in plan.checks if isinstance(check, DeliveredFilesCheck))
    assert {"/tmp", "/var/tmp", "/opt/ml/model"} <= {*check.shared}
    assert "/etc/shadow" in {path for row in check.rights for path in row.paths}
