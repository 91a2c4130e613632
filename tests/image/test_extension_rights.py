"""Test the things that code of others sees while an image is extended, and where the files of an
extension come from: for real.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from image.indexes import USER, Index, sdist_of, serving, wheel_of
from image.support import ROOT, BuiltByCommand
from trainworks.build.options import BuildOptions
from trainworks.engine.protocol import BuildRequest, Engine, Job
from trainworks.extend.base_image import find_base
from trainworks.extend.cuda_compiler import BARE
from trainworks.extend.plan import ExtensionPlan
from trainworks.extend.render import INSTALLER, RECIPES, Recipes
from trainworks.extend.requirement_inputs import read_requirements
from trainworks.extend.requirements import ExtendedBase
from trainworks.extend.resolve import (
    ResolutionRequest,
    ResolutionTools,
    gather,
    manifest_of,
    resolve,
)
from trainworks.extend.resolver import Resolver
from trainworks.extend.sandbox import Sandbox
from trainworks.facts.rows import Facts
from trainworks.host.downloads import Client
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings

pytestmark = pytest.mark.engine

CANARY = "canary-4711-0815"
"""A mark in each secret, and in the answer of a service on this machine's loopback."""

LOOK = """
import glob, json, os, socket

def look():
    found = []
    places = [
        "/run/secrets/*",
        os.path.expanduser("~/.netrc"),
        "/root/.netrc",
        "/proc/*/environ",
        "/proc/*/cmdline",
    ]
    for place in places:
        for path in glob.glob(place):
            try:
                with open(path, "rb") as file:
                    if b"{canary}" in file.read():
                        found.append(path)
            except OSError:
                pass
    if "{canary}" in str(dict(os.environ)):
        found.append("environment")
    for address in ("127.0.0.1", "172.17.0.1"):
        try:
            with socket.create_connection((address, {port}), timeout=2) as connection:
                connection.sendall(b"GET /file/canary HTTP/1.0\\r\\n\\r\\n")
                found.append(address)
        except OSError:
            pass
    with open("/proc/net/route") as routes:
        if len(routes.readlines()) > 1:
            found.append("a route")
    return found
"""

SETUP = """{look}
from setuptools import setup
with open("{name}.py", "w") as file:
    file.write("FOUND = " + repr(look()) + "\\n")
setup(name="{name}", version="1.0", py_modules=["{name}"])
"""


@dataclass
class Folder:
    """A user's folder and home: a netrc, settings of pip with a login, and a
    variable, each with the canary.
    """

    path: Path
    index: Index
    in_settings: bool = True
    tag: str = field(default_factory=lambda: f"trainworks-test/rights:{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        home = self.path / "home"
        home.mkdir()
        netrc = f"machine 127.0.0.1 login {USER} password {self.index.password}\n"
        netrc += (
            f"machine other.example login me password {CANARY}\n"
            f"default login all password {CANARY}\n"
        )
        (home / ".netrc").write_text(netrc)
        (home / ".netrc").chmod(0o600)

    @property
    def environment(self) -> dict[str, str]:
        more = {
            "HOME": str(self.path / "home"),
            "NETRC": str(self.path / "home" / ".netrc"),
            "TOKEN": CANARY,
        }
        if self.in_settings:
            login = f"{USER}:{self.index.password}@{self.index.host}"
            more["PIP_EXTRA_INDEX_URL"] = f"http://{login}/simple/"
        return {**os.environ, **more, "XDG_CACHE_HOME": str(self.path / "cache"), "NAME": USER}

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def extend(self, engine: Engine, base: str, *more: str) -> subprocess.CompletedProcess[str]:
        words = (
            "--base",
            base,
            "--tag",
            self.tag,
            "--engine",
            engine.name,
            "--root",
            str(ROOT),
            "--format",
            "json",
        )
        return subprocess.run(
            (
                sys.executable,
                str(ROOT / "build.py"),
                "extend",
                *words,
                "-r",
                "r.txt",
                "--until",
                "build",
                *more,
            ),
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    @property
    def lock(self) -> str:
        (path,) = self.path.glob("r.*.locked.txt")
        return path.read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with serving(Index({}, password=CANARY)) as index:
        yield Folder(tmp_path, index)


def committed(repository: Path) -> str:
    """Commit the files of a folder, and return the commit."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    for words in (
        ("init", "--quiet"),
        ("add", "."),
        (*identity, "commit", "--quiet", "--message", "state"),
    ):
        subprocess.run(("git", *words), cwd=repository, check=True)
    command = ("git", "rev-parse", "HEAD")
    return subprocess.run(
        command, cwd=repository, capture_output=True, text=True, check=True
    ).stdout.strip()


def findings_of_modules(engine: Engine, tag: str, *modules: str) -> dict[str, object]:
    """Return the lists that modules of an image give of their findings."""
    program = (
        "import json, importlib as i; print(json.dumps({n:"
        " vars(i.import_module(n))['FOUND'] for n in %r}))"
    )
    done = engine.run(tag, Job(command=("python", "-c", program % (modules,)), timeout=120))
    return dict(json.loads(done.output.splitlines()[-1]))


def test_a_setup_py_finds_nothing_of_this_machine(image: BuiltByCommand, folder: Folder) -> None:
    """A folder, a git repository, and a source archive of an index with a
    login, which each look for secrets.
    """
    look = LOOK.format(canary=CANARY, port=folder.index.server_address[1])
    folder.write("pkg/setup.py", SETUP.format(look=look, name="of_folder"))
    folder.write("lib/setup.py", SETUP.format(look=look, name="of_git"))
    committed(folder.path / "lib")
    name, content = sdist_of("of_archive", "1.0", SETUP.format(look=look, name="of_archive"))
    folder.index.files[name] = content
    lines = [
        "./pkg",
        f"of_git @ git+{(folder.path / 'lib').as_uri()}",
        "of_archive",
    ]
    folder.write("r.txt", "".join(f"{line}\n" for line in lines))
    try:
        done = folder.extend(image.engine, image.reference)
        assert done.returncode == 0, done.stderr
        files_by_source = findings_of_modules(
            image.engine, folder.tag, "of_folder", "of_git", "of_archive"
        )
        assert files_by_source == {"of_folder": [], "of_git": [], "of_archive": []}
        assert (
            f"of-archive==1.0 \\\n    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
            in folder.lock
        )
        assert CANARY not in folder.lock
    finally:
        image.engine.remove(folder.tag)


HOSTILE = """\
FROM {base}
COPY look.py /opt/look.py
COPY sh /usr/local/bin/hostile-sh
COPY python /usr/local/bin/hostile-python
RUN cp $(readlink -f /opt/venv/bin/python) /opt/venv/bin/python.real; rm /opt/venv/bin/python; \\
    cp /usr/local/bin/hostile-python /opt/venv/bin/python; \\
    chmod 755 /opt/venv/bin/python /usr/local/bin/hostile-sh; \\
    cp /usr/local/bin/hostile-sh /usr/bin/sh.new && mv -f /usr/bin/sh.new /usr/bin/sh
"""


def test_a_bases_own_programs_find_nothing_of_this_machine(
    image: BuiltByCommand, folder: Folder, tmp_path: Path
) -> None:
    """Let the base's shell and Python look at every question, and leave their findings in the
    image.
    """
    look = LOOK.format(canary=CANARY, port=folder.index.server_address[1])
    note = (
        'path = "/opt/found.txt"\n'
        'with open(path, "a") as file:\n'
        '    file.write(json.dumps(look()) + "\\n")\n'
    )
    context = tmp_path / "hostile"
    context.mkdir()
    (context / "look.py").write_text(look + note)
    real = "/opt/venv/bin/python.real -I -S -B"
    (context / "sh").write_text(
        f'#!/usr/bin/dash\n{real} /opt/look.py 2>/dev/null\nexec /usr/bin/dash "$@"\n'
    )
    starter = f"#!/usr/bin/dash\n{real} /opt/look.py 2>/dev/null\n"
    (context / "python").write_text(
        f'{starter}exec -a /opt/venv/bin/python /opt/venv/bin/python.real "$@"\n'
    )
    (context / "python").write_text((context / "python").read_text().replace("dash", "env bash", 1))
    (context / "Dockerfile").write_text(HOSTILE.format(base=image.reference))
    base = f"trainworks-test/hostile:{uuid.uuid4().hex[:12]}"
    image.engine.build(
        BuildRequest(name="hostile", context=context, tags=(base,)), lambda _event: None
    )
    name, content = wheel_of("private_one", "1.0", "FOUND = 1\n")
    folder.index.files[name] = content
    folder.write("r.txt", "private_one\n")
    try:
        done = folder.extend(image.engine, base)
        assert done.returncode == 0, done.stderr
        with image.engine.layers(folder.tag) as layers:
            file_content = ""
            for layer in layers:
                for member in layer.archive:
                    if member.name.endswith("opt/found.txt") and (
                        file := layer.archive.extractfile(member)
                    ):
                        with file:
                            file_content = file.read().decode()
        assert file_content, "its programs have run"
        assert set(file_content.splitlines()) == {"[]"}
    finally:
        for tag in (folder.tag, base):
            image.engine.remove(tag)


def test_a_build_that_downloads_needs_an_option_which_its_error_names(
    docker_image: BuiltByCommand, folder: Folder
) -> None:
    look = LOOK.format(canary=CANARY, port=folder.index.server_address[1])
    setup = (
        "if len(open('/proc/net/route').readlines()) < 2: raise OSError('no network')\n"
        + SETUP.format(look=look, name="downloads")
    )
    folder.write("pkg/setup.py", setup)
    folder.write("r.txt", "./pkg\n")
    done = folder.extend(docker_image.engine, docker_image.reference)
    assert done.returncode == 7
    assert "--build-network" in done.stderr
    try:
        allowed = folder.extend(docker_image.engine, docker_image.reference, "--build-network")
        assert allowed.returncode == 0, allowed.stderr
        assert findings_of_modules(docker_image.engine, folder.tag, "downloads") == {
            "downloads": ["a route"]
        }
    finally:
        docker_image.engine.remove(folder.tag)


BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "pkg-1.0-py3-none-any.whl"
    {made}
    return name
def get_requires_for_build_wheel(config_settings=None):
    return {requires}
"""


@pytest.mark.parametrize(
    ("lie", "requires", "message"),
    [
        (
            "open(folder + '/' + name, 'w').close()",
            "[]",
            "pkg-1.0-py3-none-any.whl is not a wheel with metadata",
        ),
        (
            (
                "zipfile.ZipFile(folder + '/' + name, 'w').writestr('a-1.dist-info/METADATA',"
                " 'Name: torch')"
            ),
            "[]",
            "whose metadata are those of torch",
        ),
        ("pass", "['-r /etc/passwd', 'a\\nb', 7]", "its build gives no wheel"),
    ],
)
def test_a_build_backend_that_lies_is_an_error(
    docker_image: BuiltByCommand, folder: Folder, lie: str, requires: str, message: str
) -> None:
    system = '[build-system]\nrequires = []\nbuild-backend = "lies"\nbackend-path = ["."]\n'
    folder.write("pkg/pyproject.toml", system)
    folder.write("pkg/lies.py", BACKEND.format(made=lie, requires=requires))
    folder.write("r.txt", "./pkg\n")
    done = folder.extend(docker_image.engine, docker_image.reference)
    assert done.returncode == 7, done.stderr
    assert message in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in done.stderr


def test_the_lock_has_the_files_that_are_installed_whatever_their_source(
    image: BuiltByCommand, folder: Folder
) -> None:
    """An index with a login, one without, the same version in both, a page,
    addresses, git, a folder, a wheel.
    """
    engine, private, folder.in_settings = image.engine, folder.index, False
    texts = {
        "by_netrc": f"http://{private.host}/file/by_netrc-1.0-py3-none-any.whl",
        "by_login": (
            f"http://${{NAME}}:${{TOKEN}}@{private.host}/file/by_login-1.0-py3-none-any.whl"
        ),
    }
    with ExitStack() as stack:
        public = stack.enter_context(serving(Index({})))
        page = stack.enter_context(serving(Index({})))
        contents: dict[str, bytes] = {}
        for index, names in (
            (private, ("only_private", "twice", *texts)),
            (public, ("twice",)),
            (page, ("of_page",)),
        ):
            for source_name in names:
                file, content = wheel_of(source_name, "1.0", f"FOUND = {index.host!r}\n")
                index.files[file] = content
                contents.setdefault(source_name, content)
        folder.write(
            "pkg/setup.py",
            "from setuptools import setup\nsetup(name='of_folder', py_modules=['of_folder'])\n",
        )
        folder.write("pkg/of_folder.py", "FOUND = 'folder'\n")
        file, content = wheel_of("by_path", "1.0", "FOUND = 'path'\n")
        (folder.path / file).write_bytes(content)
        folder.write(
            "lib/setup.py",
            "from setuptools import setup\nsetup(name='of_git', py_modules=['of_git'])\n",
        )
        repository = folder.write("lib/of_git.py", "FOUND = 'git'\n").parent
        commit = committed(repository)
        folder.write("lib/of_git.py", "FOUND = 'later'\n")
        committed(repository)
        lines = [
            f"--extra-index-url {private.simple}",
            f"--extra-index-url {public.simple}",
            f"--find-links http://{page.host}/links/",
            *(
                "only_private",
                "twice==1.0",
                "of_page",
                "./pkg",
                f"./{file}",
                f"of_git @ git+{repository.as_uri()}@{commit}",
            ),
            *(f"{name} @ {address}" for name, address in texts.items()),
        ]
        folder.write("r.txt", "".join(f"{line}\n" for line in lines))
        names = (
            "by_netrc",
            "by_login",
            "only_private",
            "twice",
            "of_page",
            "of_folder",
            "by_path",
            "of_git",
        )
        try:
            for lock_state in ("resolved and hashed", "locked already"):
                done = folder.extend(engine, image.reference, "--no-cache")
                assert done.returncode == 0, done.stderr
                assert lock_state in done.stderr
                origins, lock = findings_of_modules(engine, folder.tag, *names), folder.lock
                assert (origins["of_folder"], origins["by_path"], origins["of_page"]) == (
                    "folder",
                    "path",
                    page.host,
                )
                assert (origins["of_git"], commit in lock) == ("git", True)
                assert {origins[name] for name in ("by_netrc", "by_login", "only_private")} == {
                    private.host
                }
                winner = {index.host: index for index in (private, public)}[str(origins["twice"])]
                contents["twice"] = winner.files["twice-1.0-py3-none-any.whl"]
                for source_name in ("only_private", "twice", "of_page"):
                    digest = hashlib.sha256(contents[source_name]).hexdigest()
                    assert (
                        f"{source_name.replace('_', '-')}==1.0 \\\n    --hash=sha256:{digest}\n"
                        in lock
                    )
                for source_name, address in texts.items():
                    digest = hashlib.sha256(contents[source_name]).hexdigest()
                    requirement = f"{source_name.replace('_', '-')} @ {address}"
                    assert f"{requirement} \\\n    --hash=sha256:{digest}\n" in lock
                assert CANARY not in lock
                engine.remove(folder.tag)
            # Another file in the place of a locked one.
            private.files["only_private-1.0-py3-none-any.whl"] = wheel_of(
                "only_private", "1.0", "FOUND = 0\n"
            )[1]
            spoiled = folder.extend(engine, image.reference, "--no-cache")
            assert spoiled.returncode == 11
            assert re.search("Hash mismatch for only_private", spoiled.stderr)
        finally:
            engine.remove(folder.tag)


def test_a_companion_comes_from_the_vendors_index_and_the_lock_says_so(
    docker_image: BuiltByCommand, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package index has the build for CUDA. A row's index is https: here it
    is one of the test.
    """
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = "raise RuntimeError('operator torchvision::nms does not exist')\n"
    other, good = (
        wheel_of("torchvision", version, text, "torch==2.13.0")
        for version, text in (("0.28.0", broken), ("0.28.0+cpu", ""))
    )
    engine, settings = docker_image.engine, HostSettings(pip=PipSettings())
    _, base = find_base(docker_image.reference, engine, facts)
    source = ROOT / "src" / "trainworks"
    programs = {
        "build_stage.py": (source / "extend" / "build_stage.py").read_bytes(),
        "imports.py": (source / "imagetest" / "imports.py").read_bytes(),
    }
    texts = {name: (ROOT / "templates" / name).read_text() for name in RECIPES}
    plan = ExtensionPlan(tag="trainworks-test/companion:1", base=base)
    recipes = Recipes(texts=texts, programs=programs)
    program = ROOT / "launcher" / INSTALLER
    with (
        serving(Index(dict([other]))) as public,
        serving(Index(dict([good]))) as vendor,
        Client(settings) as client,
    ):
        file = tmp_path / "requirements.txt"
        file.write_text(f"--index-url {public.simple}\ntorchvision\n")
        manifest = {**manifest_of(base, BARE, None, facts), "wheel_index": vendor.simple}
        order = ResolutionRequest(
            requested=read_requirements(file, {}),
            sources=(),
            commits={},
            manifest=manifest,
            beside=tmp_path,
        )

        sandbox = Sandbox(
            plan=plan,
            recipes=recipes,
            bench=BARE,
            engine=engine,
            settings=settings,
            options=BuildOptions(),
            folder=tmp_path / "work",
            packages=lambda _context: (),
            network=False,
        )

        def tools(name: str) -> ResolutionTools:
            (tmp_path / name).mkdir()
            resolver = Resolver(base, tmp_path / name, client, fresh=True)
            return ResolutionTools(base=base, resolver=resolver, sandbox=sandbox, program=program)

        lock = resolve(order, tools("first"), facts).lock
        assert lock.locked == (("torchvision", "0.28.0+cpu"),)
        assert lock.hashes == {
            ("torchvision", "0.28.0+cpu"): (hashlib.sha256(good[1]).hexdigest(),)
        }
        assert f"torchvision is taken from {vendor.simple}" in "\n".join(lock.notes)
        gathered = gather(lock, order, tools("again"))
        assert [wheel.read_bytes() for wheel in gathered.wheels] == [good[1]]


def test_a_base_is_asked_once_and_again_where_its_answer_is_spoiled(
    docker_image: BuiltByCommand, facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def ask_base() -> ExtendedBase:
        return find_base(docker_image.reference, docker_image.engine, facts)[1]

    first = ask_base()
    (file,) = (tmp_path / "trainworks" / "bases").glob("*.json")
    cached_answers = json.loads(file.read_text())
    file.write_text(json.dumps({**cached_answers, "suite": "of-the-file"}))
    assert ask_base() == replace(first, suite="of-the-file")
    for spoiled in ("{", "{}", "[]", json.dumps({**cached_answers, "python": "a\nb"})):
        file.write_text(spoiled)
        assert ask_base() == first
