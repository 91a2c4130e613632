"""Resolves the requirements of an extension: they are installed in the base image, and the result is an answer."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from packaging.utils import canonicalize_name

from trainworks.assemble.image import ImageSpec, build_context
from trainworks.assemble.order import BuildOptions
from trainworks.engine import closed
from trainworks.engine.protocol import Engine
from trainworks.errors import BuildError, ExtendError, LockError
from trainworks.extend.kept import targets_for
from trainworks.extend.lock import parsed
from trainworks.extend.plan import ExtensionPlan
from trainworks.extend.render import LOCK
from trainworks.extend.requirements import ExtendedBase, ExtensionLock
from trainworks.extend.toolkit import Workbench, lacking
from trainworks.extend.wanted import Wanted
from trainworks.facts.rows import Facts, SourceFile, TargetRow
from trainworks.host.settings import HostSettings
from trainworks.plan.shares import library_names
from trainworks.terminal.build_progress import BuildProgress
from trainworks.terminal.output import say

PIP_SECRETS = ("pip.conf", "ca.pem", "netrc")
LINKS = "/run/links"
"""Where a stage finds the files of this machine's own folders of wheels."""

OPTIONS = re.compile(
    r"--(?:index-url|extra-index-url|find-links|no-index|trusted-host|pre|no-binary|only-binary)\b.*|-[if]\s.*"
)
"""Lines that say where packages come from: the lock has them too."""


def local_wheels(folders: Sequence[Path], base: ExtendedBase) -> Callable[[Path], tuple[str, ...]]:
    """Return what copies the wheels and archives of this machine's folders into a context, but for what is kept."""

    def copy(context: Path) -> tuple[str, ...]:
        found = []
        for path in sorted(path for folder in folders for path in folder.glob("*")):
            name = canonicalize_name(path.name.split("-")[0])
            if path.is_file() and path.name.endswith((".whl", ".tar.gz")) and name not in base.kept:
                shutil.copyfile(path, context / "wheels" / path.name)
                found.append(path.name)
        return tuple(found)

    return copy


def manifest_of(base: ExtendedBase, bench: Workbench, row: TargetRow | None, facts: Facts) -> dict[str, object]:
    """Return what the program reads of the base: what is kept, and what goes with that."""
    there = {canonicalize_name(row.name) for row in base.distributions}
    frameworks = [each for each in facts.components if {*each.python, *each.python_cpu} & there]
    return {
        "protected": dict(base.kept),
        "companions": {
            name: component.python[0]
            for component in frameworks
            for name in component.companions
            if component.python[0] in there and name not in there
        },
        "libraries": library_names(frameworks, there, facts),
        "wheel_index": row.wheel_index if row else "",
        "built_whole": list(bench.whole),
        **lacking(bench, base, facts),
    }


def order_of(
    wanted: Wanted, commits: Mapping[str, str], *, only_binary: Sequence[str], strict: bool
) -> dict[str, object]:
    """Return what the program in the stage is told beside files of requirements."""
    lines = [line.partition("  #@ ") for line in wanted.lines if OPTIONS.match(line)]
    return {
        "words": [f"--only-binary={name}" for name in only_binary],
        "options": [(line, place) for line, _, place in lines],
        "commits": dict(commits),
        "hashed": wanted.hashed,
        "strict": strict,
    }


def secrets_of(
    wanted: Wanted, settings: HostSettings, environment: Mapping[str, str]
) -> tuple[dict[str, bytes], tuple[Path, ...]]:
    """Return the secrets of a stage, and the folders of this machine with wheels."""
    content = settings.secrets("", "")
    secrets = {name: content[name] for name in PIP_SECRETS}
    links = (*settings.pip.local_folders, *(path for path in wanted.links if path.is_dir()))
    if links:
        lines = [line for line in secrets["pip.conf"].decode().splitlines() if not line.startswith("find-links")]
        found = " ".join([LINKS, *(link for link in settings.pip.find_links if "://" in link)])
        secrets["pip.conf"] = "".join(f"{line}\n" for line in (*lines, f"find-links = {found}")).encode()
    variables = (f"export {name}={shlex.quote(environment[name])}\n" for name in sorted(wanted.variables))
    return {**secrets, "variables": "".join(variables).encode()}, links


def files_of(wanted: Wanted) -> list[SourceFile]:
    """Return requirements that nothing has resolved yet; each time others, as what an index has is asked anew."""
    texts = {"requirements.txt": wanted.lines, "constraints.txt": wanted.constraints, "moment": [uuid4().hex]}
    return [SourceFile(path=name, content="\n".join([*lines, ""]).encode()) for name, lines in texts.items() if lines]


def resolve(spec: ImageSpec, plan: ExtensionPlan, engine: Engine, options: BuildOptions, facts: Facts) -> ExtensionLock:
    """Build an extension of requirements that have no lock, and return what was installed.

    Args:
        spec: The extension; its image is there even if this fails.
        plan: Its plan, without a lock.
        engine: What builds.
        options: How to build.
        facts: All facts.

    Raises:
        ExtendError: The base cannot give what a line asks for.
        LockError: No set of releases fits, or an index cannot be reached.
        BuildError: The wheel of a source cannot be built.
    """
    base, progress = plan.base, BuildProgress(verbose=options.verbose)
    say(f"  installing the requirements in {base.reference}")
    try:
        build_context(spec, {}, engine, replace(options, output=None), progress)
        # What it has of its base, `cat` for one, is another maker's.
        with engine.container(spec.tags[0], isolated=closed(engine)) as container:
            lock, why = parsed(container.run(("cat", f"/opt/trainworks/{LOCK}")).output)
    except BuildError as error:
        raise BuildError(error.message, hint=_advice(base) or error.hint) from error
    if refused := why.get("refused"):
        ways = targets_for(list(why["newer"].items()), base, facts) if why["newer"] else []
        hint = f"extend {' or '.join(ways)}; nothing was built" if ways else "nothing was built"
        raise ExtendError(refused, hint=hint)
    if why:
        log = why["log"]
        said = log[log.rfind("\nerror: ") :].strip() if "\nerror: " in log else log.strip()[-2000:]
        raise LockError(f"the requirements cannot be installed in {base.reference}:\n{said}", hint=_advice(base))
    for source in plan.sources:
        if source.name and source.name not in lock.local:
            raise BuildError(f"{source.origin} is not {source.name}, which the requirement names")
    return lock


def _advice(base: ExtendedBase) -> str:
    if base.compiler:
        return ""
    how = "add --apt g++ --apt python3-dev" if base.apt else "use a base that has one"
    return f"{base.reference} has no C compiler. If a build needs one: {how}"
