"""Variables by which any scheduler says that a job has several hosts, recognised by their kind.

Pure.

Three kinds. A pair with one beginning: ``X_TASK_COUNT=2`` with ``X_TASK_INDEX=0``,
``NUM_PROCESSES`` with
``PROCESS_ID``. A list of addresses: ``X_HOST_LIST=10.0.0.4,10.0.0.5``. A file of hosts:
``X_HOSTS_FILE``. An array of jobs that know nothing of each other has pairs, too, and so have
shards of tests, GPUs and data loaders: they are not hosts.
"""

from __future__ import annotations

import re
from typing import Callable, Iterator, Mapping, NamedTuple

from trainworks_launcher.contract.json_values import without_brackets

_HOSTS = frozenset(
    (
        *(
            "AGENT",
            "CONTAINER",
            "HOST",
            "INSTANCE",
            "MACHINE",
            "MEMBER",
            "NODE",
            "PEER",
            "POD",
            "REPLICA",
        ),
        *("TRAINER", "VM", "WORKER"),
    )
)
"""What a host is called. Where a pair counts these, one ``train`` runs for each."""

_PROCESSES = frozenset(
    (
        *(
            "CLUSTER",
            "COMM",
            "GANG",
            "GROUP",
            "JOB",
            "PROC",
            "PROCESS",
            "RANK",
            "ROLE",
            "SERVER",
            "TASK",
        ),
        *("UNIVERSE", "WORLD"),
    )
)
"""What else is counted in a distributed job; on how many hosts it runs does not follow."""

_COUNTS = frozenset(("COUNT", "N", "NUM", "NUMBER", "SIZE", "TOTAL"))
_INDICES = frozenset(("ID", "IDX", "INDEX", "NO", "RANK"))
_LEADERS = frozenset(("CHIEF", "COORDINATOR", "HEAD", "LEADER", "MAIN", "MASTER", "PRIMARY"))
_ADDRESSES = frozenset(("ADDR", "ADDRESS", "HOST", "HOSTNAME", "IP"))
_LISTS = frozenset(
    ("ADDRESSES", "ADDRS", "ENDPOINTS", "HOSTNAMES", "HOSTS", "IPS", "LIST", "NAMES")
)
_NO_HOSTS = frozenset(
    (
        # arrays, shards of tests, and what one host has several of
        *(
            "ARRAY",
            "BUILDKITE",
            "CI",
            "CIRCLE",
            "PARALLEL",
            "SEMAPHORE",
            "TRAVIS",
            "PYTEST",
            "SHARD",
            "SHARDS",
            "TEST",
            "XDIST",
        ),
        *(
            "CORE",
            "CORES",
            "CPU",
            "CPUS",
            "CUDA",
            "DEVICE",
            "GPU",
            "GPUS",
            "LOCAL",
            "NUMA",
            "SLOT",
            "SLOTS",
            "THREAD",
        ),
        # groups inside a job, and data loaders
        *(
            "CP",
            "DATA",
            "DATALOADER",
            "DP",
            "EP",
            "EXPERT",
            "LOADER",
            "LOAD",
            "PP",
            "SP",
            "TENSOR",
            "TP",
        ),
        # services that a job may use
        *(
            "ALLOWED",
            "CONSUL",
            "DB",
            "DNS",
            "ELASTICSEARCH",
            "ETCD",
            "KAFKA",
            "KNOWN",
            "MONGO",
            "NATS",
            "PROXY",
        ),
        *("REDIS", "SSH", "TRUSTED", "VAULT", "ZOOKEEPER"),
    )
)
_FILLERS = ("ALL", "CURRENT", "MY", "OF", "OWN", "THIS")
_OURS = ("SM_", "TRAINWORKS_", "KUBERNETES_", "CLOUD_RUN_")
"""Beginnings of what the launcher itself exports, of links to services, and of
Cloud Run's arrays of tasks.
"""

_TOGETHER = re.compile(
    r"(N|NUM)((?:NODE|HOST|PROC|TASK|WORKER|REPLICA|RANK)S)"
    r"|((?:NODE|HOST|MACHINE|PROC|TASK|WORKER|RANK|JOB)S?)(COUNT|FILE|ID|INDEX|IPS|LIST|NAMES|NO|NUM|RANK)"
)
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%\w+)?")
_NUMBER = re.compile(r"\d{1,6}")
_FILE_OF_THE_SYSTEM = "/etc/hosts"


class Pair(NamedTuple):
    """A number of hosts or processes, and which of them this is.

    Attributes:
        size: How many there are; more than one.
        place: This one's number, as it is said: from 0, or from 1.
        names: The variables of the two.
        vendor: The words with which both begin; ``()`` for none.
        of_hosts: Whether hosts are counted, or processes of which each host has
            one as far as is known (JAX).
    """

    size: int
    place: int
    names: tuple[str, str]
    vendor: tuple[str, ...]
    of_hosts: bool

    def __str__(self) -> str:
        """Return the two as they stand in the environment."""
        return f"{self.names[0]}={self.size}, {self.names[1]}={self.place}"


class Listed(NamedTuple):
    """Addresses of several hosts: the variable that has them, or that names
    their file, and the addresses in order.
    """

    name: str
    hosts: tuple[str, ...]
    in_file: bool = False


class _Name(NamedTuple):
    """A variable's name in parts: its maker, what it is about, and the word
    that says count or index.
    """

    vendor: tuple[str, ...]
    objects: tuple[str, ...]
    role: str


def pairs(variables: Mapping[str, str]) -> tuple[Pair, ...]:
    """Return the pairs that say that this process is one of several, those of hosts first."""
    numbers = {
        name: int(value)
        for name, value in sorted(variables.items())
        if _NUMBER.fullmatch(value.strip())
    }
    counts: list[tuple[str, _Name]] = []
    indices: list[tuple[str, _Name]] = []
    for name, value in numbers.items():
        parts = _parts(name)
        if parts is None:
            continue
        if parts.role in _COUNTS and value > 1:
            counts.append((name, parts))
        elif parts.role in _INDICES:
            indices.append((name, parts))
    found = []
    for name, counted in counts:
        for other, indexed in indices:
            if _belong_together(counted, indexed) and numbers[other] <= numbers[name]:
                objects = {*counted.objects, *indexed.objects}
                of_hosts = bool(objects & _HOSTS) or objects == {"PROCESS"}
                found.append(
                    Pair(numbers[name], numbers[other], (name, other), counted.vendor, of_hosts)
                )
    return tuple(sorted(found, key=lambda pair: not pair.of_hosts))


def lists(variables: Mapping[str, str], read: Callable[[str], str]) -> tuple[Listed, ...]:
    """Return the lists and files that name two hosts or more. read: returns the
    text of a file, ``""`` for none.
    """
    found = []
    for name, value in sorted(variables.items()):
        words = _words(name)
        if name.startswith(_OURS) or not _NO_HOSTS.isdisjoint(words):
            continue
        kinds = {_singular(word) for word in words} & _HOSTS
        in_file = "FILE" in words and bool(kinds)
        is_list = any(word in _LISTS for word in words[1:]) and len(kinds) + ("TASK" in words) > 0
        if in_file and value != _FILE_OF_THE_SYSTEM and value.startswith("/"):
            lines = [line.split("#")[0].split()[:1] for line in read(value).splitlines()]
            hosts = _addresses(word for line in lines for word in line)
        elif is_list and not in_file:
            hosts = _addresses(re.split(r"[,;\s]+", value.strip()))
        else:
            continue
        if len(hosts) > 1:
            found.append(Listed(name, hosts, in_file))
    return tuple(found)


def index_of(variables: Mapping[str, str], listed: Listed) -> str:
    """Return the variable that says which host of a list this is; ``""`` if none does."""
    vendor = _words(listed.name)[:1]
    for name, value in sorted(variables.items()):
        parts = _parts(name)
        if parts is None or parts.role not in _INDICES or not _NUMBER.fullmatch(value.strip()):
            continue
        if (
            parts.vendor[:1] == vendor
            and {*parts.objects} & _HOSTS
            and int(value) < len(listed.hosts)
        ):
            return name
    return ""


def leader(variables: Mapping[str, str], vendor: tuple[str, ...]) -> tuple[str, str]:
    """Return (variable, address) of the leader as the maker of a pair calls it.

    ``("", "")`` if there is none.
    """
    for name, value in sorted(variables.items()):
        words = _words(name)
        is_leader = not _LEADERS.isdisjoint(words) and words[-1] in _ADDRESSES
        if not is_leader or words[: len(vendor)] != vendor:
            continue
        rest = {_singular(word) for word in words[len(vendor) :]}
        if not rest <= _LEADERS | _ADDRESSES | _HOSTS:
            continue
        address = _without_port(value.strip())
        if is_host_name(address):
            return name, address
    return "", ""


def hints(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return ``NAME=VALUE`` of a lone count above one, and of a lone index, by
    which a job may have several hosts.
    """
    counts: dict[str, int] = {}
    indices: dict[str, int] = {}
    for name, value in sorted(variables.items()):
        parts = _parts(name)
        if parts is None or not _NUMBER.fullmatch(value.strip()):
            continue
        if {*_HOSTS, "ALLOC", "RANK"}.isdisjoint(parts.objects + parts.vendor[-1:]):
            continue
        of_loader = (
            parts.objects == ("WORKER",)
            and parts.role in ("N", "NUM", "NUMBER")
            and not parts.vendor
        )
        if parts.role in _COUNTS and not of_loader:
            counts[name] = int(value)
        elif parts.role in ("INDEX", "RANK") or "RANK" in parts.objects:
            indices[name] = int(value)
    says_one = 1 in counts.values()
    found = [f"{name}={count}" for name, count in counts.items() if count > 1]
    found += [f"{name}={index}" for name, index in indices.items() if index > 0 or not says_one]
    return tuple(sorted(found))


def is_host_name(name: str) -> bool:
    """Return whether a text can be a host's name or address: nothing that a
    manifest or a shell left unexpanded.
    """
    return bool(_HOST_NAME.fullmatch(name)) or (name.count(":") > 1 and bool(_IPV6.fullmatch(name)))


def _words(name: str) -> tuple[str, ...]:
    """Return the words of a variable's name.

    >>> _words("X_NNODES"), _words("NODELIST")
    (('X', 'N', 'NODES'), ('NODE', 'LIST'))
    """
    found: list[str] = []
    for word in filter(None, name.upper().split("_")):
        together = _TOGETHER.fullmatch(word)
        found += [part for part in together.groups() if part] if together else [word]
    return tuple(found)


def _parts(name: str) -> _Name | None:
    """Return the parts of a name that says a count or an index of hosts or processes.

    None for any other name.
    """
    words = _words(name)
    if name.startswith(_OURS) or len(words) < 2 or not _NO_HOSTS.isdisjoint(words[:-1]):
        return None
    role = words[-1] if words[-1] in _INDICES else ""
    if not role or not _COUNTS.isdisjoint(words[:-1]):
        role = next((word for word in reversed(words) if word in _COUNTS), "")
    if not role:
        return None
    rest = [_singular(word) for word in words if word not in (role, *_FILLERS)]
    split = next(
        (place for place, word in enumerate(rest) if word in _HOSTS | _PROCESSES), len(rest)
    )
    vendor, objects = tuple(rest[:split]), tuple(rest[split:])
    if not {*objects} <= _HOSTS | _PROCESSES:
        return None
    return _Name(vendor, objects, role)


def _belong_together(counted: _Name, indexed: _Name) -> bool:
    """Return whether a count and an index are of one job: of one maker, or of the same things."""
    if counted.vendor != indexed.vendor:
        return False
    if counted.objects == indexed.objects and counted.objects not in ((), ("JOB",)):
        return True
    if not counted.vendor:
        return False
    if counted.objects and indexed.objects:
        # X_JOB_ID is the name of a job, X_NODE_ID mostly a number
        return indexed.role != "ID" or not {*indexed.objects}.isdisjoint({*counted.objects})
    return indexed.role == "RANK" or (counted.objects == indexed.objects and bool(counted.objects))


def _singular(word: str) -> str:
    if word.endswith("SSES"):
        return word[:-2]
    return word[:-1] if word.endswith("S") and not word.endswith("SS") else word


def _addresses(words: Iterator[str] | list[str]) -> tuple[str, ...]:
    """Return the different hosts among words, without ports.

    ``()`` if one of the words is no host.
    """
    hosts = [_without_port(word) for word in words if word]
    if not all(map(is_host_name, hosts)):
        return ()
    return tuple(dict.fromkeys(hosts))


def _without_port(address: str) -> str:
    alone = without_brackets(address)
    return alone if alone.count(":") > 1 else alone.partition(":")[0]
