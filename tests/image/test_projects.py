"""Test projects as people have them, at both doors: `extend` locks the versions that a job
installs, and that uv would.

Each project is a folder of files. Its packages are tiny wheels on an index of the test, which has
no other, so nothing depends on the state of a public index. uv by itself gets the image's own
packages as constraints.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from uv import find_uv_bin

from image.indexes import USER, Index, sdist_of, serving, wheel_of
from image.support import ROOT, BuiltByCommand
from lock.servers import git_repositories
from lock.servers import serving as serving_files
from trainworks.engine.protocol import BuildRequest, Job

pytestmark = pytest.mark.engine

WHEELS = (
    ("alpha", "1.0"),
    ("alpha", "1.5"),
    ("alpha", "2.0"),
    ("beta", "1.0", "alpha<2"),
    ("gamma", "1.0", "torch>=2", "alpha"),
    ("delta", "1.0"),
    ("only_windows", "1.0"),
    # A distribution of another project, under the name that the user's own project has.
    ("mine", "7.0", "delta"),
    ("torchvision", "0.28.0", "torch==2.13.0"),
    ("torchvision", "0.19.1", "torch==2.4.1"),
    ("vision_of_torch", "1.0", "torch==2.13.0"),
    ("vision_of_torch", "0.9", "torch==2.4.1"),
)
HEAD = '[project]\nname = "mine"\nversion = "1.0"\nrequires-python = ">=3.9"\n'
BACKEND = """
import os, zipfile

def get_requires_for_build_wheel(settings=None):
    return []

def build_wheel(directory, settings=None, metadata=None):
    name = "{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.writestr("{name}.py", "")
        info = "{name}-{version}.dist-info"
        head = "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
        for requirement in {requires}:
            head += "Requires-Dist: %s\\n" % requirement
        wheel.writestr(info + "/METADATA", head)
        tags = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr(info + "/WHEEL", tags)
        wheel.writestr(info + "/RECORD", "")
    return name

build_editable = build_wheel
"""
"""A build backend of the project itself: builds need no index."""

LISTING = (
    "import json; from importlib import metadata;"
    " print(json.dumps({each.metadata['Name'].lower().replace('_', '-').replace('.', '-'):"
    " each.version for each in metadata.distributions()}))"
)
JOB = """\
cp -r /project /tmp/project && cd "/tmp/project/$FOLDER"
python -c "$LISTING"
if [ -n "$PLAIN" ]; then
    python -c "import json; kept = json.load(open('/opt/trainworks/image.json'))['protected']
print(*(f'{name}=={kept[name]}' for name in kept), sep='\\n')" > /tmp/kept.txt
    sh -c "$PLAIN" > /tmp/changes.json 2> /tmp/uv.txt || { cat /tmp/uv.txt; echo uv refuses; }
    tr -d '\\n' < /tmp/changes.json; echo
fi
python -I /opt/trainworks/lib/trainworks_launcher/programs/install.py -- $WORDS \\
    && python -c "$LISTING"
"""


def project_of(name: str, version: str, *requires: str, more: str = "") -> dict[str, str]:
    """Return a project that tells its requirements only when it is built."""
    head = f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n{more}'
    return {
        "pyproject.toml": head,
        "backend.py": BACKEND.format(name=name, version=version, requires=list(requires)),
    }


def below(folder: str, files: Mapping[str, str]) -> dict[str, str]:
    """The files of a project in a folder."""
    return {f"{folder}/{name}": text for name, text in files.items()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder of a user's.

    Attributes:
        files: Path to text; INDEX stands for the index's address.
        words: Options of `extend`.
        job: Variables of a job's installer.
        plain: A call of uv with the same meaning, in a shell; ``""`` where uv
            by itself gives another answer.
        expected: Packages that are installed, beside or instead of those of the image.
        message: Message of both doors.
        refused: Refusal of both doors; ``""`` where the project is installed.
        before: Commands of uv that a user has called in the folder.
        folder: Where the user stands.
        history: A folder that is a git repository with the tag v1.4.0; ``""`` for none.
    """

    files: Mapping[str, str]
    words: tuple[str, ...]
    job: str
    plain: str = ""
    expected: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    refused: str = ""
    before: tuple[str, ...] = ()
    folder: str = "."
    history: str = ""


UV = (
    "uv pip install --quiet --dry-run --output-format"
    " json --constraints /tmp/kept.txt --python /opt/venv"
)
SELF = f"""{HEAD}dependencies = ["alpha<2"]
[project.optional-dependencies]
all = ["mine[more]", "mine[video]"]
more = ["beta"]
video = ["delta"]
"""
WORKSPACE = {
    "pyproject.toml": '[tool.uv.workspace]\nmembers = ["packages/*"]\n',
    "packages/app/pyproject.toml": (
        f"""{HEAD}dependencies = ["shared-part", "delta"]
[tool.uv.sources]
shared-part = {{workspace = true}}
"""
    ),
    **below(
        "packages/shared",
        {
            **project_of("shared_part", "4.0", "alpha==1.5"),
            "pyproject.toml": (
                '[project]\nname = "shared-part"\nversion = "4.0"\ndependencies = ["alpha==1.5"]\n'
                '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            ),
        },
    ),
}
SCRIPT = """# /// script
# requires-python = ">=3.9"
# dependencies = ["beta", "gamma"]
# [tool.uv]
# override-dependencies = ["alpha==1.0"]
# ///
import alpha
"""

OF_GIT = f"""{HEAD.replace('version = "1.0"', 'dynamic = ["version"]')}dependencies = ["beta"]
[build-system]
requires = ["setuptools", "setuptools-scm"]
build-backend = "setuptools.build_meta"
[tool.setuptools]
py-modules = ["mine"]
[tool.setuptools_scm]
"""
REPOSITORY = {
    "mine.py": "",
    "pyproject.toml": OF_GIT,
    **below("lib", project_of("delta", "99.1", "alpha<1.5")),
    **below("static", project_of("static", "3.0", "alpha<2")),
    # A pinned wheel tells its requirements without a build.
    "static/pyproject.toml": (
        '[project]\nname = "static"\nversion = "3.0"\ndependencies = ["alpha<2"]\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    ),
}
"""Files of another project at a commit, which its branch has left."""

CASES = {
    "several requirements files": Case(
        files={
            "requirements.txt": "-r parts/base.txt\n-c limits.txt\ndelta\n",
            "parts/base.txt": "gamma\nonly-windows; sys_platform == 'win32'\n",
            "limits.txt": "alpha<2\n",
        },
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        plain=f"{UV} -r requirements.txt",
        expected={"gamma": "1.0", "delta": "1.0", "alpha": "1.5"},
    ),
    "another torch in a requirements file": Case(
        files={"requirements.txt": "torch==2.4.1\ngamma\n"},
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        expected={"gamma": "1.0", "alpha": "2.0"},
        message="torch==2.4.1 is not installed: this image keeps torch 2.13.0+cpu",
    ),
    "a project": Case(
        files={"pyproject.toml": f'{HEAD}dependencies = ["beta", "gamma"]\n'},
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        plain=f"{UV} -r pyproject.toml",
        expected={"beta": "1.0", "gamma": "1.0", "alpha": "1.5"},
    ),
    "extras that name their own project": Case(
        files={"pyproject.toml": SELF},
        words=("-r", "pyproject.toml", "--extra", "all"),
        job="-r pyproject.toml --extra all",
        plain=f"{UV} -r pyproject.toml --extra all",
        expected={"alpha": "1.5", "beta": "1.0", "delta": "1.0"},
    ),
    "groups that include groups": Case(
        files={
            "pyproject.toml": (
                f"{HEAD}dependencies = []\n"
                "[dependency-groups]\n"
                'test = ["delta", {include-group = "more"}]\n'
                'more = ["beta"]\n'
            )
        },
        words=("-r", "pyproject.toml", "--group", "test"),
        job="-r pyproject.toml --group test",
        plain=f"{UV} -r pyproject.toml --group test",
        expected={"alpha": "1.5", "beta": "1.0", "delta": "1.0"},
    ),
    "a group beside a requirements file": Case(
        files={
            "app/requirements.txt": "delta\n",
            "app/pyproject.toml": '[dependency-groups]\ndev = ["beta"]\n',
        },
        words=("--source", "app", "--group", "dev"),
        job="-r app/requirements.txt --group app/pyproject.toml:dev",
        plain=f"{UV} -r app/requirements.txt --group app/pyproject.toml:dev",
        expected={"alpha": "1.5", "beta": "1.0", "delta": "1.0"},
    ),
    "a source that is a folder": Case(
        files={
            "app/pyproject.toml": (
                f'{HEAD}dependencies = ["delta"]\n[tool.uv.sources]\ndelta = {{path = "../lib"}}\n'
            ),
            **below("lib", project_of("delta", "99.1", "alpha<1.5")),
        },
        words=("-r", "app/pyproject.toml"),
        job="-r app/pyproject.toml",
        plain=f"{UV} -r app/pyproject.toml",
        expected={"delta": "99.1", "alpha": "1.0"},
    ),
    "a project with a source, as code": Case(
        files={
            "app/train.py": "",
            **below("app", project_of("mine", "1.0", "delta")),
            "app/pyproject.toml": (
                f"{HEAD}dependencies = ['delta']\n[tool.uv]\nconstraint-dependencies ="
                ' ["alpha==1.0"]\n[tool.uv.sources]\ndelta = {path = "../lib", editable ='
                ' true}\n[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path ='
                ' ["."]\n'
            ),
            **below("lib", project_of("delta", "99.1", "alpha")),
        },
        words=("--source", "app", "--entry-point", "train.py"),
        job="./app",
        plain=f"{UV} --project app ./app",
        expected={"mine": "1.0", "delta": "99.1", "alpha": "1.0"},
    ),
    "a workspace": Case(
        files=WORKSPACE,
        words=("-r", "packages/app/pyproject.toml"),
        job="-r packages/app/pyproject.toml",
        plain=f"{UV} -r packages/app/pyproject.toml",
        expected={"shared-part": "4.0", "alpha": "1.5", "delta": "1.0"},
    ),
    "overrides and constraints": Case(
        files={
            "pyproject.toml": (
                f'{HEAD}dependencies = ["beta", "gamma"]\n[tool.uv]\n'
                'override-dependencies = ["alpha==2.0"]\nconstraint-dependencies = ["beta<2"]\n'
            )
        },
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        plain=f"{UV} --project . -r pyproject.toml",
        expected={"beta": "1.0", "gamma": "1.0", "alpha": "2.0"},
    ),
    "an index of its own, for one package": Case(
        files={
            "pyproject.toml": (
                f'{HEAD}dependencies = ["delta", "private-part"]\n'
                "[[tool.uv.index]]\n"
                'name = "inside"\n'
                'url = "PRIVATE"\n'
                "explicit = true\n"
                "[tool.uv.sources]\n"
                'private-part = {index = "inside"}\n'
            )
        },
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        plain=f"{UV} -r pyproject.toml",
        expected={"delta": "1.0", "private-part": "3.0"},
    ),
    "torch from an index of another build": Case(
        files={
            "pyproject.toml": (
                f'{HEAD}dependencies = ["torch>=2.4", "gamma"]\n'
                "[[tool.uv.index]]\n"
                'name = "cu128"\n'
                'url = "http://127.0.0.1:9/simple"\n'
                "explicit = true\n"
                "[tool.uv.sources]\n"
                'torch = {index = "cu128"}\n'
            )
        },
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        expected={"gamma": "1.0", "alpha": "2.0"},
        message="the source of torch is not used: this image has its own",
    ),
    "uv.lock": Case(
        files={
            "pyproject.toml": (
                f'{HEAD}dependencies = ["beta", "only-windows; sys_platform == \'win32\'"]\n'
                '[project.optional-dependencies]\nfast = ["delta"]\n'
            )
        },
        before=("uv lock --default-index INDEX",),
        words=("-r", "uv.lock", "--extra", "fast"),
        job="-r uv.lock --extra fast",
        plain="uv export --quiet --frozen --no-emit-project --extra fast > /tmp/r.txt && "
        f"{UV} -r /tmp/r.txt",
        expected={"alpha": "1.5", "beta": "1.0", "delta": "1.0"},
    ),
    "uv.lock with a folder": Case(
        files={
            "app/pyproject.toml": (
                f'{HEAD}dependencies = ["delta"]\n[tool.uv.sources]\ndelta = {{path = "../lib"}}\n'
            ),
            "lib/pyproject.toml": (
                '[project]\nname = "delta"\nversion = "99.1"\ndependencies = ["alpha"]\n'
                '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            ),
            "lib/backend.py": project_of("delta", "99.1", "alpha")["backend.py"],
        },
        before=("uv lock --default-index INDEX --project app",),
        words=("-r", "app/uv.lock"),
        job="-r app/uv.lock",
        plain="cd app && uv export -q --frozen --no-emit-project > r.txt && " + f"{UV} -r r.txt",
        expected={"alpha": "2.0", "delta": "99.1"},
    ),
    "pylock.toml with markers": Case(
        files={
            "pyproject.toml": (
                f'{HEAD}dependencies = ["beta; python_version < \'3.10\'", "alpha==1.0;'
                " python_version < '3.10'\", \"alpha==2.0; python_version >= '3.10'\","
                " \"only-windows; sys_platform == 'win32'\", \"delta; sys_platform != 'win32'\"]\n"
            )
        },
        before=(
            "uv lock --default-index INDEX",
            (
                "uv export --quiet --frozen --format pylock.toml --output-file pylock.toml"
                " --no-emit-project"
            ),
        ),
        words=("-r", "pylock.toml"),
        job="-r pylock.toml",
        plain=(
            "UV_CONSTRAINT= uv pip install -q --dry-run"
            " --output-format json --python /opt/venv -r pylock.toml"
        ),
        expected={"alpha": "2.0", "delta": "1.0"},
    ),
    "a lock with another torch": Case(
        files={
            "pylock.toml": (
                'lock-version = "1.0"\n'
                'created-by = "x"\n'
                "[[packages]]\n"
                'name = "torch"\n'
                'version = "2.4.1"\n'
                'wheels = [{url = "INDEXfile/torch-2.4.1-py3-none-any.whl",'
                f' hashes = {{sha256 = "{"0" * 64}"}}}}]\n'
                "[[packages]]\n"
                'name = "delta"\n'
                'version = "1.0"\n'
                'wheels = [{url = "INDEX../file/delta-1.0-py3-none-any.whl",'
                ' hashes = {sha256 = "HASH"}}]\n'
            )
        },
        words=("-r", "pylock.toml"),
        job="-r pylock.toml",
        expected={"delta": "1.0"},
        message="torch==2.4.1 is not installed: this image keeps torch 2.13.0+cpu",
    ),
    "a lock with companions of another torch": Case(
        files={
            "pylock.toml": (
                'lock-version = "1.0"\n'
                'created-by = "x"\n'
                "[[packages]]\n"
                'name = "torch"\n'
                'version = "2.11.0+cu128"\n'
                'index = "https://download.pytorch.org/whl/cu128"\n'
                'wheels = [{url = "INDEXfile/torch-2.11.0%2Bcu128-py3-none-any.whl",'
                f' hashes = {{sha256 = "{"0" * 64}"}}}}]\n'
                "[[packages]]\n"
                'name = "torchvision"\n'
                'version = "0.26.0+cu128"\n'
                'index = "https://download.pytorch.org/whl/cu128"\n'
                'wheels = [{url = "INDEXfile/torchvision-0.26.0%2Bcu128-py3-none-any.whl",'
                f' hashes = {{sha256 = "{"0" * 64}"}}}}]\n'
            )
        },
        words=("-r", "pylock.toml"),
        job="-r pylock.toml",
        expected={"torchvision": "0.28.0"},
        message=(
            "torchvision==0.26.0+cu128 goes with another torch:"
            " the release for torch 2.13.0+cpu is taken"
        ),
    ),
    "companions of another torch in a file": Case(
        files={"requirements.txt": "torch==2.4.1\ntorchvision==0.19.1\ngamma\n"},
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        expected={"torchvision": "0.28.0", "gamma": "1.0", "alpha": "2.0"},
        message="torchvision==0.19.1 goes with another torch",
    ),
    "companions of another torch in a project": Case(
        files={"pyproject.toml": f'{HEAD}dependencies = ["torch==2.4.1", "torchvision==0.19.1"]\n'},
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        expected={"torchvision": "0.28.0"},
        message="torchvision==0.19.1 goes with another torch",
    ),
    "a script": Case(
        files={"train.py": SCRIPT},
        words=("-r", "train.py"),
        job="-r train.py",
        plain=f"{UV} -r train.py",
        expected={"beta": "1.0", "gamma": "1.0", "alpha": "1.0"},
    ),
    "a script with its lock": Case(
        files={
            "train.py": (
                "# /// script\n"
                '# requires-python = ">=3.9"\n'
                '# dependencies = ["delta"]\n'
                "# [tool.uv.sources]\n"
                '# delta = {path = "lib"}\n'
                "# ///\n"
            ),
            **below("lib", project_of("delta", "99.1", "alpha")),
            "lib/pyproject.toml": (
                '[project]\nname = "delta"\nversion = "99.1"\ndependencies = ["alpha"]\n'
                '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            ),
        },
        before=("uv lock --default-index INDEX --script train.py",),
        words=("-r", "train.py"),
        job="-r train.py",
        expected={"alpha": "2.0", "delta": "99.1"},
    ),
    "a script with sources and without a lock": Case(
        files={
            "train.py": (
                "# /// script\n"
                '# requires-python = ">=3.9"\n'
                '# dependencies = ["delta"]\n'
                "# [tool.uv.sources]\n"
                '# delta = {path = "lib"}\n'
                "# ///\n"
            ),
        },
        words=("-r", "train.py"),
        job="-r train.py",
        refused="`uv lock --script ",
    ),
    "Poetry with a uv.lock": Case(
        files={
            "pyproject.toml": (
                "[project]\n"
                'name = "mine"\n'
                'version = "1.0"\n'
                'requires-python = ">=3.9"\n'
                'dependencies = ["beta"]\n'
                "[tool.poetry]\n"
                "packages = []\n"
                "[build-system]\n"
                'requires = ["poetry-core"]\n'
                'build-backend = "poetry.core.masonry.api"\n'
            )
        },
        before=("uv lock --default-index INDEX",),
        words=("-r", "uv.lock"),
        job="-r uv.lock",
        plain=f"uv export --quiet --frozen --no-emit-project > /tmp/r.txt && {UV} -r /tmp/r.txt",
        expected={"alpha": "1.5", "beta": "1.0"},
    ),
    "Poetry alone": Case(
        files={"poetry.lock": ""},
        words=("-r", "poetry.lock"),
        job="-r poetry.lock",
        refused="poetry export -o requirements.txt",
    ),
    "conda": Case(
        files={"environment.yml": "dependencies: [python=3.11]\n"},
        words=("-r", "environment.yml"),
        job="-r environment.yml",
        refused="conda run -n NAME python -m pip list --format=freeze",
    ),
    "a src layout, built by its own backend": Case(
        files={
            "app/src/mine/__init__.py": "",
            "app/train.py": "",
            **below("app", project_of("mine", "2.5", "beta")),
        },
        words=("--source", "app", "--entry-point", "train.py"),
        job="./app",
        plain=f"{UV} ./app",
        expected={"mine": "2.5", "alpha": "1.5", "beta": "1.0"},
    ),
    "a version of setuptools_scm": Case(
        files={"app/mine.py": "", "app/train.py": "", "app/pyproject.toml": OF_GIT},
        history="app",
        words=("--source", "app", "--entry-point", "train.py"),
        job="./app",
        plain=f"{UV} ./app",
        expected={"mine": "1.4.0", "alpha": "1.5", "beta": "1.0"},
    ),
    "a folder with a version of setuptools_scm": Case(
        files={"requirements.txt": "./lib\n", "lib/mine.py": "", "lib/pyproject.toml": OF_GIT},
        history="lib",
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        plain=f"{UV} -r requirements.txt",
        expected={"mine": "1.4.0", "alpha": "1.5", "beta": "1.0"},
    ),
    "a commit of a git repository": Case(
        files={"requirements.txt": "delta @ git+GIT@COMMIT#subdirectory=lib\n"},
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        plain=f"{UV} -r requirements.txt",
        expected={"delta": "99.1", "alpha": "1.0"},
    ),
    "a source that is a commit of a git repository": Case(
        files={
            "pyproject.toml": (
                f'{HEAD}dependencies = ["delta"]\n[tool.uv.sources]\n'
                'delta = {git = "GIT", rev = "COMMIT", subdirectory = "lib"}\n'
            )
        },
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        plain=f"{UV} -r pyproject.toml",
        expected={"delta": "99.1", "alpha": "1.0"},
    ),
    "uv.lock with a commit of a git repository": Case(
        files={
            "pyproject.toml": (
                f'{HEAD}dependencies = ["static"]\n[tool.uv.sources]\n'
                'static = {git = "GIT", rev = "COMMIT", subdirectory = "static"}\n'
            )
        },
        before=("uv lock --default-index INDEX",),
        words=("-r", "uv.lock"),
        job="-r uv.lock",
        plain=f"uv export --quiet --frozen --no-emit-project > /tmp/r.txt && {UV} -r /tmp/r.txt",
        expected={"static": "3.0", "alpha": "1.5"},
    ),
    "a version of setuptools_scm in a git repository": Case(
        files={"requirements.txt": "mine @ git+GIT@COMMIT\n"},
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        plain=f"{UV} -r requirements.txt",
        expected={"mine": "1.4.0", "alpha": "1.5", "beta": "1.0"},
    ),
    "what nvcc compiles, without a wheel": Case(
        files={"requirements.txt": "delta\nflash-attn==2.8.3\n"},
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        refused=(
            "requirements.txt line 2: flash-attn is compiled by nvcc,"
            " which is not there, and no wheel fits"
        ),
    ),
    "an editable folder": Case(
        files={
            "requirements.txt": "-e ./lib\n",
            **below("lib", project_of("delta", "99.1", "alpha")),
        },
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        plain=f"{UV} -r requirements.txt",
        expected={"delta": "99.1", "alpha": "2.0"},
    ),
    "a file with hashes": Case(
        files={"requirements.txt": "delta==1.0 --hash=sha256:HASH\n"},
        words=("-r", "requirements.txt"),
        job="-r requirements.txt",
        plain=f"{UV} -r requirements.txt",
        expected={"delta": "1.0"},
    ),
    "another Python": Case(
        files={"pyproject.toml": HEAD.replace("3.9", "3.13") + 'dependencies = ["delta"]\n'},
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        refused="requires-python is >=3.13, and this image has Python 3.11",
    ),
    "what asks for another torch": Case(
        files={"pyproject.toml": f'{HEAD}dependencies = ["vision-of-torch<1"]\n'},
        words=("-r", "pyproject.toml"),
        job="-r pyproject.toml",
        plain=f"{UV} -r pyproject.toml",
        refused="vision-of-torch",
    ),
}


def git(folder: Path, *words: str) -> str:
    identity = (
        "-c",
        "user.name=A Person",
        "-c",
        "user.email=person@example.org",
        "-c",
        "commit.gpgsign=false",
    )
    command = ("git", "-C", str(folder), *identity, *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def committed(folder: Path) -> str:
    """Make a repository of a folder, with the tag v1.4.0; return the commit."""
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "The first one")
    git(folder, "tag", "v1.4.0")
    return git(folder, "rev-parse", "HEAD")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A git repository on loopback: its address, and a commit of it."""

    address: str
    commit: str


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("repositories")
    work = folder / "work"
    for name, text in REPOSITORY.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    commit = committed(work)
    # The branch goes on, with other requirements and without a tag.
    (work / "lib" / "backend.py").write_text(
        project_of("delta", "100.0", "alpha==2.0")["backend.py"]
    )
    git(work, "commit", "--quiet", "--all", "--message", "The second one")
    git(folder, "clone", "--quiet", "--bare", str(work), str(folder / "shared.git"))
    with serving_files() as server:
        server.answers["/git/"] = git_repositories(folder, "/git/")
        yield Repository(address=f"{server.url}/git/shared.git", commit=commit)


@pytest.fixture(scope="module")
def build_tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the wheels of setuptools_scm and of its requirements, for the image's Python, by their
    names.
    """
    folder = tmp_path_factory.mktemp("tools")
    words = (
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--python-version=3.11",
        "--dest",
        str(folder),
    )
    subprocess.run(
        (sys.executable, "-m", "pip", *words, "setuptools-scm", "setuptools"), check=True
    )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def index(build_tools: dict[str, bytes]) -> Iterator[Index]:
    files = dict(wheel_of(name, version, "", *requires) for name, version, *requires in WHEELS)
    # Its build would run code that is not there; who refuses it first never asks.
    name, content = sdist_of("flash_attn", "2.8.3", "import torch_that_is_not_there\n")
    with serving(Index({**build_tools, **files, name: content})) as server:
        yield server


@pytest.fixture(scope="module")
def private() -> Iterator[Index]:
    with serving(
        Index(dict([wheel_of("private_part", "3.0", "")]), password="of-the-house")
    ) as server:
        yield server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def write_project(case: Case, folder: Path, values: Mapping[str, str]) -> None:
    """Write the files of a case, with values in the place of names."""
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for word, value in values.items():
            text = text.replace(word, value)
        path.write_text(text)
    if case.history:
        committed(folder / case.history)
    for command in case.before:
        words = command.replace("INDEX", values["INDEX"]).split()[1:]
        plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("UV_", "PIP_"))
        }
        subprocess.run(
            (find_uv_bin(), *words, "--python", sys.executable), cwd=folder, env=plain, check=True
        )


def extend(
    image: BuiltByCommand, folder: Path, settings: Mapping[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Call `extend` until the lock is written, with no settings of this machine."""
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))
    }
    command = (
        sys.executable,
        str(ROOT / "build.py"),
        "extend",
        "--root",
        str(ROOT),
        "--base",
        image.reference,
    )
    return subprocess.run(
        (
            *command,
            "--tag",
            "trainworks-test/project:1",
            "--until",
            "render",
            "--format",
            "json",
            *words,
        ),
        cwd=folder,
        env={**plain, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_project_is_the_same_at_both_doors_and_for_uv(
    docker_image: BuiltByCommand,
    index: Index,
    private: Index,
    repository: Repository,
    cache: Path,
    tmp_path: Path,
    name: str,
) -> None:
    case, folder = CASES[name], tmp_path / "work"
    folder.mkdir()
    values = {
        "INDEX": index.simple,
        "PRIVATE": private.simple,
        "GIT": repository.address,
        "COMMIT": repository.commit,
        "HASH": hashlib.sha256(index.files["delta-1.0-py3-none-any.whl"]).hexdigest(),
    }
    write_project(case, folder, values)
    login = {"UV_INDEX_INSIDE_USERNAME": USER, "UV_INDEX_INSIDE_PASSWORD": private.password}
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.simple, **login}

    # The job comes first, as a job copies the folder.
    variables = {
        **settings,
        "UV_DEFAULT_INDEX": index.simple,
        "FOLDER": case.folder,
        "LISTING": LISTING,
        "PLAIN": case.plain,
        "WORDS": case.job,
    }
    shared = [word for key, value in variables.items() for word in ("--env", f"{key}={value}")]
    words = (
        "docker",
        "run",
        "--rm",
        "--network",
        "host",
        "--volume",
        f"{folder}:/project:ro",
        *shared,
    )
    job = subprocess.run(
        (*words, docker_image.reference, "sh", "-c", JOB),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    output = job.stdout + job.stderr
    before, *answers = [
        json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")
    ]
    plain = answers.pop(0)["changes"] if case.plain and "uv refuses" not in output else None

    extended = extend(
        docker_image, folder / case.folder, {**settings, "XDG_CACHE_HOME": str(cache)}, *case.words
    )
    if case.refused:
        assert (job.returncode != 0, case.refused in output) == (True, True), output
        assert (extended.returncode != 0, case.refused in extended.stderr) == (
            True,
            True,
        ), extended.stderr
        assert plain is None
        return
    assert job.returncode == 0, output
    assert extended.returncode == 0, extended.stderr
    assert case.message in output
    assert case.message in extended.stderr
    locked = dict(
        requirement.split("==") for requirement in json.loads(extended.stdout)["requirements"]
    )
    installed = {key: value for key, value in answers[-1].items() if before.get(key) != value}
    assert (locked, installed) == (case.expected, case.expected)
    if case.plain:
        assert plain is not None, output
        installed_versions = {
            row["name"]: row.get("version") for row in plain if row["action"] == "installed"
        }
        for key, value in installed_versions.items():
            if value is None:
                installed_versions[key] = case.expected[key]
        assert installed_versions == case.expected


def test_a_new_line_moves_no_more_than_it_has_to(
    docker_image: BuiltByCommand, cache: Path, tmp_path: Path
) -> None:
    files = [wheel_of(name, "1.0", "") for name in ("first", "second", "third")]
    with serving(Index(dict(files))) as server:
        settings = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": server.simple,
            "XDG_CACHE_HOME": str(cache),
        }

        def locked(text: str) -> tuple[dict[str, str], str]:
            (tmp_path / "requirements.txt").write_text(text)
            done = extend(docker_image, tmp_path, settings, "-r", "requirements.txt")
            assert done.returncode == 0, done.stderr
            return (
                dict(
                    requirement.split("==")
                    for requirement in json.loads(done.stdout)["requirements"]
                ),
                done.stderr,
            )

        assert locked("first\nsecond\n")[0] == {"first": "1.0", "second": "1.0"}
        server.files |= dict(wheel_of(name, "2.0", "") for name in ("first", "second", "third"))
        server.files |= dict([wheel_of("needs", "1.0", "", "second>=2")])
        locked_versions, output = locked("first\nsecond\nthird\n")
        assert locked_versions == {"first": "1.0", "second": "1.0", "third": "2.0"}
        assert "the lock moves" not in output
        # The needs of the new line move, with a line each; the rest stays.
        locked_versions, output = locked("first\nsecond\nneeds\n")
        assert locked_versions == {"first": "1.0", "second": "2.0", "needs": "1.0"}
        assert "second: the lock moves from 1.0 to 2.0" in output
        assert "first: the lock" not in output
        (lock,) = tmp_path.glob("*.locked.txt")
        lock.unlink()
        assert locked("first\nsecond\n")[0] == {"first": "2.0", "second": "2.0"}


OF_A_BACKEND = project_of("kernels", "1.0")
OF_A_BACKEND["backend.py"] = f"import torch\n{OF_A_BACKEND['backend.py']}"
OF_SETUP = {
    "setup.py": "import torch\nfrom setuptools import setup\nsetup(name='kernels', version='1.0')\n"
}


@pytest.mark.parametrize(("folder", "files"), [("kernels", OF_A_BACKEND), ("src", OF_SETUP)])
def test_what_imports_torch_to_be_built_is_named_and_built(
    docker_image: BuiltByCommand,
    build_tools: dict[str, bytes],
    cache: Path,
    tmp_path: Path,
    folder: str,
    files: dict[str, str],
) -> None:
    for name, text in below(folder, files).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "requirements.txt").write_text(f"./{folder}\n")
    with serving(Index(build_tools)) as server:
        settings = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": server.simple,
            "XDG_CACHE_HOME": str(cache),
        }
        done = extend(docker_image, tmp_path, settings, "-r", "requirements.txt")
        assert done.returncode != 0
        assert "No module named 'torch'" in done.stderr
        assert "--no-build-isolation kernels" in done.stderr
        done = extend(
            docker_image,
            tmp_path,
            settings,
            "-r",
            "requirements.txt",
            "--no-build-isolation",
            "kernels",
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["requirements"] == ["kernels==1.0"]


FROM_OURS = """\
FROM {base}
RUN echo 'alpha<2' > /tmp/own.txt
RUN pip install --no-cache-dir --index-url {index} torch==2.0.0 > /tmp/pip.txt 2>&1; \\
    echo $? > /tmp/pip.status
RUN uv pip install --default-index {index} torch==2.0.0 > /tmp/uv.txt 2>&1; \\
    echo $? > /tmp/uv.status
RUN uv pip install --default-index {index} -c /tmp/own.txt torch==2.0.0 > /tmp/c.txt 2>&1; \\
    echo $? > /tmp/c.status
RUN pip install --no-cache-dir --index-url {index} gamma \\
    && uv pip install --default-index {index} beta
RUN PIP_CONSTRAINT= pip install --dry-run --report /tmp/lifted.json --index-url {index} torch==2.0.0
RUN UV_CONSTRAINT= UV_NO_CONFIG=1 uv pip install --dry-run --default-index {index} torch==2.0.0
"""


def test_a_dockerfile_on_ours_keeps_torch_or_fails(
    image: BuiltByCommand, index: Index, tmp_path: Path
) -> None:
    index.files |= dict([wheel_of("torch", "2.0.0", "raise ImportError('another torch')\n")])
    (tmp_path / "Dockerfile").write_text(FROM_OURS.format(base=image.reference, index=index.simple))
    engine, tag = image.engine, f"trainworks-test/from-ours:{uuid.uuid4().hex[:12]}"
    request = BuildRequest(name="from-ours", context=tmp_path, tags=(tag,), network="host")
    engine.build(request, lambda _event: None)
    try:
        read = (
            "cd /tmp; cat pip.status pip.txt; echo; cat uv.status uv.txt c.status c.txt; head -c"
            " 300 lifted.json"
        )
        output = engine.run(tag, Job(command=("sh", "-c", read), timeout=120)).output
        listed = engine.run(tag, Job(command=("python", "-c", LISTING), timeout=120)).output
    finally:
        engine.remove(tag)
    assert output.startswith("1\n")
    assert "The user requested (constraint) torch==2.13.0+cpu" in output
    assert "\n1\n" in output
    # The second one has constraints of its own, which take the place of the variable's.
    assert output.count("you require torch==2.0.0 and torch==2.13.0+cpu") == 2
    document = json.loads(listed.splitlines()[-1])
    assert (document["torch"], document["gamma"], document["beta"]) == ("2.13.0+cpu", "1.0", "1.0")
