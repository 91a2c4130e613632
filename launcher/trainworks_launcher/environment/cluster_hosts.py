"""Recognises an unknown scheduler by variables that describe several hosts. Pure.

Three kinds of variables are recognised by the words in their names:

- a count and an index with the same beginning: ``X_TASK_COUNT=2`` with ``X_TASK_INDEX=0``, or
  ``NUM_PROCESSES`` with ``PROCESS_ID``
- a list of addresses: ``X_HOST_LIST=10.0.0.4,10.0.0.5``
- a file of hosts: ``X_HOSTS_FILE=/etc/x/hosts``

Arrays of independent jobs, shards of tests, GPUs and data loaders have counts and indices, too.
They are not hosts, and their words are in _OTHER_WORDS.
"""

from __future__ import annotations

import re
from typing import Callable, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract.json_values import without_brackets

_HOST_WORDS = frozenset(
    (
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
        "TRAINER",
        "VM",
        "WORKER",
    )
)
"""Words for a host. If a count has one of them, ``train`` is started once on each host."""

_PROCESS_WORDS = frozenset(
    (
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
        "UNIVERSE",
        "WORLD",
    )
)
"""Words for other parts of a distributed job. Their number is not the number of hosts."""

_COUNT_WORDS = frozenset(("COUNT", "N", "NUM", "NUMBER", "SIZE", "TOTAL"))
_INDEX_WORDS = frozenset(("ID", "IDX", "INDEX", "NO", "RANK"))
_LEADER_WORDS = frozenset(("CHIEF", "COORDINATOR", "HEAD", "LEADER", "MAIN", "MASTER", "PRIMARY"))
_ADDRESS_WORDS = frozenset(("ADDR", "ADDRESS", "HOST", "HOSTNAME", "IP"))
_LIST_WORDS = frozenset(
    ("ADDRESSES", "ADDRS", "ENDPOINTS", "HOSTNAMES", "HOSTS", "IPS", "LIST", "NAMES")
)
_ARRAYS = (
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
)
"""Words for arrays of independent jobs, and for shards of tests."""

_PARTS_OF_A_HOST = (
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
)
"""Words for devices and threads, of which one host has several."""

_GROUPS = (
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
)
"""Words for groups of ranks inside a job, and for data loaders."""

_SERVICES = (
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
    "REDIS",
    "SSH",
    "TRUSTED",
    "VAULT",
    "ZOOKEEPER",
)
"""Words for services that a job may use."""

_OTHER_WORDS = frozenset((*_ARRAYS, *_PARTS_OF_A_HOST, *_GROUPS, *_SERVICES))
"""Words for counts, indices and lists that are not about hosts."""

_FILLER_WORDS = ("ALL", "CURRENT", "MY", "OF", "OWN", "THIS")
"""Words that change nothing: MY_HOST_INDEX is HOST_INDEX."""

_IGNORED_PREFIXES = ("SM_", "TRAINWORKS_", "KUBERNETES_", "CLOUD_RUN_")
"""Beginnings of variables that are never read here: the launcher's exports, Kubernetes' links to
Services, and Cloud Run's arrays of independent tasks.
"""

_TWO_WORDS = re.compile(
    r"(N|NUM)((?:NODE|HOST|PROC|TASK|WORKER|REPLICA|RANK)S)"
    r"|((?:NODE|HOST|MACHINE|PROC|TASK|WORKER|RANK|JOB)S?)(COUNT|FILE|ID|INDEX|IPS|LIST|NAMES|NO|NUM|RANK)"
)
"""Two words without an underscore between them, for example NNODES or NODELIST."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_FOUR_NUMBERS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9}){3}")
"""An IPv4 address, or a mistake in one: no host's name has this form (RFC 1123, 2.1)."""

_LARGEST_BYTE = 255
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%\w+)?")
_NUMBER = re.compile(r"\d{1,6}")
_FILE_OF_THE_SYSTEM = "/etc/hosts"


class Pair(NamedTuple):
    """A count of hosts or processes with an index: ``X_NODE_COUNT=2`` and ``X_NODE_INDEX=0``.

    Attributes:
        size: Value of the count; more than one.
        place: Value of the index; from 0, or from 1.
        names: Names of the count and of the index.
        vendor: Words with which both names begin, for example ``("X",)``; ``()`` for none.
        of_hosts: Whether the count is a number of hosts. A number of processes counts as one if
            each host has one process as far as is known (JAX).
    """

    size: int
    place: int
    names: tuple[str, str]
    vendor: tuple[str, ...]
    of_hosts: bool

    def __str__(self) -> str:
        """Return ``X_NODE_COUNT=2, X_NODE_INDEX=0``."""
        return f"{self.names[0]}={self.size}, {self.names[1]}={self.place}"


class HostList(NamedTuple):
    """A list of hosts.

    Attributes:
        name: Variable that has the list, or the path of a file with the list.
        hosts: Names or addresses, in order.
        in_file: Whether the list is in a file.
    """

    name: str
    hosts: tuple[str, ...]
    in_file: bool = False


class _Name(NamedTuple):
    """A variable's name in parts.

    Attributes:
        vendor: First words, for example ``("X",)`` of X_NODE_COUNT.
        objects: Words of _HOST_WORDS and _PROCESS_WORDS, ``("NODE",)``.
        role: Word of _COUNT_WORDS or _INDEX_WORDS, ``COUNT``.
    """

    vendor: tuple[str, ...]
    objects: tuple[str, ...]
    role: str


def find_pairs(variables: Mapping[str, str]) -> tuple[Pair, ...]:
    """Return each count with its index, those of hosts first; ``()`` for none.

    The count is above one, so this process is one of several. An index may begin at 0 or at 1. A
    count with several indices, or an index with several counts, is in several pairs.
    """
    counts: dict[str, _Name] = {}
    indices: dict[str, _Name] = {}
    numbers = _read_numbers(variables)
    for name, number in numbers.items():
        parts = _parts(name)
        if parts is None:
            continue
        if parts.role in _COUNT_WORDS and number > 1:
            counts[name] = parts
        elif parts.role in _INDEX_WORDS:
            indices[name] = parts

    matches = []
    for count_name, count in counts.items():
        size = numbers[count_name]
        for index_name, index in indices.items():
            place = numbers[index_name]
            if not _belong_together(count, index) or place > size:
                continue
            objects = {*count.objects, *index.objects}
            of_hosts = bool(objects & _HOST_WORDS) or objects == {"PROCESS"}
            matches.append(Pair(size, place, (count_name, index_name), count.vendor, of_hosts))
    return tuple(sorted(matches, key=lambda pair: not pair.of_hosts))


def _read_numbers(variables: Mapping[str, str]) -> dict[str, int]:
    """Return the variables whose value is a number of at most six digits, sorted by name."""
    numbers = {}
    for name, value in sorted(variables.items()):
        if _NUMBER.fullmatch(value.strip()):
            numbers[name] = int(value)
    return numbers


def find_lists(variables: Mapping[str, str], read: Callable[[str], str]) -> tuple[HostList, ...]:
    """Return the lists of two hosts or more.

    Args:
        variables: The process's environment.
        read: Returns the text of a file, ``""`` if it cannot be read.
    """
    listed = []
    for name, value in sorted(variables.items()):
        words = _words(name)
        # Variables of the launcher and of services, and words for parts of a host or for groups of
        # ranks.
        if name.startswith(_IGNORED_PREFIXES) or not _OTHER_WORDS.isdisjoint(words):
            continue
        host_words = {_singular(word) for word in words} & _HOST_WORDS
        in_file = "FILE" in words and bool(host_words)
        has_list_word = not _LIST_WORDS.isdisjoint(words[1:])
        is_list = has_list_word and (bool(host_words) or "TASK" in words)
        if in_file and value != _FILE_OF_THE_SYSTEM and value.startswith("/"):
            hosts = _addresses(_first_words(read(value)))
        elif is_list and not in_file:
            hosts = _addresses(re.split(r"[,;\s]+", value.strip()))
        else:
            continue
        if len(hosts) > 1:
            listed.append(HostList(name, hosts, in_file))
    return tuple(listed)


def _first_words(document: str) -> list[str]:
    """Return the first word of each line, without comments: ``a`` of ``a slots=8  # rack 1``."""
    first_words = []
    for line in document.splitlines():
        words = line.split("#")[0].split()
        first_words += words[:1]
    return first_words


def find_index(variables: Mapping[str, str], listed: HostList) -> str:
    """Return the variable with this host's index in a list, as X_NODE_RANK; ``""`` for none."""
    vendor = _words(listed.name)[:1]
    for name, number in _read_numbers(variables).items():
        parts = _parts(name)
        if parts is None or parts.role not in _INDEX_WORDS:
            continue
        is_of_hosts = bool({*parts.objects} & _HOST_WORDS)
        if parts.vendor[:1] == vendor and is_of_hosts and number < len(listed.hosts):
            return name
    return ""


def find_leader(variables: Mapping[str, str], vendor: tuple[str, ...]) -> tuple[str, str]:
    """Return the variable and the address of the leader: X_MASTER_ADDR and ``10.0.0.4``.

    ``("", "")`` if there is none.

    Args:
        variables: The process's environment.
        vendor: First words of the variable's name, from ``Pair.vendor``.
    """
    for name, value in sorted(variables.items()):
        words = _words(name)
        is_leader = not _LEADER_WORDS.isdisjoint(words) and words[-1] in _ADDRESS_WORDS
        if not is_leader or words[: len(vendor)] != vendor:
            continue
        # Any other word means the leader of something else, such as X_DB_MASTER_ADDR.
        rest = {_singular(word) for word in words[len(vendor) :]}
        if not rest <= _LEADER_WORDS | _ADDRESS_WORDS | _HOST_WORDS:
            continue
        address = _without_port(value.strip())
        if is_host_name(address):
            return name, address
    return "", ""


def find_hints(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return counts above one and indices that may mean several hosts, as ``X_NODE_COUNT=2``.

    A count without an index, or an index without a count, is only a hint.
    """
    counts: dict[str, int] = {}
    indices: dict[str, int] = {}
    for name, number in _read_numbers(variables).items():
        parts = _parts(name)
        if parts is None:
            continue
        # Neither a word for a host nor for an allocation of hosts or a rank: no hint.
        if {*_HOST_WORDS, "ALLOC", "RANK"}.isdisjoint(parts.objects + parts.vendor[-1:]):
            continue
        is_bare_worker = parts.objects == ("WORKER",) and not parts.vendor
        is_of_loader = is_bare_worker and parts.role in ("N", "NUM", "NUMBER")  # NUM_WORKERS=4
        if parts.role in _COUNT_WORDS and not is_of_loader:
            counts[name] = number
        elif parts.role in ("INDEX", "RANK") or "RANK" in parts.objects:
            indices[name] = number
    # A count of one explains an index of 0: the job has one host.
    has_count_of_one = 1 in counts.values()
    assignments = [f"{name}={count}" for name, count in counts.items() if count > 1]
    for name, index in indices.items():
        if index > 0 or not has_count_of_one:
            assignments.append(f"{name}={index}")
    return tuple(sorted(assignments))


def is_host_name(name: str) -> bool:
    """Return whether a text can be a host's name or address.

    Refused: text that a manifest or a shell did not expand (``$(LEADER)``), ``host:port``, and four
    numbers that are not an address (``10.0.0.300``).
    """
    if _FOUR_NUMBERS.fullmatch(name):
        return all(int(number) <= _LARGEST_BYTE for number in name.split("."))
    if _HOST_NAME.fullmatch(name):
        return True
    return name.count(":") > 1 and _IPV6.fullmatch(name) is not None


def _words(name: str) -> tuple[str, ...]:
    """Return the words of a variable's name.

    >>> _words("X_NNODES"), _words("NODELIST")
    (('X', 'N', 'NODES'), ('NODE', 'LIST'))
    """
    words: list[str] = []
    for part in filter(None, name.upper().split("_")):
        match = _TWO_WORDS.fullmatch(part)
        if match:
            words += filter(None, match.groups())
        else:
            words.append(part)
    return tuple(words)


def _parts(name: str) -> _Name | None:
    """Return the parts of a name with a count or an index of hosts or processes.

    None for any other name.

    >>> _parts("X_NODE_COUNT")
    _Name(vendor=('X',), objects=('NODE',), role='COUNT')
    """
    words = _words(name)
    if (
        name.startswith(_IGNORED_PREFIXES)
        or len(words) < 2
        or not _OTHER_WORDS.isdisjoint(words[:-1])
    ):
        return None
    # The last word says what an index is; a count may have its word anywhere (NUM_NODES), and a
    # name with both is a count (NUM_NODE_ID).
    role = words[-1] if words[-1] in _INDEX_WORDS else ""
    if not role or not _COUNT_WORDS.isdisjoint(words[:-1]):
        counts = [word for word in words if word in _COUNT_WORDS]
        role = counts[-1] if counts else ""
    if not role:
        return None

    # The vendor's words end at the first word for a host or a process.
    known = _HOST_WORDS | _PROCESS_WORDS
    rest = [_singular(word) for word in words if word not in (role, *_FILLER_WORDS)]
    split = 0
    while split < len(rest) and rest[split] not in known:
        split += 1
    vendor, objects = tuple(rest[:split]), tuple(rest[split:])
    if not {*objects} <= known:
        return None
    return _Name(vendor, objects, role)


def _belong_together(count: _Name, index: _Name) -> bool:
    """Return whether a count and an index describe the same hosts or processes.

    They begin with the same words, and have the same objects or fit by their role.
    """
    if count.vendor != index.vendor:
        return False
    # JOB_COUNT and JOB_ID: the number of jobs, and the name of this one.
    if count.objects == index.objects and count.objects not in ((), ("JOB",)):
        return True
    # Without common first words, different objects show no relation.
    if not count.vendor:
        return False
    if count.objects and index.objects:
        # X_JOB_ID is the name of a job; X_NODE_ID is mostly a number.
        has_common_object = not {*index.objects}.isdisjoint(count.objects)
        return index.role != "ID" or has_common_object
    return index.role == "RANK"


def _singular(word: str) -> str:
    """Return a word without its plural ending: NODE for NODES, PROCESS for PROCESSES."""
    if word.endswith("SSES"):
        return word[:-2]
    if word.endswith("S") and not word.endswith("SS"):
        return word[:-1]
    return word


def _addresses(words: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts among words, without ports and duplicates; () if one is not a name."""
    hosts = [_without_port(word) for word in words if word]
    if not all(map(is_host_name, hosts)):
        return ()
    return tuple(dict.fromkeys(hosts))


def _without_port(address: str) -> str:
    """Return the host of ``host:port`` or ``[fd00::1]:port``."""
    host = without_brackets(address)
    if host.count(":") > 1:  # an IPv6 address
        return host
    return host.partition(":")[0]
