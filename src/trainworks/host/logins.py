"""Logins of this machine's ``netrc``, for the hosts that a build names and for no other."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from urllib.parse import urlsplit

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')
"""A word of a netrc, in quotes or without."""

_FIELDS = ("login", "user", "account", "password")


def find_hosts(addresses: Iterable[str]) -> set[str]:
    """Return the hosts of addresses, in lower case, without their ports.

    An address without a host, such as a path, has none.
    """
    hosts = set()
    for address in addresses:
        url = re.sub(r"^(?:git|hg|svn|bzr)\+", "", address)
        try:
            host = urlsplit(url).hostname
        except ValueError:  # not an address: the program that reads it reports it
            continue
        if host:
            hosts.add(host.lower())
    return hosts


def select_logins(hosts: Collection[str], netrc: bytes) -> bytes:
    """Return the ``machine`` entries of a netrc for some hosts, as a netrc.

    ``default``, which is for every host, and macros are left out.

    Args:
        hosts: Names in lower case.
        netrc: Content of the file. Unreadable parts are left out.
    """
    lines = []
    for host, fields in _parse_entries(netrc.decode("utf-8", "replace")):
        if host.lower() in hosts:
            words = [f"{name} {_quote(value)}" for name, value in fields.items()]
            lines.append(" ".join(["machine", host, *words]))
    return "".join(f"{line}\n" for line in lines).encode()


def _parse_entries(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the host and the fields of each ``machine`` of a netrc.

    For example ``("a.example", {"login": "me", "password": "word"})``.
    """
    # A macro ends at an empty line, and may have any words.
    text = re.sub(r"(?ms)^\s*macdef\b.*?(?:\n[ \t]*\r?\n|\Z)", "\n", text)
    # A comment has a line of its own: inside a line, the sign may belong to a password.
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    words = [_unquote(word) for word in _WORD.finditer(text)]
    host, fields = "", dict[str, str]()
    position = 0
    while position < len(words):
        word = words[position]
        value = words[position + 1] if position + 1 < len(words) else ""
        if word in ("machine", "default"):
            # The entry before this one has ended.
            if host:
                yield host, fields
            fields = {}
            if word == "machine":
                host = value
                position += 2
            else:
                # The fields of the default are of no host, and are dropped.
                host = ""
                position += 1
        elif word in _FIELDS:
            fields[word] = value
            position += 2
        else:
            position += 1
    if host:
        yield host, fields


def _unquote(word: re.Match[str]) -> str:
    r"""Return a word without its quotes: ``"a\"b"`` becomes ``a"b``."""
    quoted, bare = word[1], word[2]
    if bare is not None:
        return bare
    return re.sub(r"\\(.)", r"\1", quoted)


def _quote(value: str) -> str:
    """Return a value of a netrc, in quotes if it is not a plain word."""
    if value and not re.search(r'[\s"\\]', value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
