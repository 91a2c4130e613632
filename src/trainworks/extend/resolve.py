"""Resolves the requirements of an extension: they are installed in the base image, and the result is an answer."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from trainworks.assemble.image import ImageSpec, run_build
from trainworks.assemble.order import BuildOptions
from trainworks.engine import read_files
from trainworks.engine.protocol import Engine
from trainworks.errors import BuildError, ExtendError, LockError
from trainworks.extend.kept import targets_for
from trainworks.extend.lock import ExtensionLock
from trainworks.extend.plan import PROJECT_SOURCE, WheelSource
from trainworks.extend.render import INSTALLER, Installer, render_resolution
from trainworks.extend.requirements import ExtendedBase
from trainworks.extend.toolkit import Workbench
from trainworks.extend.wanted import Wanted
from trainworks.facts.data import data_folder
from trainworks.facts.rows import Facts, SourceFile, TargetRow
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.plan.shares import library_names
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.output import say

PIP_SECRETS = ("pip.conf", "ca.pem", "netrc")
APT_SECRETS = ("apt.conf", "sources.list")
LINKS = "/run/links"
"""Where a stage finds the files of this machine's own folders of wheels."""

OPTIONS = re.compile(r"--(?:index-url|extra-index-url|find-links|no-index|trusted-host|pre)\b.*|-[if]\s.*")
"""Lines that say where packages come from: the lock has them too."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where an extension is installed.

    Attributes:
        base: The image that is extended.
        apt: Debian packages of the extension.
        installer: What installs.
        recipes: Templates, by name.
        settings: Of this machine.
        secrets: Files that steps read.
        links: Folders of this machine with wheels.
    """

    base: ExtendedBase
    apt: tuple[str, ...]
    installer: Installer
    recipes: Mapping[str, str]
    settings: HostSettings
    secrets: Mapping[str, bytes] = field(repr=False)
    links: tuple[Path, ...] = ()

    def add_links(self, folder: Path) -> tuple[str, ...]:
        """Copy this machine's own wheels and archives into a context, but for what the base keeps."""
        found = []
        for path in sorted(path for link in self.links for path in link.glob("*")):
            name = re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower()
            if path.is_file() and path.name.endswith((".whl", ".tar.gz")) and name not in self.base.kept:
                shutil.copyfile(path, folder / "wheels" / path.name)
                found.append(path.name)
        return tuple(found)


def make_stage(
    base: ExtendedBase,
    wanted: Wanted,
    apt: tuple[str, ...],
    bench: Workbench,
    row: TargetRow | None,
    recipes: Mapping[str, str],
    settings: HostSettings,
    facts: Facts,
    root: Path,
    environment: Mapping[str, str],
) -> Stage:
    """Return where an extension is installed; raises ``OutputError`` where the program is not in the checkout."""
    there = {canonicalize_name(row.name) for row in base.distributions}
    manifest = {
        "protected": dict(base.kept),
        "companions": {
            companion: component.python[0]
            for component in facts.components
            if component.companions and component.python[0] in there
            for companion in component.companions
            if companion not in there
        },
        "libraries": library_names(
            [component for component in facts.components if {*component.python, *component.python_cpu} & there],
            there,
            facts,
        ),
        "wheel_index": row.wheel_index if row else "",
    }
    links = (*settings.pip.local_folders, *(path for path in wanted.links if path.is_dir()))
    names = (*PIP_SECRETS, *(APT_SECRETS if apt else ()))
    # Archives of this machine serve another suite of Debian, and no Ubuntu.
    content = settings.secrets(base.suite if base.distribution == "debian" else "", "")
    secrets = {name: content[name] for name in names}
    if links:
        secrets["pip.conf"] = _with_links(settings.pip, secrets["pip.conf"])
    variables = {name: environment[name] for name in sorted(wanted.variables)}
    secrets["variables"] = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()
    ).encode()
    return Stage(
        base=base,
        apt=apt,
        installer=Installer(
            program=(data_folder(root, "launcher") / INSTALLER).read_bytes(),
            manifest=manifest,
            uv=b"" if base.uv else Path(find_uv_bin()).read_bytes(),
            bench=bench,
        ),
        recipes=recipes,
        settings=settings,
        secrets=secrets,
        links=links,
    )


def _with_links(pip: PipSettings, text: bytes) -> bytes:
    lines = [line for line in text.decode().splitlines() if not line.startswith("find-links")]
    links = [LINKS, *(link for link in pip.find_links if "://" in link)]
    return "".join(f"{line}\n" for line in (*lines, f"find-links = {' '.join(links)}")).encode()


def texts_of(wanted: Wanted) -> list[SourceFile]:
    """Return the files of a stage's inputs: the requirements, and what they name."""
    texts = {"requirements.txt": wanted.lines, "constraints.txt": wanted.constraints}
    made = [SourceFile(path=name, content="\n".join([*lines, ""]).encode()) for name, lines in texts.items() if lines]
    return [*made, *wanted.files.values()]


def resolve(
    wanted: Wanted,
    sources: Sequence[WheelSource],
    commits: Mapping[str, str],
    stage: Stage,
    engine: Engine,
    options: BuildOptions,
    facts: Facts,
    *,
    only_binary: Sequence[str],
    strict: bool,
) -> ExtensionLock:
    """Return what is to be installed.

    Args:
        wanted: The requirements.
        sources: What wheels are built from.
        commits: Of those that are git repositories.
        stage: Where.
        engine: What builds.
        options: How to build.
        facts: All facts.
        only_binary: Names of which no source archive is built.
        strict: Whether lines of another build of the framework are refused.

    Raises:
        ExtendError: The base cannot give what a line asks for.
        LockError: No set of releases fits, or an index cannot be reached.
        BuildError: The wheel of a source cannot be built.
    """
    rendering = render_resolution(
        stage.base,
        stage.installer,
        stage.recipes,
        apt=stage.apt,
        sources=sources,
        wanted=texts_of(wanted),
        words=[f"--only-binary={name}" for name in only_binary],
        separate=wanted.hashed,
        strict=strict,
        moment=uuid4().hex,
    )
    name = f"trainworks/requirements:{uuid4().hex[:12]}"
    spec = ImageSpec(
        name=name,
        tags=(name,),
        rendering=rendering,
        settings=stage.settings,
        secrets=stage.secrets,
        add_files=stage.add_links,
        architecture=stage.base.architecture,
    )
    say(f"  installing the requirements in {stage.base.reference}, to see what they mean")
    try:
        run_build(spec, engine, replace(options, output=None), BuildProgress(verbose=options.verbose))
        out = read_files(engine, name)
    except BuildError as error:
        raise BuildError(error.message, hint=_advice(stage.base) or error.hint) from error
    finally:
        engine.remove(name)
    _raise_why(out, stage.base, facts)
    report = json.loads(out["report.json"])
    wheels = {line.split("/")[2]: parse_wheel_filename(line.split("/")[3]) for line in out["wheels"].splitlines()}
    for source in sources:
        built, version, _, _ = wheels[source.folder.rpartition("/")[2]]
        if source.name and built != source.name:
            raise BuildError(f"{source.origin} is {built} {version}, but the requirement names {source.name}")
    local = {name: report["installed"][name] for name in report["local"]}
    local |= {str(name): str(version) for name, version, _, _ in wheels.values()}
    project = [str(wheels[each.folder.rpartition("/")[2]][0]) for each in sources if each.origin == PROJECT_SOURCE]
    origin = [line.partition("  #@ ")[0] for line in wanted.lines if OPTIONS.match(line)]
    return ExtensionLock(
        pins="".join(f"{line}\n" for line in (*origin, *out.get("lock.txt", "").splitlines())),
        local=local,
        built=tuple(report["built"]),
        commits=commits,
        project="".join(project),
        complaints=tuple(report["complaints"]),
        notes=tuple(json.loads(out["status.json"])["said"]),
    )


def _raise_why(out: Mapping[str, str], base: ExtendedBase, facts: Facts) -> None:
    """Raise the error that an installation ended with, if it did."""
    status = json.loads(out.get("status.json", "{}"))
    if status.get("refused"):
        ways = targets_for(list(status["newer"].items()), base, facts) if status["newer"] else []
        hint = f"or extend {' or '.join(ways)}; nothing was built" if ways else "nothing was built"
        raise ExtendError(status["refused"], hint=hint)
    if status.get("status", 1) != 0:
        log = out.get("log", "")
        said = log[log.rfind("\nerror: ") :].strip() if "\nerror: " in log else log.strip()[-2000:]
        raise LockError(f"the requirements cannot be installed in {base.reference}:\n{said}", hint=_advice(base))


def _advice(base: ExtendedBase) -> str:
    if base.compiler:
        return ""
    how = "add --apt g++ --apt python3-dev" if base.apt else "use a base that has one"
    return f"{base.reference} has no C compiler. If a build needs one: {how}"
