"""Calls of uv, one after the other: what is asked for, then what lost a
requirement, then what does not work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from trainworks_launcher.programs.installing import pip_files
from trainworks_launcher.programs.installing.answer import Answer
from trainworks_launcher.programs.installing.environment import (
    MANIFEST,
    MANIFEST_VARIABLE,
    RefusedError,
    distributions,
    is_later,
    losing,
    normalised,
    versions,
)
from trainworks_launcher.programs.installing.inputs import SOURCES, Line, Reading, read_words

_CONSTRAINTS = "constraints.txt"
"""Beside the manifest: the image's own for pip and uv.

In an image built on ours another version may be installed.
"""


def settings_of_pip() -> Any:
    """Return what ``pip install`` would use. Raises RefusedError."""
    try:
        return pip_files.read_settings()
    except pip_files.SettingsError as error:
        raise RefusedError(str(error)) from error


def uv_settings_of_user() -> Path:
    """Return where uv would read the user's own settings."""
    return _user_settings() / "uv" / "uv.toml"


def _user_settings() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _without_uv_of_user(folder: Path) -> Path:
    """Return a folder that stands for the user's settings without uv's.

    They would change what is resolved on one machine and not on the next one.
    git and keyring read theirs there.
    """
    own = folder / "of-user"
    own.mkdir(exist_ok=True)
    try:
        entries = list(_user_settings().iterdir())
    except OSError:
        return own
    for entry in entries:
        link = own / entry.name
        if entry.name != "uv" and not link.is_symlink():
            link.symlink_to(entry.absolute())
    return own


def for_uv(pip: Any, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return what pip would use as variables and options of uv.

    What may have a password is in a file of this folder.

    Args:
        pip: pip's settings.
        folder: A private one.
    """
    _write_uv_settings(pip, folder)
    variables = _variables_of(pip, folder)
    for name, value in os.environ.items():
        if name.startswith("UV_"):
            variables[name] = value
    own_constraints = os.environ.get("UV_CONSTRAINT", "").split()
    variables["UV_CONSTRAINT"] = " ".join(_without_the_images(own_constraints))

    options = [f"--no-binary={name}" for name in sorted(pip.no_binary)]
    options += [f"--only-binary={name}" for name in sorted(pip.only_binary)]
    options += [f"--constraint={file}" for file in sorted(_without_the_images(pip.constraints))]
    if pip.target:
        options.append(f"--target={pip.target}")
    if pip.prefix:
        options.append(f"--prefix={pip.prefix}")
    if pip.no_deps:
        options.append("--no-deps")
    return variables, options


def _write_uv_settings(pip: Any, folder: Path) -> None:
    """Write pip's settings as a ``uv.toml``."""
    has_keyring = pip.keyring_provider != "disabled" and shutil.which("keyring")
    links = []
    for link in pip.find_links:
        is_address = "://" in link
        links.append(link if is_address else str(Path(link).expanduser().absolute()))
    settings: dict[str, object] = {
        "keyring-provider": "subprocess" if has_keyring else "disabled",
        "find-links": links,
        "allow-insecure-host": pip.trusted_hosts,
        "no-build-isolation": not pip.build_isolation,
        "no-index": pip.no_index,
    }
    if pip.pre:
        settings["prerelease"] = "allow"
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    for url in pip.extra_index_urls:
        text += f"\n[[index]]\nurl = {json.dumps(url)}\n"
    if pip.index_url:
        text += f"\n[[index]]\nurl = {json.dumps(pip.index_url)}\ndefault = true\n"

    # uv's place for a system's settings: those of a project count, too, and come first.
    file = folder / "settings" / "uv" / "uv.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def _variables_of(pip: Any, folder: Path) -> dict[str, str]:
    """Return pip's settings as variables of uv; a setting without a value is absent."""
    bundle = pip.cert
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        bundle = bundle or os.environ.get(name, "")
    variables = {
        "XDG_CONFIG_DIRS": str(folder / "settings"),
        "XDG_CONFIG_HOME": str(_without_uv_of_user(folder)),
        "UV_PROJECT": str(folder),
        "UV_NO_PROGRESS": "1",
        "UV_SYSTEM_CERTS": "1",
        "SSL_CERT_FILE": bundle,
        "SSL_CLIENT_CERT": pip.client_cert,
        "UV_HTTP_RETRIES": pip.retries,
        "HTTP_PROXY": pip.proxy,
        "HTTPS_PROXY": pip.proxy,
    }
    if pip.timeout:
        variables["UV_HTTP_TIMEOUT"] = str(math.ceil(float(pip.timeout)))
    if not os.access(str(Path.home()), os.W_OK):
        variables["UV_CACHE_DIR"] = str(folder / "cache")
    if pip.break_system_packages:
        variables["UV_BREAK_SYSTEM_PACKAGES"] = "1"
    if pip.extra_index_urls:
        # With several indexes pip asks all; with one only, uv says more of what is wrong with it.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in variables.items() if value}


def _without_the_images(constraints: Iterable[str]) -> list[str]:
    """Return files of constraints without the image's own: what is installed
    counts, and is a constraint already.
    """
    manifest = os.environ.get(MANIFEST_VARIABLE) or MANIFEST
    own = {str(Path(file).with_name(_CONSTRAINTS)) for file in (manifest, MANIFEST)}
    return [file for file in constraints if file not in own]


class Installation:
    """Calls of uv for this Python, one after the other.

    Attributes:
        python: The Python that is installed for.
        folder: A private one, for uv's files.
        before: The versions before the first one.
        pinned: Names of which a line of the user's own asks for one version.
        pip: The options that ``pip install`` would have.
    """

    def __init__(self, python: Any, uv: str, folder: Path) -> None:
        """folder: a private one, for uv's files."""
        self.python = python
        self.before = versions(python)
        self._lacking = losing(python)
        self._uv, self.folder = uv, folder
        self.pinned: set[str] = set()
        self.pip = settings_of_pip()
        variables, more = for_uv(self.pip, folder)
        self.environment = {**os.environ, **variables}
        self.options = more
        if "UV_CONFIG_FILE" not in os.environ and uv_settings_of_user().is_file():
            way = "name an index in pip's settings, and the rest in [tool.uv] of the project"
            python.say(f"{uv_settings_of_user()} is not used: {way}")
        self._kept: tuple[str, ...] = ()
        self._sources: tuple[str, ...] = ()

    def file(self, name: str, lines: Iterable[str]) -> str:
        """Write a file for uv, and return its path."""
        path = self.folder / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    def call(
        self, *words: str, quiet: bool = False, **more: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Call uv with pip's settings. quiet: what it says is shown where it succeeds only."""
        errors = subprocess.PIPE if quiet else None
        done = subprocess.run(
            (self._uv, *words), env=self.environment, check=False, stderr=errors, **more
        )
        if quiet and done.returncode == 0:
            sys.stderr.write(done.stderr.decode("utf-8", "replace"))
        return done

    def exported(self, file: Path, words: Sequence[str]) -> Path:
        """Return a ``uv.lock``, or the lock of a script, as a ``pylock.toml``:
        nothing is resolved, and nothing is run.

        Args:
            file: The lock of a project, or the script.
            words: Extras and groups.

        Raises:
            RefusedError: uv cannot read it.
        """
        target = self.folder / f"of-{file.stem}" / "pylock.toml"
        target.parent.mkdir(exist_ok=True)
        command = ["export"]
        if file.suffix == ".py":
            command += ["--script", str(file)]
        else:
            command += ["--project", str(file.parent.absolute())]
            command += ["--no-emit-project", "--no-default-groups"]
        command += ["--frozen", "--quiet", "--no-header"]
        command += ["--format", "pylock.toml", "--output-file", str(target)]
        done = self.call(*command, *words, quiet=True, stdout=subprocess.DEVNULL)
        if done.returncode:
            reason = done.stderr.decode("utf-8", "replace").strip()
            raise RefusedError(f"{file} cannot be read: {reason}")
        return target

    def install(self, *words: str, quiet: bool = False) -> int:
        """Install, and return uv's status."""
        return int(self.python.install(self, (*self.options, *words), quiet=quiet))

    def first(
        self, words: Sequence[str], answer: Answer, needs: Mapping[str, str], reading: Reading
    ) -> int:
        """Install what is asked for, without indexes of the user's file that do
        not answer, as pip does.

        Args:
            words: For uv.
            answer: Lines, and what is kept.
            needs: Names of what is compiled, to what compiles it.
            reading: What projects ask for themselves.

        Returns:
            uv's status.

        Raises:
            RefusedError: For what would be compiled, and cannot be.
        """
        # What a project has from a place of its own is there as a wheel, or is
        # built in another way.
        of_projects = [line for line in reading.looked_at if line.name not in reading.sources]
        kept = [f"{name}=={version}" for name, version in answer.kept.items()]
        self._kept = ("-c", self.file("kept.txt", kept)) if kept else ()
        excluded = ["--excludes", self.file("excluded.txt", sorted(answer.excluded))]
        if answer.freed:
            excluded += ["--overrides", self.file("freed.txt", answer.freed)]
        lines = answer.lines
        self.pinned = {line.name for line in lines if line.name and _is_pin(line.wanted)}
        indexes = [
            line for line in lines if line.text.startswith(SOURCES[1:]) and "://" in line.text
        ]
        if any(line.text.startswith(SOURCES[1]) for line in indexes):
            self.environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        while True:
            requirements = [line.text for line in lines if not line.constraint]
            limits = [line.text for line in lines if line.constraint]
            options = [line.text for line in lines if line.text.startswith("--")]
            self._sources = ("-r", self.file("sources.txt", options)) if options else ()
            files = []
            if lines:
                files += ["-r", self.file("wanted.txt", requirements)]
            if limits:
                files += ["-c", self.file("limits.txt", limits)]
            compiled = [line for line in (*lines, *of_projects) if line.name in needs]
            self._refuse_compiled(compiled, options, needs)
            status = self.install(*words, *files, *excluded, *self._kept)
            if status == 0:
                return status

            tried = [line for line in indexes if line in lines]
            dead = [line for line in tried if not self._answers(line.text.split(" ")[1])]
            if not dead:
                return status
            for line in dead:
                self.python.say(
                    f"{line.place}: {_plain(line.text)} does not answer:"
                    " it is left out, as pip does"
                )
                answer.left.append(line.place)
            lines = [line for line in lines if line not in dead]

    def _refuse_compiled(
        self, lines: Sequence[Line], options: Sequence[str], needs: Mapping[str, str]
    ) -> None:
        """Raise RefusedError for lines whose distributions have no wheel, and
        whose compiler is not there.
        """
        refused = []
        target = str(self.folder / "none")
        dry_run = ("--dry-run", "--no-deps", "--only-binary=:all:", "--target", target)
        for line in lines:
            if line.wanted.url or line.constraint:
                continue
            one = self.file("one.txt", [*options, re.sub(r" --hash=.*", "", line.text)])
            if self.python.lacks_wheel(self, (*dry_run, "-r", one)):
                name = needs[line.name]
                refused.append(
                    f"{line.place}: {line.name} is compiled by {name}, which is not there, and no"
                    f" wheel fits; use `--with {name}` on a target of CUDA 13, name the address of"
                    " a wheel, or leave it out"
                )
        if refused:
            raise RefusedError(*refused)

    def _answers(self, address: str) -> bool:
        """Whether a package index can be reached: any answer counts."""
        proxy = self.pip.proxy
        proxies = urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None)
        try:
            urllib.request.build_opener(proxies).open(_plain(address), timeout=20).close()
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError) as error:
            return isinstance(getattr(error, "reason", None), ssl.SSLError)
        return True

    def mend(self, answer: Answer, companions: Mapping[str, str]) -> None:
        """Let what lost its requirements move, too: wheels only, as nobody asked for it.

        Raises RefusedError for what the image keeps, and for what the user's
        own lines ask for in just this version.
        """
        tried: set[str] = set()
        while True:
            unmet = losing(self.python)
            installed = distributions(self.python)
            new = sorted(unmet.keys() - self._lacking - tried)
            tried.update(new)
            # A project of the user's own stays, and a line said what it does not get.
            lost = [name for name in new if not _is_of_a_folder(installed[name])]
            if not lost:
                return
            for name in lost:
                version, requirement = installed[name].version, unmet[name]
                need = f"{requirement.name}{requirement.specifier}"
                if name in answer.kept:
                    raise RefusedError(
                        f"the requirements take from this image's {name} {version}"
                        f" what it requires ({need}); ask for other versions"
                    )
                have = answer.kept.get(normalised(requirement.name), "")
                if have and name in self.pinned and name not in companions:
                    raise RefusedError(
                        f"{name} {version} requires {need},"
                        f" and this image has {requirement.name} {have};"
                        f" ask for a version of {name} that fits {have},"
                        f" or choose an image with {need}"
                    )
            if self.moved(lost):
                continue
            for name in lost:
                if not self.moved([name]):
                    need = f"{unmet[name].name}{unmet[name].specifier}"
                    self.python.say(
                        f"{name} {installed[name].version} stays,"
                        f" and does not go with the requirements: it requires {need}"
                    )

    def moved(self, wanted: Sequence[str], *more: str) -> bool:
        """Ask for distributions beside what was brought, which stays as it is.

        Return whether that went.
        """
        names = [re.split("[<=]", requirement)[0] for requirement in wanted]
        brought = []
        for name, version in versions(self.python).items():
            if name not in names and self.before.get(name) != version:
                brought.append(f"{name}=={version}")
        limits = (*self._sources, *self._kept, "-c", self.file("brought.txt", brought))
        only = [f"--only-binary={name}" for name in names]
        return self.install(*wanted, *only, *more, *limits, quiet=True) == 0


def _is_of_a_folder(distribution: Any) -> bool:
    """Return whether a distribution was installed from a folder, as a user's own project is."""
    return '"dir_info"' in (distribution.read_text("direct_url.json") or "")


def _is_pin(wanted: Any) -> bool:
    if wanted.url:
        return True
    return any(limit.operator.startswith("==") for limit in wanted.specifier)


def _plain(address: str) -> str:
    return re.sub(r"(://)[^/@]*@", r"\1", address)


def modules_of(python: Any, name: str) -> list[str]:
    """Return the top modules of a distribution that has compiled code; none for another."""
    files = distributions(python)[name].files or ()
    paths = {str(file) for file in files}
    modules = set()
    for file in files:
        top = file.parts[0].split(".")[0]
        if file.suffix == ".so" and top.isidentifier() and f"{top}/__init__.py" in paths:
            modules.add(top)
    return sorted(modules)


def look_at_companions(manifest: Mapping[str, Any], installation: Installation) -> None:
    """Import what was compiled against what the image keeps.

    Raise RefusedError where that fails.
    """
    python, before = installation.python, installation.before
    after = versions(python)
    index = manifest.get("wheel_index", "")
    has_source = installation.pip.names_a_source
    for name, framework in manifest.get("companions", {}).items():
        if after.get(name) == before.get(name):
            continue
        module = name.replace("-", "_")
        error = python.import_error((module,))
        if error and index and not has_source:
            python.say(f"{name} is taken from {index}, which has the build for this image")
            installation.environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
            installation.moved([name], f"--reinstall-package={name}", f"--index={index}")
            error = python.import_error((module,))
        if error:
            advice = "ask for a build that fits"
            if index:
                advice = f"add --extra-index-url {index} to the requirements file"
            raise RefusedError(
                f"{name} {versions(python).get(name, '')} does not work with this image's"
                f" {framework} {after[framework]} ({error}); {advice}, or remove it"
            )


def look_at_older(installation: Installation) -> None:
    """Take an older release of what fails beside what went back, as pyarrow
    does beside numpy 1: no metadata say it.
    """
    python, before = installation.python, installation.before
    after = versions(python)
    back = [name for name, old in before.items() if is_later(old, after.get(name, old))]
    if not back:
        return
    for name in after:
        if after[name] == before.get(name) or name in back:
            continue
        modules = modules_of(python, name)
        error = python.import_error(modules) if modules else ""
        if not any(other in error.lower() for other in back):
            continue
        works = _older_that_works(name, after[name], modules, installation)
        if works and name not in installation.pinned:
            python.say(
                f"{name} {after[name]} cannot be imported beside the requirements ({error}):"
                f" {works} is taken"
            )
            continue
        installation.moved([f"{name}=={after[name]}"])
        advice = f"; {name}=={works} works" if works else ""
        python.say(
            f"warning: {name} {after[name]} cannot be imported beside the requirements"
            f" ({error}){advice}"
        )


def _older_that_works(
    name: str, version: str, modules: Sequence[str], installation: Installation
) -> str:
    """Install older releases of a distribution until one can be imported, and return its version.

    ``""`` if none of the last four major versions can be.
    """
    python = installation.python
    digits = re.match(r"\d+", version)
    major = int(digits.group()) if digits else 0
    for limit in range(major, max(major - 4, 0), -1):
        if not installation.moved([f"{name}<{limit}"]):
            continue
        if not python.import_error(modules):
            return versions(python)[name]
    return ""


class Task:
    """An installation whose files are read and answered.

    Attributes:
        reading: What is asked for.
        answer: What of it is answered with what the image has.
        installation: Calls of uv; None where there is none.
    """

    def __init__(
        self, python: Any, given: argparse.Namespace, words: Sequence[str], folder: Path
    ) -> None:
        """Read and answer.

        Args:
            python: The Python that is installed for.
            given: The manifest, whether the answer may change a line (``strict``), and what is kept
                without a manifest (``keep``).
            words: Of the installation.
            folder: A private one.

        Raises:
            RefusedError: A line cannot be read, or asks for what the image cannot give.
        """
        self._manifest: Mapping[str, Any]
        if given.manifest.is_file():
            self._manifest = json.loads(given.manifest.read_text(encoding="utf-8"))
        else:
            self._manifest = {"protected": dict(row.split("==", 1) for row in given.keep)}
        self._words, self._folder = words, folder
        self._python = python
        uv = python.uv()
        self.installation = Installation(python, uv, folder) if uv else None
        self.reading = read_words(python, words, self.installation)
        self.answer = Answer(self._manifest, self.reading)
        for note in self.answer.said:
            python.say(note)
        if self.answer.said and given.strict:
            raise RefusedError("--strict: lines are not answered with what the image has")

    def run(self, *more: str) -> int:
        """Install what is asked for, and these; return the installer's status.

        Raises RefusedError.
        """
        if self.installation is None:
            return self._by_pip()
        manifest, installation = self._manifest, self.installation
        installation.options += sorted(self.reading.options)
        for name in manifest.get("built_whole", ()):
            installation.options.append(f"--no-build-isolation-package={name}")
        for name in self.answer.without_source:
            installation.options.append(f"--no-sources-package={name}")
        if self.reading.project is not None:
            installation.environment["UV_PROJECT"] = str(self.reading.project)
        words = [*self.reading.words, *more]
        status = installation.first(words, self.answer, manifest.get("needs", {}), self.reading)
        if status:
            return status
        installation.mend(self.answer, manifest.get("companions", {}))
        look_at_companions(manifest, installation)
        look_at_older(installation)
        after = versions(self._python)
        for name, old in sorted(installation.before.items()):
            if after.get(name) != old:
                self._python.say(f"{name} {old} -> {after.get(name, 'removed')}")
        for name, component in manifest.get("compiled_by", {}).items():
            if after.get(name) != installation.before.get(name):
                problem = (
                    f"{name} may compile code for GPUs when it is first used,"
                    f" and this image has no {component}"
                )
                self._python.say(
                    f"warning: {problem}: take an image that was built --with {component}"
                )
        return 0

    def _by_pip(self) -> int:
        self._python.say(
            "this image has no uv: pip installs,"
            " and what of the image loses a requirement is not looked after"
        )
        kept = self._folder / "kept.txt"
        rows = [f"{name}=={version}\n" for name, version in self.answer.kept.items()]
        kept.write_text("".join(rows), encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
        own = _without_the_images(os.environ.get("PIP_CONSTRAINT", "").split())
        environment = {**os.environ, "PIP_CONSTRAINT": " ".join(own)}
        done = subprocess.run((*pip, *self._words, "-c", str(kept)), env=environment, check=False)
        return done.returncode
