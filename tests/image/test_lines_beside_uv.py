"""Test sixty-six kinds of lines and files: `extend` locks for each the versions that uv itself
would install, or refuses by name.

Each row is read, answered and resolved as `extend` does it, and given to `uv pip install --dry-run`
as it is. Both see the same base, which is only described, and the same indexes on loopback.
Packages that have to be built are in test_projects.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from uv import find_uv_bin

from image.indexes import USER, Index, serving, wheel_of
from trainworks.build.options import BuildOptions
from trainworks.engine import create
from trainworks.errors import ExtendError, LockError
from trainworks.extend.cuda_compiler import BARE
from trainworks.extend.described import Environment
from trainworks.extend.plan import ExtensionPlan
from trainworks.extend.render import Recipes
from trainworks.extend.requirement_inputs import OptionalDependencies, read_requirements
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, ExtensionLock
from trainworks.extend.resolve import ResolutionRequest, ResolutionTools, resolve
from trainworks.extend.resolver import Resolver
from trainworks.extend.sandbox import Sandbox
from trainworks.facts.rows import Facts
from trainworks.host.downloads import Client
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "launcher/trainworks_launcher/programs/install.py"
TORCH = "2.13.0+cpu"
BASE = ExtendedBase(
    reference="some/image:1",
    identifier="sha256:" + "b" * 64,
    python="/opt/venv/bin/python",
    version="3.11",
    full_version="3.11.2",
    glibc="2.36",
    machine="x86_64",
    environment={},
    distributions=(
        BaseDistribution(name="torch", version=TORCH),
        BaseDistribution(name="core", version="1.5"),
        BaseDistribution(name="client", version="1.0"),
    ),
    metadata={
        "torch": f"Name: torch\nVersion: {TORCH}\n",
        "core": "Name: core\nVersion: 1.5\n",
        "client": "Name: client\nVersion: 1.0\nRequires-Dist: core>=1\n",
    },
    kept={"torch": TORCH},
)
WHEELS = (
    *(("alpha", version) for version in ("1.0", "1.5", "2.0", "2.1rc1", "3.0.dev1")),
    ("beta", "1.0", "alpha<2"),
    ("gamma", "1.0", "torch>=2", "alpha"),
    ("delta", "1.0"),
    ("needs_newer", "1.0", "core>=2"),
    *(("core", version) for version in ("1.0", "1.5", "2.0")),
    ("builds", "1.0+a"),
    ("builds", "1.0+b"),
    ("only_linux", "1.0"),
    ("mixed_case_name", "1.0"),
    ("two_ways", "1.0", "alpha>=2; python_version >= '3.9'", "delta; python_version < '3.9'"),
    ("torch", "2.4.1"),
    ("torch", "2.99.0"),
)
TAGGED = (
    "cp311-cp311-manylinux_2_28_x86_64",
    "cp39-cp39-manylinux_2_17_x86_64",
    "cp311-cp311-win_amd64",
)
LOGIN = {"WHO": USER, "WORD": "of-the-house"}
PROJECT = '[project]\nname = "mine"\nversion = "1.0"\n'


def extra_wheel() -> tuple[str, bytes]:
    return wheel_of("extras", "1.0", "", "delta; extra == 'more'", "alpha<2; extra == 'old'")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        text: The file, with names in the place of addresses and hashes.
        files: Files that lie beside it.
        name: The file's.
        words: Extras and groups, as words of both commands.
        refused: Text of our refusal; uv is not asked.
        alone: uv gets this text, where it refuses a line that pip reads so, or that is answered.
        empty: Nothing is installed.
    """

    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    name: str = "requirements.txt"
    words: Sequence[str] = ()
    refused: str = ""
    alone: str = ""
    empty: bool = False


def project(rest: str, *words: str, **more: str) -> Row:
    return Row(PROJECT + rest, name="pyproject.toml", words=words, **more)  # type: ignore[arg-type]


SCRIPT = "# /// script\n# dependencies = ['beta', 'delta']\n# ///\nimport beta\n"
PYLOCK = """\
lock-version = "1.0"
created-by = "uv"
requires-python = ">=3.9"
[[packages]]
name = "alpha"
version = "1.0"
index = "INDEX"
wheels = [{ url = "FILES/alpha-1.0-py3-none-any.whl", hashes = { sha256 = "HASH_ALPHA" } }]
[[packages]]
name = "delta"
version = "1.0"
marker = "sys_platform == 'win32'"
index = "INDEX"
wheels = [{ url = "FILES/delta-1.0-py3-none-any.whl", hashes = { sha256 = "HASH_DELTA" } }]
"""
PRIVATE = """\
[[tool.uv.index]]
name = "inside"
url = "PRIVATE"
explicit = true
[tool.uv.sources]
secret_part = { index = "inside" }
"""
ROWS = {
    # Versions.
    "a bare name": Row("alpha\n"),
    "a pin": Row("alpha==1.5\n"),
    "a range": Row("alpha>=1,<2\n"),
    "in brackets": Row("alpha (>=1.0,<1.5)\n"),
    "compatible": Row("alpha~=1.0\n"),
    "a wildcard": Row("alpha==1.*\n"),
    "excluded": Row("alpha!=2.0\n"),
    "arbitrary equality": Row("alpha===1.5\n"),
    "spaces everywhere": Row("  alpha  >=  1 ,  < 2   # why\n"),
    "another spelling of the name": Row("MIXED-case.Name\nAlpha\n"),
    "a local version": Row("builds==1.0+a\n"),
    "the newest local version": Row("builds\n"),
    "two lines of one name": Row("alpha>1\nalpha<2\n"),
    "two that do not go together": Row("alpha<2\nalpha>=2\n", refused="alpha<2 and alpha>=2"),
    "an absent name": Row("absent-name\n", refused="absent-name was not found"),
    "an absent version": Row("alpha==9\n", refused="alpha==9"),
    "a pre-release that is named": Row("alpha==2.1rc1\n"),
    "pre-releases by option": Row("--pre\nalpha\n", alone="alpha==3.0.dev1\n"),
    "what the base has": Row("core\nclient\n", empty=True),
    "what the base has in another version": Row("core==2.0\n"),
    "what moves what the base has": Row("needs_newer\n"),
    "what needs the base's torch": Row("gamma\n"),
    # Markers and extras.
    "a marker that holds": Row("alpha==1.0; python_version >= '3.9'\n"),
    "a marker that does not": Row("alpha==1.0; python_version < '3.9'\ndelta\n"),
    "one line for each system": Row(
        "alpha==1.0; sys_platform == 'win32'\nalpha==1.5; sys_platform == 'linux'\n"
    ),
    "a marker with brackets": Row(
        "alpha==1.0; (os_name == 'nt' or platform_machine == 'x86_64') and python_version > '3'\n"
    ),
    "markers of a dependency": Row("two_ways\n"),
    "an extra": Row("extras[more]\n"),
    "two extras": Row("extras[more, old]\n"),
    "an extra that is not there": Row("extras[nothing]\n"),
    "an extra with a marker": Row("extras[old]; python_version > '3'\n"),
    # Files.
    "a file that is included": Row(
        "-r more/other.txt\ndelta\n",
        {"more/other.txt": "beta\n-r inner.txt\n", "more/inner.txt": "gamma\n"},
    ),
    "constraints": Row("beta\n-c limits.txt\n", {"limits.txt": "alpha==1.0\ndelta==1.0\n"}),
    "constraints of an included file": Row(
        "-r other.txt\n",
        {"other.txt": "alpha\n--constraint limits.txt\n", "limits.txt": "alpha<1.5\n"},
    ),
    "a line that goes on": Row("alpha \\\n  >=1, \\\n  <2\ndelta\n", alone="alpha>=1,<2\ndelta\n"),
    "lines of Windows": Row("alpha==1.5\r\ndelta\r\n"),
    "a mark at the start": Row("\ufeffalpha==1.5\n"),
    "an empty file": Row("# nothing yet\n\n", empty=True),
    # Files of this machine, and addresses.
    "a wheel beside it": Row(
        "./delta-1.0-py3-none-any.whl\n", {"delta-1.0-py3-none-any.whl": "WHEEL"}
    ),
    "a wheel by name and path": Row(
        "delta @ file://HERE/delta-1.0-py3-none-any.whl\n", {"delta-1.0-py3-none-any.whl": "WHEEL"}
    ),
    "a wheel with an extra": Row(
        "./extras-1.0-py3-none-any.whl[more]\n", {"extras-1.0-py3-none-any.whl": "WHEEL"}
    ),
    "a wheel of another Python": Row(
        "FILES/tagged-1.0-cp39-cp39-manylinux_2_17_x86_64.whl\n",
        refused="is for another Python or system",
    ),
    "a wheel's address": Row("FILES/delta-1.0-py3-none-any.whl\n"),
    "a name and an address": Row("delta @ FILES/delta-1.0-py3-none-any.whl\n"),
    "an address with its hash": Row("delta @ FILES/delta-1.0-py3-none-any.whl#sha256=HASH_DELTA\n"),
    "an address with a login": Row(
        "secret_part @ http://${WHO}:${WORD}@PLACE/file/secret_part-3.0-py3-none-any.whl\n"
    ),
    "a login in the file": Row(
        "secret_part @ http://me:you@PLACE/file/secret_part-3.0-py3-none-any.whl\n",
        refused="password or token",
    ),
    "the wheel that fits of many": Row("tagged\n"),
    # Indexes.
    "another index": Row("--index-url INDEX\nalpha<2\n"),
    "an index beside": Row(
        "--extra-index-url http://${WHO}:${WORD}@PLACE/simple/\nsecret_part\nalpha\n"
    ),
    "an index with an equals sign": Row(
        "--extra-index-url=http://${WHO}:${WORD}@PLACE/simple/\nsecret_part\n"
    ),
    "a page of links": Row("--no-index\n--find-links LINKS\nalpha\n"),
    "a folder of wheels": Row(
        "--no-index\n-f wheels\ndelta\n", {"wheels/delta-1.0-py3-none-any.whl": "WHEEL"}
    ),
    "wheels only": Row("--only-binary :all:\nbeta\n"),
    # Hashes.
    "a hash": Row("alpha==1.0 --hash=sha256:HASH_ALPHA\n"),
    "several hashes on lines of their own": Row(
        "alpha==1.0 \\\n    --hash=sha256:" + "0" * 64 + " \\\n    --hash=sha256:HASH_ALPHA\n"
    ),
    "another hash": Row(
        "alpha==1.0 --hash=sha256:" + "0" * 64 + "\n", refused="Hash mismatch for alpha"
    ),
    "all lines have one": Row("--require-hashes\nalpha==1.0 --hash=sha256:HASH_ALPHA\n"),
    "a line lacks one": Row(
        "--require-hashes\nalpha==1.0 --hash=sha256:HASH_ALPHA\ndelta\n", refused="delta"
    ),
    # Files that uv reads itself.
    "a project's extra and group": project(
        "dependencies = ['beta']\n"
        "[project.optional-dependencies]\n"
        "all = ['mine[one]']\n"
        "one = ['delta']\n"
        "[dependency-groups]\n"
        "dev = [{include-group = 'test'}]\n"
        "test = ['gamma']\n",
        *("--extra", "all", "--group", "dev"),
    ),
    "a project's overrides and constraints": project(
        "dependencies = ['beta', 'core']\n[tool.uv]\noverride-dependencies = ['alpha==2.0']\n"
        "constraint-dependencies = ['core>=2']\n"
    ),
    "a project's own index": project(f"dependencies = ['secret_part', 'alpha']\n{PRIVATE}"),
    "a project for another Python": project(
        "requires-python = '>=3.12'\ndependencies = ['alpha']\n",
        refused="requires-python is >=3.12",
    ),
    "a script": Row(SCRIPT, name="train.py"),
    "a lock in the common form": Row(PYLOCK, name="pylock.toml"),
    # Versions that the base keeps.
    "another torch": Row("torch==2.4.1\nalpha==1.0\n", alone="alpha==1.0\n"),
    "a newer torch": Row("torch>=2.99\n", refused="choose an image with torch>=2.99"),
}


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    files = dict(wheel_of(name, version, "", *requires) for name, version, *requires in WHEELS)
    plain, content = wheel_of("tagged", "1.0", "")
    files |= {plain.replace("py3-none-any", tag): content for tag in TAGGED}
    with serving(Index(files | dict([extra_wheel()]))) as server:
        yield server


@pytest.fixture(scope="module")
def private() -> Iterator[Index]:
    with serving(
        Index(dict([wheel_of("secret_part", "3.0", "")]), password=LOGIN["WORD"])
    ) as server:
        yield server


def write_requirements(row: Row, folder: Path, index: Index, private: Index) -> Path:
    """Write the files of a row, and return the first."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in index.files.items()}
    values = {
        "INDEX": index.simple,
        "FILES": f"http://{index.host}/file",
        "LINKS": f"http://{index.host}/links/",
        "PRIVATE": private.simple,
        "PLACE": private.host,
        "HERE": str(folder),
        "HASH_ALPHA": digests["alpha-1.0-py3-none-any.whl"],
        "HASH_DELTA": digests["delta-1.0-py3-none-any.whl"],
    }
    for name, text in {row.name: row.text, "alone.txt": row.alone, **row.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text == "WHEEL":
            path.write_bytes(index.files[path.name])
            continue
        for word, value in values.items():
            text = re.sub(rf"\b{word}\b", value, text)
        path.write_text(text, newline="")
    return folder / row.name


def variables(index: Index, private: Index, folder: Path) -> dict[str, str]:
    """Return an environment without settings of this machine, with logins by variables."""
    kept_variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_", "XDG_"))
    }
    own = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index.simple,
        "HOME": str(folder),
        **LOGIN,
    }
    login = {"UV_INDEX_INSIDE_USERNAME": USER, "UV_INDEX_INSIDE_PASSWORD": private.password}
    return {**kept_variables, **own, **login, "XDG_CACHE_HOME": str(folder / "cache")}


def locked(file: Path, row: Row, folder: Path, facts: Facts) -> ExtensionLock:
    """Return the versions that `extend` locks; raises its refusal."""
    named = [
        value for first, value in zip(row.words, row.words[1:], strict=False) if first == "--extra"
    ]
    groups = [
        value for first, value in zip(row.words, row.words[1:], strict=False) if first == "--group"
    ]
    optional = OptionalDependencies(extras=named, groups=groups)
    requested = read_requirements(file, os.environ, optional=optional)
    if requested.problems:
        raise ExtendError(requested.problems)
    settings = HostSettings(pip=PipSettings())
    sandbox = Sandbox(
        plan=ExtensionPlan(tag="a/test:1", base=BASE),
        recipes=Recipes(texts={}, programs={}),
        bench=BARE,
        engine=create("docker"),
        settings=settings,
        options=BuildOptions(),
        folder=folder / "work",
        packages=lambda _context: (),
        network=False,
    )
    manifest = {"protected": dict(BASE.kept)}
    order = ResolutionRequest(
        requested=requested, sources=(), commits={}, manifest=manifest, beside=file.parent
    )
    place = folder / "resolver"
    place.mkdir()
    with Client(settings) as client:
        resolver = Resolver(BASE, place, client, fresh=False)
        tools = ResolutionTools(base=BASE, resolver=resolver, sandbox=sandbox, program=PROGRAM)
        return resolve(order, tools, facts).lock


def by_uv(file: Path, row: Row, folder: Path) -> dict[str, str]:
    """Return the versions that uv itself would install in the same base."""
    described = Environment(folder / "described")
    described.describe(BASE)
    limits = folder / "kept.txt"
    limits.write_text(f"torch=={TORCH}\n")
    words = (
        "pip",
        "install",
        "--dry-run",
        "--output-format",
        "json",
        "--target",
        str(described.folder),
    )
    python = (
        "--python",
        sys.executable,
        "--python-version",
        "3.11.2",
        "--python-platform",
        "x86_64-manylinux_2_36",
    )
    chosen = ("-c", str(limits)) if "pylock" not in row.name else ()
    done = subprocess.run(
        (find_uv_bin(), *words, *python, *chosen, "-r", str(file), *row.words),
        cwd=file.parent,
        env={
            **os.environ,
            "UV_DEFAULT_INDEX": os.environ["PIP_INDEX_URL"],
            "UV_INDEX_STRATEGY": "unsafe-best-match",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["changes"]
    return {row["name"]: row.get("version", "") for row in rows if row["action"] != "uninstalled"}


@pytest.mark.parametrize("name", ROWS)
def test_a_line_is_what_uv_makes_of_it_or_a_named_refusal(
    index: Index,
    private: Index,
    facts: Facts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    row, folder = ROWS[name], tmp_path / "project"
    for variable in os.environ:
        monkeypatch.delenv(variable)
    for variable, value in variables(index, private, tmp_path).items():
        monkeypatch.setenv(variable, value)
    # A Python without pip, as uv makes them: then its settings are these variables, and no pip has
    # to start for each row. pip's own reading of them: launcher/tests/test_launcher_pip_files.py.
    monkeypatch.setitem(sys.modules, "pip", None)
    file = write_requirements(row, folder, index, private)
    if row.refused:
        with pytest.raises((ExtendError, LockError)) as caught:
            locked(file, row, tmp_path, facts)
        assert row.refused in " ".join(caught.value.message.split())
        return
    lock = locked(file, row, tmp_path, facts)
    locked_versions = dict(lock.locked)
    beside = folder / "alone.txt" if row.alone else file
    expected = by_uv(beside, row, tmp_path)
    for name, version in expected.items():
        if version == "":
            expected[name] = locked_versions[name]
    assert locked_versions == expected
    assert (locked_versions == {}) == row.empty
    # Each hash is of a file that an index has.
    known_digests = {
        hashlib.sha256(content).hexdigest()
        for index_server in (index, private)
        for content in index_server.files.values()
    }
    assert {digest for digests in lock.hashes.values() for digest in digests} <= known_digests
    assert LOGIN["WORD"] not in lock.text
    assert base64.b64encode(LOGIN["WORD"].encode()).decode() not in lock.text


def test_the_table_is_as_long_as_it_was_asked_to_be() -> None:
    assert len(ROWS) >= 66
