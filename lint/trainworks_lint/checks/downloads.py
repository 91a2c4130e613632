"""Downloads of a build, and whether their content is checked and pinned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainworks_lint.document import Document, Instruction
from trainworks_lint.findings import Hit, masked
from trainworks_lint.shell import SHELLS, Command, Word

ADDRESS = re.compile(r"\b(?:https?|ftp)://[^\s'\"]+", re.IGNORECASE)
LOCAL = re.compile(r"://(?:localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0|169\.254\.\d+\.\d+)(?=[:/]|$)")
COMMIT = re.compile(r"[0-9a-f]{7,64}", re.IGNORECASE)
MOVING_NAMES = frozenset(
    {"main", "master", "head", "develop", "development", "dev", "trunk", "default", "nightly", "latest", "next"}
)
SEARCHERS = frozenset({"grep", "egrep", "fgrep"})
MOVING_ADDRESS = re.compile(
    r"(?:raw\.githubusercontent\.com/[^/\s]+/[^/\s]+|github\.com/[^/\s]+/[^/\s]+/(?:raw|blob|archive))/"
    r"(?:refs/heads/[^/\s]+|(?:main|master|HEAD|develop|trunk)(?=[/.]))"
)
DIGESTS = frozenset({"sha256sum", "sha384sum", "sha512sum", "b2sum", "shasum", "gpgv", "minisign", "cosign"})

# Options of curl and wget that take the next word as their value; only the common ones.
CURL_VALUES = "oHAbcCdeEFKmrTuUwxXyYz"
CURL_LONG_VALUES = frozenset(
    {
        *("--output", "--header", "--user-agent", "--cacert", "--cert", "--key", "--retry", "--retry-delay"),
        *("--retry-max-time", "--max-time", "--connect-timeout", "--proto", "--proto-redir", "--proxy", "--user"),
        *("--output-dir", "--write-out", "--config", "--netrc-file", "--range", "--request", "--referer"),
    }
)
WGET_VALUES = frozenset({"-O", "-P", "-o", "-t", "-T", "-U", "--output-document", "--directory-prefix", "--tries"})


def install_arguments(command: Command) -> tuple[Word, ...] | None:
    """Return what follows ``pip install`` in any of its spellings; None where the command is another."""
    words = command.own_words
    values = [word.value for word in words]
    if re.fullmatch(r"python[\d.]*", command.program) and "-m" in values:
        at = values.index("-m")
        if values[at + 1 : at + 2] == ["pip"]:
            words = words[at + 1 :]
    elif command.program == "uv" and values[1:2] == ["pip"]:
        words = words[1:]
    elif not re.fullmatch(r"pip[\d.]*", command.program):
        return None
    for number, word in enumerate(words[1:], start=1):
        if word.value == "install":
            return words[number + 1 :]
        if not word.value.startswith("-"):
            return None
    return None


def fetches(command: Command) -> bool:
    """Return whether a command is curl, wget or aria2c and downloads something from elsewhere."""
    if command.program not in ("curl", "wget", "aria2c"):
        return False
    values = [word.value for word in command.arguments]
    if any(value in ("-I", "--head", "--spider", "--version", "--help", "-T", "--upload-file") for value in values):
        return False
    if command.program == "curl" and any(re.fullmatch(rf"-[^-{CURL_VALUES}]*I[a-zA-Z]*", value) for value in values):
        return False
    if re.search(r"(?:^| )(?:-X|--request)[ =]?(?:POST|PUT|DELETE)(?: |$)", " ".join(values)):
        return False
    return any(not LOCAL.search(source) for source in _sources(command))


def _sources(command: Command) -> Iterator[str]:
    """Yield the words that say what to download."""
    valued = False
    for word in command.arguments:
        value = word.value
        if valued:
            valued = False
        elif value.startswith("--"):
            valued = "=" not in value and (value in CURL_LONG_VALUES or value in WGET_VALUES)
            if value.startswith(("--url=", "--input-file=")):
                yield value
        elif value.startswith("-") and len(value) > 1:
            if command.program == "curl":
                # -LO has no value, -Lo and -o have the next word, -ofile has its own.
                at = next((number for number, letter in enumerate(value) if letter in CURL_VALUES), len(value))
                valued = at == len(value) - 1
            else:
                valued = value in WGET_VALUES or bool(re.fullmatch(r"-[a-zA-Z]+O", value))
        elif "://" in value or "$" in value or re.match(r"[\w-]+(?:\.[\w-]+)+/", value):
            yield value


def verifies(command: Command) -> bool:
    """Return whether a command compares a digest of 256 bits or more, or a signature."""
    values = [word.value for word in command.arguments]
    match command.program:
        case name if name in DIGESTS:
            return True
        case "gpg" | "gpg2":
            return "--verify" in values or "--decrypt" in values
        case "openssl":
            return "dgst" in values or "cms" in values
        case "rpm" | "rpmkeys":
            return any(value in ("-K", "--checksig") for value in values)
        case "gh" | "slsa-verifier":
            return "verify" in values or "verify-artifact" in values
        case "aria2c":
            return any(value.startswith("--checksum=sha-") and "sha-1=" not in value for value in values)
        case _:
            return False


def _checked(commands: Sequence[Command]) -> int:
    """Return how many commands there are up to the last check of a content."""
    return next((number for number in range(len(commands), 0, -1) if verifies(commands[number - 1])), 0)


def download_unverified(document: Document) -> Iterator[Hit]:
    """Find downloads that no later command of the same RUN checks."""
    for run in document.runs():
        commands = run.script.commands
        for command in commands[_checked(commands) :]:
            if not fetches(command):
                continue
            shell = next((target for target in command.pipe_targets if target in (*SHELLS, "python", "python3")), "")
            if shell:
                yield Hit(command.line, f"{shell} runs what {command.program} downloads, without a check")
            else:
                yield Hit(command.line, f"the download of {command.program} is not checked")


def remote_add(document: Document) -> Iterator[Hit]:
    """Find ADD of an address without a checksum."""
    for instruction in document.instructions:
        if instruction.keyword != "ADD" or instruction.flag("checksum"):
            continue
        for source in map(instruction.resolved, instruction.arguments[:-1]):
            if ADDRESS.match(source) and not _is_git(source):
                yield Hit(instruction.line, f"ADD {source} has no --checksum")


def _is_git(source: str) -> bool:
    return bool(re.search(r"\.git(?:#|$)|^git@|^git://", source))


def curl_without_fail(document: Document) -> Iterator[Hit]:
    """Find curl that saves an error page as the file."""
    for run in document.runs():
        for command in run.script.commands:
            if command.program == "curl" and fetches(command) and not any(map(_fails, command.arguments)):
                yield Hit(command.line, "curl without --fail saves the server's error page as if it were the file")


def _fails(word: Word) -> bool:
    value = word.value
    if value.startswith("--"):
        return value in ("--fail", "--fail-with-body", "--fail-early")
    if not value.startswith("-"):
        # Options in a variable: $CURL_OPTIONS may have it.
        return bool(re.fullmatch(r"\$\{?\w*OPT\w*\}?", value, re.IGNORECASE))
    letters = value[1:]
    cut = next((number for number, letter in enumerate(letters) if letter in CURL_VALUES), len(letters))
    return "f" in letters[:cut]


def tls_check_off(document: Document) -> Iterator[Hit]:
    """Find options and variables that make a program trust any server."""
    for instruction in document.instructions:
        for name, value in instruction.assignments():
            if _trusting_variable(name, value):
                yield Hit(instruction.line, f"{name}={value} switches off the check of certificates")
        for command in instruction.script.commands:
            yield from _trusting_command(command)


def _trusting_variable(name: str, value: str) -> bool:
    if name in ("GIT_SSL_NO_VERIFY", "CURL_INSECURE", "UV_INSECURE_HOST", "PIP_TRUSTED_HOST"):
        return value.lower() not in ("", "0", "false")
    if name in ("PYTHONHTTPSVERIFY", "NODE_TLS_REJECT_UNAUTHORIZED", "CONDA_SSL_VERIFY"):
        return value.lower() in ("0", "false", "no")
    return False


def _trusting_command(command: Command) -> Iterator[Hit]:
    if command.prints_to_terminal:
        return
    values = [word.value for word in command.arguments]
    for word in (*command.assignments, *command.words):
        name, equals, value = word.value.partition("=")
        if equals and _trusting_variable(name, value):
            yield Hit(word.line, f"{word.value} switches off the check of certificates")
    program = command.program
    for number, word in enumerate(command.arguments):
        value = word.value
        trusting = (
            (value.startswith("--trusted-host") and install_arguments(command) is not None)
            or (value.startswith(("--trusted-host", "--allow-insecure-host")) and program in ("pip", "pip3", "uv"))
            or (value == "--insecure" and program in ("curl", "conda", "mamba", "micromamba"))
            or (program == "curl" and bool(re.fullmatch(rf"-[^-{CURL_VALUES}]*k[a-zA-Z]*", value)))
            or (program in ("wget", "aria2c") and value in ("--no-check-certificate", "--check-certificate=false"))
            or (program == "git" and bool(re.fullmatch(r"(?i)http\.sslverify=(?:false|0|no)", value)))
            or (
                re.fullmatch(r"(?i)http\.sslverify|strict-ssl|ssl_verify|global\.trusted-host|trusted-host", value)
                is not None
                and "config" in values
                and (values[number + 1 : number + 2] or [""])[0].lower() not in ("true", "1", "yes", "")
            )
            or bool(re.search(r"(?i)Acquire::https?::(?:[^:\s]+::)?Verify-(?:Peer|Host)\W+(?:false|0|no)", value))
            or (program in ("yum", "dnf") and bool(re.search(r"(?i)sslverify=(?:0|false|no)", value)))
        )
        if trusting:
            yield Hit(word.line, f"`{value}` switches off the check of certificates")


def package_signature_check_off(document: Document) -> Iterator[Hit]:
    """Find package managers that accept unsigned packages."""
    for run in document.runs():
        for command in run.script.commands:
            if command.prints_to_terminal:
                continue
            for word in command.words:
                value = word.value
                if (
                    (
                        command.program in ("apt", "apt-get", "aptitude", "yum", "dnf", "microdnf", "zypper", "apk")
                        and value
                        in (
                            *("--allow-unauthenticated", "--force-yes", "--nogpgcheck", "--no-gpg-checks"),
                            *("--allow-untrusted", "--setopt=gpgcheck=0", "--setopt=gpgcheck=False"),
                        )
                    )
                    or re.search(r"\[[^\]\n]*trusted=yes[^\]\n]*\]", value)
                    or re.search(r"(?m)^gpgcheck\s*=\s*0", value)
                ):
                    shown = value if len(value) < 60 else "trusted=yes / gpgcheck=0"
                    yield Hit(word.line, f"`{shown}` accepts unsigned packages")


def plain_http_download(document: Document) -> Iterator[Hit]:
    """Find downloads over plain http that are not checked."""
    for instruction in document.instructions:
        if instruction.keyword == "ADD" and not instruction.flag("checksum"):
            for source in map(instruction.resolved, instruction.arguments[:-1]):
                if source.lower().startswith("http://") and not LOCAL.search(source):
                    yield Hit(instruction.line, f"{source} is downloaded over plain http")
        commands = instruction.script.commands
        for command in commands[_checked(commands) :]:
            fetching = (
                fetches(command)
                or install_arguments(command) is not None
                or (command.program == "git" and any(word.value in ("clone", "fetch") for word in command.arguments))
            )
            if not fetching:
                continue
            for word in command.arguments:
                match = ADDRESS.search(instruction.resolved(word.value))
                if match and match[0].lower().startswith("http:") and not LOCAL.search(match[0]):
                    yield Hit(word.line, f"{match[0]} is downloaded over plain http")


def pipe_without_pipefail(document: Document) -> Iterator[Hit]:
    """Find downloads whose failure is lost in a pipe."""
    for run in document.runs():
        if run.script.pipefail:
            continue
        for command in run.script.commands:
            # grep fails if it gets nothing, so it also fails if the download does.
            if command.pipe_targets and command.pipe_targets[-1] not in SEARCHERS and fetches(command):
                last = command.pipe_targets[-1] or "the last command"
                yield Hit(
                    command.line,
                    f"the step succeeds even if {command.program} fails: its status is that of {last}",
                )


def wheel_without_hash(document: Document) -> Iterator[Hit]:
    """Find files that pip installs by their address without a digest."""
    for run in document.runs():
        for command in run.script.commands:
            arguments = install_arguments(command)
            if arguments is None or any(word.value == "--require-hashes" for word in arguments):
                continue
            for source in _requirements(arguments):
                value = run.resolved(source.value)
                address = ADDRESS.search(value)
                if (
                    address
                    and not re.search(r"\bgit\+", value)
                    and not re.search(r"#(?:.*&)?sha(?:256|384|512)=", value)
                ):
                    yield Hit(source.line, f"pip installs {_short(address[0])} without #sha256=")


def _requirements(arguments: Sequence[Word]) -> Iterator[Word]:
    """Yield the requirements among pip's arguments, without options and their values."""
    valued = False
    for word in arguments:
        if valued:
            valued = False
        elif word.value.startswith("-"):
            valued = "=" not in word.value and word.value in (
                *("-r", "--requirement", "-c", "--constraint", "-i", "--index-url", "--extra-index-url", "-f"),
                *("--find-links", "--trusted-host", "-t", "--target", "--prefix", "--python", "--root", "--timeout"),
                *("--no-binary", "--only-binary", "--config-settings", "--global-option", "--platform", "--cache-dir"),
                *("--upgrade-strategy", "--retries", "--default-timeout", "--log", "--proxy", "--cert", "-p"),
                *("--index-strategy", "--python-version", "--implementation", "--abi", "--index", "--group"),
            )
        else:
            yield word


def _short(text: str) -> str:
    # Before it is cut: the @ that ends a token may be in the middle.
    text = masked(text)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-37:]}"


def git_requirement_moving(document: Document) -> Iterator[Hit]:
    """Find Python requirements of a git repository without a commit or tag."""
    for run in document.runs():
        for command in run.script.commands:
            for word in install_arguments(command) or ():
                value = run.resolved(word.value)
                match = re.search(r"\bgit\+\w+://(?:[^/\s@]+@)?(?P<rest>[^\s#]+)", value)
                if match is None:
                    continue
                reference = match["rest"].rpartition("@")[2] if "@" in match["rest"] else ""
                if moves(reference):
                    yield Hit(word.line, f"`{_short(value)}` names a branch, which changes")


def moves(reference: str) -> bool:
    """Return whether a git reference looks like a branch: it is not a commit, a version or a variable."""
    if not reference:
        return True
    if "$" in reference or COMMIT.fullmatch(reference) or reference.startswith("refs/tags/"):
        return False
    return reference.lower().rpartition("/")[2] in MOVING_NAMES or not re.search(r"\d", reference)


def git_clone_moving(document: Document) -> Iterator[Hit]:
    """Find clones of a branch without a later checkout of a commit or tag."""
    for instruction in document.instructions:
        if instruction.keyword == "ADD":
            for source in instruction.arguments[:-1]:
                if _is_git(source) and moves(source.partition("#")[2].partition(":")[0]):
                    yield Hit(instruction.line, f"ADD {source} takes a branch, which changes")
    for stage in document.stages:
        commands = [
            (instruction, command) for instruction in stage.instructions for command in instruction.script.commands
        ]
        for number, (_, command) in enumerate(commands):
            arguments = _git_arguments(command)
            if arguments[:1] != ["clone"]:
                continue
            reference = _branch(arguments)
            later = [_checked_out(_git_arguments(other)) for _, other in commands[number + 1 :]]
            # A checkout after the next clone belongs to that clone.
            limit = next(
                (at for at, (_, other) in enumerate(commands[number + 1 :]) if _git_arguments(other)[:1] == ["clone"]),
                len(later),
            )
            settled = any(word is not None and not moves(word) for word in later[:limit])
            # Several clones first, then their checkouts: count them.
            settled = settled or _checkouts(commands, number) >= _clones(commands, number)
            if (not reference or moves(reference)) and not settled:
                name = next((word for word in arguments[1:] if "/" in word or "$" in word), "of a repository")
                yield Hit(command.line, f"git clone {name} takes a branch, which changes".replace("  ", " "))


def _clones(commands: Sequence[tuple[Instruction, Command]], start: int) -> int:
    found = [_git_arguments(command) for _, command in commands[start:]]
    return sum(1 for words in found if words[:1] == ["clone"] and (not _branch(words) or moves(_branch(words))))


def _checkouts(commands: Sequence[tuple[Instruction, Command]], start: int) -> int:
    references = [_checked_out(_git_arguments(command)) for _, command in commands[start:]]
    return sum(1 for reference in references if reference is not None and not moves(reference))


def _git_arguments(command: Command) -> list[str]:
    """Return git's arguments from the subcommand on; empty for other programs."""
    if command.program != "git":
        return []
    values = [word.value for word in command.arguments]
    while values and values[0].startswith("-"):
        values = values[2:] if values[0] in ("-C", "-c", "--git-dir", "--work-tree") else values[1:]
    return values


def _branch(arguments: Sequence[str]) -> str:
    for number, value in enumerate(arguments):
        if value in ("-b", "--branch", "--revision"):
            return "".join(arguments[number + 1 : number + 2])
        if value.startswith(("--branch=", "--revision=")):
            return value.partition("=")[2]
    return ""


def _checked_out(arguments: Sequence[str]) -> str | None:
    """Return the reference that a checkout, switch or reset goes to; None for other commands."""
    if arguments[:1] not in (["checkout"], ["switch"], ["reset"]):
        return None
    return next((value for value in arguments[1:] if not value.startswith("-") and value != "."), "")


def git_checkout_nothing(document: Document) -> Iterator[Hit]:
    """Find `git checkout` without a reference."""
    for run in document.runs():
        for command in run.script.commands:
            arguments = _git_arguments(command)
            if arguments == ["checkout"]:
                yield Hit(command.line, "`git checkout` without a reference does nothing")


def moving_address(document: Document) -> Iterator[Hit]:
    """Find files of a branch that are downloaded by their address."""
    for instruction in document.instructions:
        if instruction.keyword == "ADD":
            for source in instruction.arguments[:-1]:
                if MOVING_ADDRESS.search(source):
                    yield Hit(instruction.line, f"{_short(source)} is a file of a branch, which changes")
        for command in instruction.script.commands:
            if fetches(command) or install_arguments(command) is not None:
                for word in command.arguments:
                    if MOVING_ADDRESS.search(word.value):
                        yield Hit(word.line, f"{_short(word.value)} is a file of a branch, which changes")


def pip_without_versions(document: Document) -> Iterator[Hit]:
    """Find pip requirements without an exact version, a lock or a constraints file."""
    for run in document.runs():
        for command in run.script.commands:
            arguments = install_arguments(command)
            if arguments is None or any(
                word.value.startswith(("-c", "--constraint", "-r", "--requirement", "--require-hashes", "-e"))
                for word in arguments
            ):
                continue
            loose = [
                word
                for word in _requirements(arguments)
                if re.match(r"[A-Za-z0-9][\w.-]*(?:\[[^\]]*\])?\s*(?:$|[<>~!,;]|=[^=])", word.value)
                and not word.value.endswith((".whl", ".tar.gz", ".zip"))
                and "$" not in word.value
                and "/" not in word.value
                and "@" not in word.value
            ]
            if loose:
                names = ", ".join(word.value for word in loose[:3]) + ("..." if len(loose) > 3 else "")
                yield Hit(loose[0].line, f"pip chooses the version of {names} again in every build")
