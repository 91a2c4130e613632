"""Install with uv: first the requested requirements, then newer versions of packages that lost a
requirement, then replacements for packages that cannot be imported.
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
    normalised,
    unmet_requirements,
    versions,
)
from trainworks_launcher.programs.installing.inputs import SOURCES, Line, Reading, read_words

_CONSTRAINTS = "constraints.txt"
"""The image's own constraints for pip and uv, beside the manifest.

An image that is built on ours may have another version installed.
"""


_INDEX_SECONDS = 20
"""Limit of the wait for an index."""

_MAX_OLDER_MAJORS = 4
"""Major versions of a package that are tried in place of one that cannot be imported."""


def settings_of_pip() -> Any:
    """Return the settings of ``pip install``; runs ``pip config``, if there is a pip.

    Raises RefusedError if pip cannot read them.
    """
    try:
        return pip_files.read_settings()
    except pip_files.SettingsError as error:
        raise RefusedError(str(error)) from error


def uv_settings_of_user() -> Path:
    """Return the path of the user's own settings of uv."""
    return _user_settings() / "uv" / "uv.toml"


def _user_settings() -> Path:
    """Return the folder of this user's settings, by default ``~/.config``."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _without_uv_of_user(folder: Path) -> Path:
    """Make a folder with links to the user's settings, except those of uv; return its path.

    uv's would change the resolution on one machine and not on the next one. git and keyring read
    their settings in this folder.

    Args:
        folder: A private folder, for the new one.
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
    """Convert pip's settings to variables and options of uv.

    Settings that may have a password are written to a file.

    Args:
        pip: pip's settings.
        folder: A private folder for the file.

    Returns:
        The variables, and the options of ``uv pip install``. Variables of uv that are set already
        win over pip's settings.
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
    """Write pip's settings as a ``uv.toml``, which only this user can read. Raises OSError.

    Args:
        pip: pip's settings.
        folder: A private folder: the file is ``settings/uv/uv.toml`` there.
    """
    has_keyring = pip.keyring_provider != "disabled" and shutil.which("keyring")
    links = []
    for link in pip.find_links:
        if "://" not in link:
            link = str(Path(link).expanduser().absolute())
        links.append(link)
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

    # uv's place for a system's settings: settings of a project also count, and come first.
    file = folder / "settings" / "uv" / "uv.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def _variables_of(pip: Any, folder: Path) -> dict[str, str]:
    """Convert pip's settings to variables of uv; a setting without a value is absent."""
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
        # pip asks all of several indexes. With a single one, uv's own strategy has better errors.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in variables.items() if value}


def _without_the_images(constraints: Iterable[str]) -> list[str]:
    """Return the paths of constraints files without the image's own.

    The installed versions are constraints already, and may be newer ones.
    """
    manifest = os.environ.get(MANIFEST_VARIABLE) or MANIFEST
    own = {str(Path(file).with_name(_CONSTRAINTS)) for file in (manifest, MANIFEST)}
    return [file for file in constraints if file not in own]


class Installation:
    """Installs with uv for one Python, in several calls.

    Attributes:
        python: The Python that gets the packages.
        folder: A private folder for uv's files.
        before: The versions before the first call.
        pinned: Names for which a line of the user requests one version.
        pip: The settings of ``pip install``.
        environment: The variables of uv.
        options: The options of uv.
    """

    def __init__(self, python: Any, uv: str, folder: Path) -> None:
        """Read pip's settings and the installed versions; install nothing yet.

        Prints a line if the user has settings of uv, which are not used.

        Args:
            python: The Python that gets the packages.
            uv: Path of uv.
            folder: A private folder for uv's files.

        Raises:
            RefusedError: pip cannot read its settings.
        """
        self.python = python
        self.before = versions(python)
        self._broken_before = unmet_requirements(python)
        self._uv, self.folder = uv, folder
        self.pinned: set[str] = set()
        self.pip = settings_of_pip()
        variables, options = for_uv(self.pip, folder)
        self.environment = {**os.environ, **variables}
        self.options = options
        if "UV_CONFIG_FILE" not in os.environ and uv_settings_of_user().is_file():
            advice = "name an index in pip's settings, and the rest in [tool.uv] of the project"
            python.say(f"{uv_settings_of_user()} is not used: {advice}")
        self._image_constraints: tuple[str, ...] = ()
        self._sources: tuple[str, ...] = ()

    def file(self, name: str, lines: Iterable[str]) -> str:
        """Write a file of lines for uv, in place of an earlier one; return the path."""
        path = self.folder / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    def call(
        self, *words: str, quiet: bool = False, **more: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run uv with pip's settings, and wait for it.

        Args:
            words: uv's arguments.
            quiet: Whether its standard error is kept: it is printed if uv succeeds, else it is in
                the result.
            more: Further parameters of ``subprocess.run``.
        """
        errors = subprocess.PIPE if quiet else None
        done = subprocess.run(
            (self._uv, *words), env=self.environment, check=False, stderr=errors, **more
        )
        if quiet and done.returncode == 0:
            sys.stderr.write(done.stderr.decode("utf-8", "replace"))
        return done

    def export_lock(self, file: Path, words: Sequence[str]) -> Path:
        """Convert a ``uv.lock``, or the lock of a script, to a ``pylock.toml``.

        uv resolves nothing and runs nothing for that.

        Args:
            file: The lock of a project, or the script.
            words: Options for extras and groups.

        Raises:
            RefusedError: uv cannot read the lock.
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
        """Install packages with the options of this run; return uv's exit status."""
        return int(self.python.install(self, (*self.options, *words), quiet=quiet))

    def install_requested(
        self, words: Sequence[str], answer: Answer, needs: Mapping[str, str], reading: Reading
    ) -> int:
        """Install the requested requirements.

        If uv fails, it is called again without indexes of the user's files that do not answer: pip
        leaves those out, too. Each is printed, and added to ``answer.left``. Files with the
        constraints are written for this call and later ones.

        Args:
            words: Words for uv.
            answer: The lines, and the constraints of the image.
            needs: Name of a package that is compiled -> the component that compiles it.
            reading: The requirements of projects.

        Returns:
            uv's status.

        Raises:
            RefusedError: A package has to be compiled, and cannot be.
        """
        # A project's requirement with a source of its own has a wheel there, or a build of its own.
        project_lines = [line for line in reading.project_lines if line.name not in reading.sources]
        constraints = [f"{name}=={version}" for name, version in answer.kept.items()]
        if constraints:
            self._image_constraints = ("-c", self.file("kept.txt", constraints))
        else:
            self._image_constraints = ()
        excluded = ["--excludes", self.file("excluded.txt", sorted(answer.excluded))]
        if answer.freed:
            excluded += ["--overrides", self.file("freed.txt", answer.freed)]
        lines = answer.lines
        self.pinned = {line.name for line in lines if line.name and _is_pin(line.requirement)}
        index_lines = _index_lines(lines)
        if any(line.text.startswith(SOURCES[1]) for line in index_lines):
            # pip asks all indexes; uv by default only the first one that has the package.
            self.environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        while True:
            options = [line.text for line in lines if line.text.startswith("--")]
            self._sources = ("-r", self.file("sources.txt", options)) if options else ()
            compiled = [line for line in (*lines, *project_lines) if line.name in needs]
            self._refuse_compiled(compiled, options, needs)
            files = self._files_of(lines)
            status = self.install(*words, *files, *excluded, *self._image_constraints)
            if status == 0:
                return status

            dead = self._dead_indexes([line for line in index_lines if line in lines])
            if not dead:
                return status
            for line in dead:
                self.python.say(
                    f"{line.place}: {_without_login(line.text)} does not answer:"
                    " it is left out, as pip does"
                )
                answer.left.append(line.place)
            lines = [line for line in lines if line not in dead]

    def _files_of(self, lines: Sequence[Line]) -> list[str]:
        """Write requirements and constraints to files; return uv's options for the files."""
        requirements = [line.text for line in lines if not line.constraint]
        constraints = [line.text for line in lines if line.constraint]
        options: list[str] = []
        if lines:
            options += ["-r", self.file("wanted.txt", requirements)]
        if constraints:
            options += ["-c", self.file("limits.txt", constraints)]
        return options

    def _dead_indexes(self, lines: Sequence[Line]) -> list[Line]:
        """Return the lines of indexes that do not answer; each is asked, for up to 20 seconds."""
        return [line for line in lines if not self._can_reach(line.text.split(" ")[1])]

    def _refuse_compiled(
        self, lines: Sequence[Line], options: Sequence[str], needs: Mapping[str, str]
    ) -> None:
        """Raise RefusedError for lines without a wheel, which would need a missing compiler.

        uv resolves each line without a download.

        Args:
            lines: Lines of packages that are compiled.
            options: Lines of options, such as indexes.
            needs: Name of a package -> the component that compiles it.
        """
        refused = []
        target = str(self.folder / "none")
        dry_run = ("--dry-run", "--no-deps", "--only-binary=:all:", "--target", target)
        for line in lines:
            if line.requirement.url or line.constraint:
                continue
            # A hash of the source would not fit a wheel.
            requirement = re.sub(r" --hash=.*", "", line.text)
            file = self.file("one.txt", [*options, requirement])
            if self.python.lacks_wheel(self, (*dry_run, "-r", file)):
                component = needs[line.name]
                refused.append(
                    f"{line.place}: {line.name} is compiled by {component}, which is not there,"
                    f" and no wheel fits; use `--with {component}` on a target of CUDA 13, name the"
                    " address of a wheel, or leave it out"
                )
        if refused:
            raise RefusedError(*refused)

    def _can_reach(self, address: str) -> bool:
        """Return whether a package index answers within 20 seconds.

        Any answer counts, also a refusal, and a certificate that is not trusted.
        """
        proxy = self.pip.proxy
        # Without a proxy of pip's, that of the variables counts.
        proxies = {"http": proxy, "https": proxy} if proxy else None
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
            opener.open(_without_login(address), timeout=_INDEX_SECONDS).close()
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError) as error:
            return isinstance(getattr(error, "reason", None), ssl.SSLError)
        return True

    def repair(self, answer: Answer, companions: Mapping[str, str]) -> None:
        """Install other versions of packages that lost a requirement.

        From wheels only, because the user has not requested these packages. A package without a
        version that fits stays as it is, and a line says so.

        Args:
            answer: The versions that the image keeps.
            companions: Name of a package compiled against a framework -> the framework.

        Raises:
            RefusedError: A package lost a requirement, and the image keeps it, or a line of the
                user requests just this version.
        """
        tried: set[str] = set()
        # Again, until no package has newly lost a requirement: a repair may break another one.
        while True:
            unmet = unmet_requirements(self.python)
            installed = distributions(self.python)
            new = sorted(unmet.keys() - self._broken_before - tried)
            tried.update(new)
            # A project of the user stays; a line has told which requirement it does not get.
            broken = [name for name in new if not _is_of_a_folder(installed[name])]
            if not broken:
                return
            for name in broken:
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
            if self.install_beside(broken):
                continue
            # Not all together: try them one by one.
            for name in broken:
                if not self.install_beside([name]):
                    need = f"{unmet[name].name}{unmet[name].specifier}"
                    self.python.say(
                        f"{name} {installed[name].version} stays,"
                        f" and does not go with the requirements: it requires {need}"
                    )

    def install_beside(self, requirements: Sequence[str], *more: str) -> bool:
        """Install requirements without a change of packages that earlier calls have installed.

        From wheels only, and without output unless uv succeeds.

        Args:
            requirements: For example ``["numpy<2"]``; packages of these names may change.
            more: Further options of uv.

        Returns:
            Whether uv succeeded.
        """
        names = [re.split("[<=]", requirement)[0] for requirement in requirements]
        installed_before = []
        for name, version in versions(self.python).items():
            if name not in names and self.before.get(name) != version:
                installed_before.append(f"{name}=={version}")
        constraints = ("-c", self.file("brought.txt", installed_before))
        options = [f"--only-binary={name}" for name in names]
        options += [*more, *self._sources, *self._image_constraints, *constraints]
        return self.install(*requirements, *options, quiet=True) == 0


def _index_lines(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that name a further index, or a page of links, by an address.

    The default index (``--index-url``) is not one of them: without it nothing can be installed.
    """
    options = SOURCES[1:]
    return [line for line in lines if line.text.startswith(options) and "://" in line.text]


def _is_of_a_folder(distribution: Any) -> bool:
    """Return whether a distribution was installed from a folder, as a user's own project is."""
    return '"dir_info"' in (distribution.read_text("direct_url.json") or "")


def _is_pin(requirement: Any) -> bool:
    """Return whether a requirement allows one version only."""
    if requirement.url:
        return True
    return any(limit.operator.startswith("==") for limit in requirement.specifier)


def _without_login(address: str) -> str:
    """Return an address without its user and password, which must not get into the log."""
    return re.sub(r"(://)[^/@]*@", r"\1", address)


def modules_of(python: Any, name: str) -> list[str]:
    """Return the names of the top modules of a distribution that have compiled code.

    ``[]`` for a distribution of Python files only.
    """
    files = distributions(python)[name].files or ()
    paths = {str(file) for file in files}
    modules = set()
    for file in files:
        top = file.parts[0].split(".")[0]
        if file.suffix == ".so" and top.isidentifier() and f"{top}/__init__.py" in paths:
            modules.add(top)
    return sorted(modules)


def check_companions(manifest: Mapping[str, Any], installation: Installation) -> None:
    """Import new versions of packages that are compiled against a framework of the image.

    A package that cannot be imported is installed again from the image's own index, unless the
    user's settings name a source.

    Raises:
        RefusedError: A package cannot be imported all the same.
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
            installation.install_beside([name], f"--reinstall-package={name}", f"--index={index}")
            error = python.import_error((module,))
        if error:
            advice = "ask for a build that fits"
            if index:
                advice = f"add --extra-index-url {index} to the requirements file"
            raise RefusedError(
                f"{name} {versions(python).get(name, '')} does not work with this image's"
                f" {framework} {after[framework]} ({error}); {advice}, or remove it"
            )


def replace_incompatible(installation: Installation) -> None:
    """Replace new packages that cannot be imported beside an older version of another one.

    For example pyarrow beside numpy 1: their metadata do not exclude that. Each is replaced by an
    older release that can be imported, and printed. If there is none, or if the user requests this
    version, it stays, with a warning.
    """
    python, before = installation.python, installation.before
    after = versions(python)
    downgraded = [name for name, old in before.items() if is_later(old, after.get(name, old))]
    if not downgraded:
        return
    for name in after:
        if after[name] == before.get(name) or name in downgraded:
            continue
        modules = modules_of(python, name)
        error = python.import_error(modules) if modules else ""
        if not any(other in error.lower() for other in downgraded):
            continue
        works = _install_older(name, after[name], modules, installation)
        if works and name not in installation.pinned:
            python.say(
                f"{name} {after[name]} cannot be imported beside the requirements ({error}):"
                f" {works} is taken"
            )
            continue
        # No older release works, or the user requests this one: it stays.
        installation.install_beside([f"{name}=={after[name]}"])
        advice = f"; {name}=={works} works" if works else ""
        python.say(
            f"warning: {name} {after[name]} cannot be imported beside the requirements"
            f" ({error}){advice}"
        )


def _install_older(
    name: str, version: str, modules: Sequence[str], installation: Installation
) -> str:
    """Install older releases of a distribution until one can be imported.

    Returns:
        Its version; ``""`` if no release of the last four major versions can be imported.
    """
    python = installation.python
    digits = re.match(r"\d+", version)
    major = int(digits.group()) if digits else 0
    for limit in range(major, max(major - _MAX_OLDER_MAJORS, 0), -1):
        if not installation.install_beside([f"{name}<{limit}"]):
            continue
        if not python.import_error(modules):
            return versions(python)[name]
    return ""


class Task:
    """One run of install.py.

    Attributes:
        reading: The requested requirements.
        answer: The lines for uv, and the versions that the image keeps.
        installation: Calls of uv; None without uv.
    """

    def __init__(
        self, python: Any, options: argparse.Namespace, words: Sequence[str], folder: Path
    ) -> None:
        """Read the requirements, and adapt the lines to the image.

        Args:
            python: The Python that gets the packages.
            options: The manifest, whether a changed line is refused (``strict``), and the kept
                versions of an image without a manifest (``keep``).
            words: The words of ``pip install``.
            folder: A private folder.

        Raises:
            RefusedError: A line cannot be read, or conflicts with the image.
        """
        self._manifest: Mapping[str, Any]
        if options.manifest.is_file():
            self._manifest = json.loads(options.manifest.read_text(encoding="utf-8"))
        else:
            kept = dict(row.split("==", 1) for row in options.keep)
            self._manifest = {"protected": kept}
        self._words, self._folder = words, folder
        self._python = python
        uv = python.uv()
        self.installation = Installation(python, uv, folder) if uv else None
        self.reading = read_words(python, words, self.installation)
        self.answer = Answer(self._manifest, self.reading)
        for note in self.answer.notes:
            python.say(note)
        if self.answer.notes and options.strict:
            raise RefusedError("--strict: lines are not answered with what the image has")

    def run(self, *more: str) -> int:
        """Install the requested requirements, repair the image's packages, and log the changes.

        Args:
            more: Further words for uv.

        Returns:
            The installer's status; after a failure nothing is repaired.

        Raises:
            RefusedError: The requirements conflict with the image.
        """
        if self.installation is None:
            return self._install_by_pip()
        manifest, installation = self._manifest, self.installation
        installation.options += sorted(self.reading.options)
        for name in manifest.get("built_whole", ()):
            installation.options.append(f"--no-build-isolation-package={name}")
        for name in self.answer.without_source:
            installation.options.append(f"--no-sources-package={name}")
        if self.reading.project is not None:
            installation.environment["UV_PROJECT"] = str(self.reading.project)
        words = [*self.reading.words, *more]
        needs = manifest.get("needs", {})
        status = installation.install_requested(words, self.answer, needs, self.reading)
        if status:
            return status
        installation.repair(self.answer, manifest.get("companions", {}))
        check_companions(manifest, installation)
        replace_incompatible(installation)
        self._report(installation)
        return 0

    def _report(self, installation: Installation) -> None:
        """Log the changed versions, and packages that lack a compiler."""
        after = versions(self._python)
        for name, old in sorted(installation.before.items()):
            if after.get(name) != old:
                self._python.say(f"{name} {old} -> {after.get(name, 'removed')}")
        for name, component in self._manifest.get("compiled_by", {}).items():
            if after.get(name) != installation.before.get(name):
                problem = (
                    f"{name} may compile code for GPUs when it is first used,"
                    f" and this image has no {component}"
                )
                self._python.say(
                    f"warning: {problem}: take an image that was built --with {component}"
                )

    def _install_by_pip(self) -> int:
        """Install the words with pip, and the kept packages as constraints; return its status.

        For an image without uv. Prints that packages which lose a requirement are not replaced.
        """
        self._python.say(
            "this image has no uv: pip installs,"
            " and what of the image loses a requirement is not looked after"
        )
        constraints = self._folder / "kept.txt"
        rows = [f"{name}=={version}\n" for name, version in self.answer.kept.items()]
        constraints.write_text("".join(rows), encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
        own = _without_the_images(os.environ.get("PIP_CONSTRAINT", "").split())
        environment = {**os.environ, "PIP_CONSTRAINT": " ".join(own)}
        done = subprocess.run(
            (*pip, *self._words, "-c", str(constraints)), env=environment, check=False
        )
        return done.returncode
