"""Secrets that stay in a layer, and checks of identity that are switched off."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainworks_lint.document import Document
from trainworks_lint.findings import Hit
from trainworks_lint.shell import mentions

KEY_FILES = frozenset(
    {
        *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", ".pypirc", ".git-credentials", ".npmrc", ".pgpass"),
        *("ssh_host_rsa_key", "ssh_host_ecdsa_key", "ssh_host_ed25519_key", "kubeconfig", "credentials.json"),
    }
)
KEY_FOLDERS = frozenset({".aws", ".ssh", ".gnupg", ".kube"})
CERTIFICATE = re.compile(r"(?i)(?:^|[^a-z])(?:ca|cas|cert|certs|certificate|certificates|bundle|chain|root|public|pub)")
PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")
SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID|SECRET_KEY|PRIVATE_KEY|"
    r"CREDENTIALS)$"
)
HOST_KEYS_OFF = re.compile(
    r"(?i)StrictHostKeyChecking(?:\s+|\s*=\s*)(?:no|off)\b|UserKnownHostsFile(?:\s+|\s*=\s*)/dev/null"
)
# `sed -i 's/#\(StrictHostKeyChecking \).*/\1no/'`
HOST_KEYS_EDITED = re.compile(r"(?i)s(.)[^\n]*StrictHostKeyChecking[^\n]*?\1[^\n]*?no\s*\1")
SEARCHERS = frozenset({"grep", "egrep", "fgrep", "rg", "ag", "awk"})


def key_made_in_build(document: Document) -> Iterator[Hit]:
    """Find keys that a step makes: they stay in the layer."""
    for run in document.runs():
        for command in run.script.commands:
            if command.program != "ssh-keygen":
                continue
            values = [word.value for word in command.arguments]
            if not any(re.fullmatch(r"-[FHRlyLeQ]\S*", value) for value in values):
                kind = "host keys" if "-A" in values else "an SSH key pair"
                yield Hit(command.line, f"ssh-keygen makes {kind} that all users of the image share")


def key_copied(document: Document) -> Iterator[Hit]:
    """Find files with keys or credentials that are copied into the image."""
    for instruction in document.instructions:
        if instruction.keyword in ("COPY", "ADD"):
            for source in instruction.arguments[:-1]:
                if not source.startswith("<<") and _is_key(source):
                    yield Hit(instruction.line, f"{source} stays in a layer, even if a later step deletes it")


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


def private_key_text(document: Document) -> Iterator[Hit]:
    """Find the text of a private key."""
    for instruction in document.instructions:
        if instruction.keyword == "RUN":
            for command in instruction.script.commands:
                if command.program not in SEARCHERS:
                    for line, text in mentions(command):
                        if PRIVATE_KEY.search(text):
                            yield Hit(line, "the Dockerfile contains a private key")
        else:
            texts = [(instruction.line, instruction.source.text)]
            texts += [(heredoc.line, heredoc.content) for heredoc in instruction.heredocs]
            for line, text in texts:
                if PRIVATE_KEY.search(text):
                    yield Hit(line, "the Dockerfile contains a private key")


def secret_in_variable(document: Document) -> Iterator[Hit]:
    """Find ARG and ENV with the name of a secret and with a value."""
    for instruction in document.instructions:
        for name, value in instruction.assignments():
            # A path to a secret is not a secret, and neither is a switch.
            if SECRET_NAME.search(name) and value and not re.match(r"/|(?i:true|false|yes|no|none)$", value):
                yield Hit(instruction.line, f"{instruction.keyword} {name} has a value: `docker history` shows it")


def host_key_check_off(document: Document) -> Iterator[Hit]:
    """Find SSH without the check of host keys."""
    for instruction in document.instructions:
        if instruction.keyword == "RUN":
            for command in instruction.script.commands:
                if not command.prints_to_terminal and command.program not in SEARCHERS:
                    for line, text in mentions(command):
                        if HOST_KEYS_OFF.search(text) or (command.program == "sed" and HOST_KEYS_EDITED.search(text)):
                            yield Hit(line, "ssh does not check which host answers")
        else:
            texts = [(instruction.line, value) for _, value in instruction.assignments()]
            texts += [(heredoc.line, heredoc.content) for heredoc in instruction.heredocs]
            for line, text in texts:
                if HOST_KEYS_OFF.search(text):
                    yield Hit(line, "ssh does not check which host answers")
