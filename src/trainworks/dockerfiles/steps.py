"""Steps that do something else than they seem to do: lost versions, keys in layers, downloads that nothing checks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainworks.dockerfiles.findings import Finding, finding
from trainworks.dockerfiles.shell import SHELLS, Command
from trainworks.dockerfiles.text import Dockerfile, Instruction, replaced

ADDRESS = re.compile(r"\b(?:https?|ftp)://[^\s'\"]+", re.IGNORECASE)
LOCAL = re.compile(r"://(?:localhost|127\.\d+\.\d+\.\d+|\[::1\]|0\.0\.0\.0|169\.254\.\d+\.\d+)(?=[:/]|$)")
GIT = re.compile(r"\.git(?:#|$)|^git@|^git://|\bgit\+")

FETCHERS = frozenset({"curl", "wget", "aria2c"})
NOT_FETCHING = frozenset({"-I", "--head", "--spider", "--version", "--help", "-T", "--upload-file"})
NOT_SOURCES = frozenset({"-x", "--proxy", "-H", "--header", "-e", "--referer", "-A", "--user-agent", "-u", "--user"})
"""Options of curl whose values are no addresses to download."""

VERIFYING = re.compile(
    r"(?:sha(?:256|384|512)sum|b2sum|shasum|gpgv|minisign|cosign)(?: |$)|gpg2? .*--(?:verify|decrypt)|openssl dgst|"
    r"rpm(?:keys)? .*(?:-K|--checksig)|(?:gh|slsa-verifier) .*verify|aria2c .*--checksum=sha-(?!1=)"
)
"""Commands that compare a digest of 256 bits or more, or a signature. MD5 and SHA-1 do not count."""

PIP_VALUES = re.compile(r"-[rcift]|--(?:.*-url|requirement|constraint|index|find-links|proxy|trusted-host|target)")
"""Options of pip and uv whose values may be addresses, and are no packages."""

INSTALLERS = frozenset({"conda", "mamba", "micromamba", "poetry", "uv", "pipx", "pdm"})
SEARCHERS = frozenset({"grep", "egrep", "fgrep", "rg", "awk"})

PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")
KEY_FILES = frozenset(
    {
        *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", ".pypirc", ".git-credentials", ".npmrc", ".pgpass"),
        *("ssh_host_rsa_key", "ssh_host_ecdsa_key", "ssh_host_ed25519_key", "kubeconfig", "credentials.json"),
    }
)
KEY_FOLDERS = frozenset({".aws", ".ssh", ".gnupg", ".kube"})
CERTIFICATE = re.compile(r"(?i)(?:^|[^a-z])(?:ca|cas|cert|certs|certificate|certificates|bundle|chain|root|public|pub)")


def pip_arguments(command: Command) -> list[str] | None:
    """Return what follows ``pip install`` in any of its spellings; None for another command."""
    found = re.match(r"(?:python[\d.]*(?: -\w+)* -m pip|uv pip|pip[\d.]*)(?: -\S+)* install(?: |$)", command.called)
    return command.arguments[len(found[0].split()) - 1 :] if found else None


def steps_of(document: Dockerfile) -> Iterator[Finding]:
    """Find lost versions, keys and unchecked downloads."""
    for instruction in document.instructions():
        yield from _unquoted(instruction)
        yield from _keys(instruction)
        yield from _downloads(instruction)


def _unquoted(instruction: Instruction) -> Iterator[Finding]:
    """Find version ranges that the shell reads as redirections."""
    for command in instruction.commands:
        installs = pip_arguments(command) is not None or (
            command.program in INSTALLERS and {"install", "add", "create"} & {*command.arguments}
        )
        for redirect in command.redirects:
            before, target = redirect.word_before, redirect.target
            limits = target.startswith("=") or (installs and before and re.match(r"v?\d+(?:\.|,|$)", target))
            if redirect.operator in (">", ">>", "<") and limits and not re.fullmatch(r"\d?", before):
                written = f"{before}{redirect.operator}{target}"
                does = "reads the file" if redirect.operator == "<" else "writes the file"
                what = f"`{written}` {does} `{target}` and does not limit the version"
                yield finding("unquoted-version", redirect.line, what)


def _keys(instruction: Instruction) -> Iterator[Finding]:
    """Find keys that stay in a layer: made, copied or written."""
    if instruction.keyword in ("COPY", "ADD"):
        for source in instruction.arguments[:-1]:
            if _is_key(source):
                yield finding("key-in-layer", instruction.line, f"{source} is copied")
    for command in instruction.commands:
        if command.program == "ssh-keygen" and not any(re.match(r"-[FHRlyLeQ]", word) for word in command.arguments):
            yield finding("key-in-layer", command.line, "ssh-keygen makes a key that all users of the image share")
    texts = [pair for each in instruction.commands if each.program not in SEARCHERS for pair in each.texts()]
    for text, line in texts if instruction.keyword == "RUN" else [(instruction.text, instruction.line)]:
        if key := PRIVATE_KEY.search(text):
            at = line + text.count("\n", 0, key.start())
            yield finding("key-in-layer", at, "the Dockerfile contains a private key")


def _is_key(source: str) -> bool:
    *folders, name = source.rstrip("/").split("/")
    stem, _, suffix = name.rpartition(".") if "." in name else (name, "", "")
    if suffix == "pub" or name in ("known_hosts", "authorized_keys", "config"):
        return ".aws" in folders
    return (
        name in KEY_FILES
        or any(part in KEY_FOLDERS for part in (*folders, name))
        or source.endswith(".docker/config.json")
        or (suffix in ("pem", "key", "p12", "pfx") and not CERTIFICATE.search(stem))
    )


def _downloads(instruction: Instruction) -> Iterator[Finding]:
    """Find downloads whose content no later command of the same RUN compares with a digest or a signature."""
    rule = "download-unchecked"
    if instruction.keyword == "ADD" and not instruction.flag("checksum"):
        for source in instruction.arguments[:-1]:
            if ADDRESS.match(source) and not GIT.search(source):
                yield finding(rule, instruction.line, f"ADD {_shown(source)} has no --checksum")
    commands = instruction.commands
    checks = (number for number, each in enumerate(commands, start=1) if VERIFYING.match(each.called))
    for command in commands[max(checks, default=0) :]:
        if _fetches(command):
            yield finding(rule, command.line, f"the download of {command.program} is not checked")
    for command in commands:
        arguments = pip_arguments(command)
        if arguments is None or "--require-hashes" in arguments:
            continue
        for before, word in zip(["", *arguments], arguments, strict=False):
            written = replaced(word, instruction.values)
            address = ADDRESS.search(written)
            option = word.startswith("-") or PIP_VALUES.fullmatch(before)
            if address and not (option or GIT.search(written) or re.search(r"#(?:.*&)?sha(?:256|384|512)=", written)):
                yield finding(rule, command.line, f"pip installs {_shown(address[0])} without #sha256=")


def _fetches(command: Command) -> bool:
    """Return whether a command is curl, wget or aria2c and downloads something from elsewhere."""
    words = command.arguments
    if command.program not in FETCHERS or NOT_FETCHING & {*words}:
        return False
    if re.match(r"curl .*(?:(?<= )-[fsSLgkv]*I|(?:-X|--request)[ =]?(?:POST|PUT|DELETE))", command.called):
        return False
    sources = [word for before, word in zip(["", *words], words, strict=False) if before not in NOT_SOURCES]
    addresses = [word for word in sources if "://" in word]
    if addresses:
        return any(not LOCAL.search(word) for word in addresses)
    return any(
        word.startswith(("--url=", "--input-file="))
        or (not word.startswith("-") and ("$" in word or re.match(r"[\w-]+(?:\.[\w-]+)+/", word)))
        for word in sources
    )


def is_script(command: Command) -> bool:
    """Return whether a command runs a script by its path, which can read every variable."""
    words = [word.value for word in command.own_words]
    if command.program in (*SHELLS, "source", ".") or re.fullmatch(r"python[\d.]*", command.program):
        options = [word for word in words[1:] if re.fullmatch(r"-\w*[cm]", word)]
        return not options and any(not word.startswith("-") for word in words[1:])
    return bool(words) and (
        words[0].endswith((".sh", ".bash", ".py"))
        or ("/" in words[0] and not words[0].startswith(("/usr/", "/bin/", "/sbin/", "./configure", "$")))
    )


def _shown(address: str) -> str:
    """Return an address without login and query, which may be secret; a long one is cut."""
    shown = re.sub(r"[?#].*", "", re.sub(r"://[^/@]*@", "://", address))
    return shown if len(shown) <= 80 else f"{shown[:40]}...{shown[-37:]}"
