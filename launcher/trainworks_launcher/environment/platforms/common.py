"""What the platforms share: a reader of variables that names all that is
missing, and the form of the hosts. Pure.
"""

from __future__ import annotations

import re
from itertools import product
from types import MappingProxyType
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.contract.json_values import Json, without_brackets
from trainworks_launcher.environment.cluster_hosts import is_host_name
from trainworks_launcher.environment.platforms import Description, Sources

_SHOWN = 16
"""Hosts of a list in a message."""

_NODES_LIMIT = 65536
"""Nodes of one list, and the largest number of hosts or ranks: a few characters
can name very many.
"""

_DIGITS = 9
"""Of a number that is read at all."""


class Reader:
    """Reads a platform's variables.

    Attributes:
        wrong: What is wrong with those that are there.
        missing: Names of those that are not.
    """

    def __init__(self, variables: Mapping[str, str], title: str, advice: str) -> None:
        """Keep what the messages need. title: of the platform. advice: how to
        start the job so that all are there.
        """
        self.wrong: list[Problem] = []
        self.missing: list[str] = []
        self._variables = variables
        self._title = title
        self._advice = advice

    def address(self, name: str) -> str:
        """Return the leader's address, of a job with several hosts.

        What ``why_no_leader`` tells is wrong.
        """
        value = without_brackets(self.text(name))
        why = why_no_leader(value) if value else ""
        if why:
            self.refuse(why, name, advice="give the name or address of the first host alone")
        return value

    def text(self, *named: str) -> str:
        """Return the first of the variables that is set.

        ``""`` if none is, and then the first is missing.
        """
        value = self.optional(*named)
        if not value:
            self.missing.append(named[0])
        return value

    def optional(self, *named: str) -> str:
        """Return the first of the variables that is set; ``""`` if none is."""
        for name in named:
            value = self._variables.get(name, "").strip()
            if value:
                return value
        return ""

    def whole(self, *named: str, least: int = 0, most: int | None = None) -> int:
        """Return the first of the variables that is set as a whole number.

        ``least`` if it is missing or wrong.
        """
        value = self.text(*named)
        if not value:
            return least
        return self.number(value, named[0], least=least, most=most)

    def index(self, *named: str, count: int) -> int:
        """Return the first of the variables that is set as the number of one of
        ``count`` hosts or ranks, from 0.

        Nothing is held to a count that is itself missing or wrong.
        """
        return self.whole(*named, most=None if self.problems else count - 1)

    def number(self, value: str, name: str, least: int = 0, most: int | None = None) -> int:
        """Return a part of a variable as a whole number.

        ``least`` if it is missing, noted elsewhere, or wrong.
        """
        if not value:
            return least
        limit = _NODES_LIMIT if most is None else most
        is_number = value.isdecimal() and len(value) <= _DIGITS
        if is_number and least <= int(value) <= limit:
            return int(value)

        shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        if most is not None:
            possible = f"from {least} to {most}"
        else:
            possible = f"of at least {least}"
            if value.isdecimal() and value.strip("0"):
                possible += " that a job can have"
        self.refuse(f"{shown!r} is not a whole number {possible}", name)
        return least

    def refuse(self, what: str, *named: str, advice: str = "") -> None:
        """Note what is wrong with variables. advice: the one that applies.

        Default: the platform's.
        """
        noun = "variable" if len(named) == 1 else "variables"
        where = f"{noun} {', '.join(named)}"
        self.wrong.append(Problem(what, where, advice or self._advice))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong, with all that is missing in one."""
        if not self.missing:
            return tuple(self.wrong)
        missing = dict.fromkeys(self.missing)
        unset = [name for name in missing if name not in self._variables]
        empty = [name for name in missing if name in self._variables]
        parts = []
        if unset:
            parts.append(f"{_are(unset)} not set")
        if empty:
            parts.append(f"{_are(empty)} set, but empty")
        problem = f"{' and '.join(parts)}, so the job's other hosts are not known"
        return (Problem(problem, f"the variables of {self._title}", self._advice), *self.wrong)


def _are(variables: Sequence[str]) -> str:
    """Return names as the subject of a sentence: ``A is``, ``A, B are``."""
    verb = "is" if len(variables) == 1 else "are"
    return f"{', '.join(variables)} {verb}"


def config_of(hosts: Sequence[str], current: str) -> Mapping[str, Json]:
    """Return hosts, the leader first, and this host's name, in the form of the resource config."""
    return MappingProxyType({"current_host": current, "hosts": [*hosts]})


RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Where rank 0's store is, for scripts that find each other by themselves."""


def given_rendezvous(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return those of RENDEZVOUS that somebody has set, to be kept as they are."""
    return tuple(name for name in RENDEZVOUS if variables.get(name))


def is_loopback(address: str) -> bool:
    """Return whether a name or an address is that of the host which uses it."""
    return (
        address in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", address) is not None
    )


def why_no_leader(address: str, count: int = 0) -> str:
    """Return why an address cannot be the leader's of several hosts.

    ``""`` if it can. count: of hosts, if known.

    One with a scheme, a port or an unexpanded variable is reached by no host.
    """
    if is_loopback(address):
        return f"{address!r} leads every host to itself, and the job has {count or 'several'}"
    if not is_host_name(address):
        return f"{address!r} is not the name or address of a host alone"
    return ""


def on_one_host(title: str, where: str, words: Iterable[str], advice: str) -> Description:
    """Return a job of this one host, or a refusal where the scheduler gave
    several hosts, or does not say how many.

    Args:
        title: Name of the scheduler.
        where: Variable that says the hosts.
        words: Names of the hosts; a name may come more than once.
        advice: How to start the launcher on every host.
    """
    hosts = tuple(dict.fromkeys(words))
    if len(hosts) == 1:
        return Description(where=where)
    if hosts:
        what = f"{title} gave the job {len(hosts)} hosts"
        listed = ",".join(hosts[:_SHOWN])
        if len(hosts) > _SHOWN:
            listed += ",..."
    else:
        what = f"{where} does not say which hosts the job has"
        listed = "a,b"
    todo = (
        f"{advice}, and set {names.HOSTS_VARIABLE}={listed} and {names.HOST_VARIABLE} to the host's"
        " own name; for a job of this one host set both to its name"
    )
    problem = Problem(
        f"{what}, and not how train is started on them", f"the variables of {title}", todo
    )
    return Description(problems=(problem,))


def numbered(count: int) -> tuple[str, ...]:
    """Return names for hosts of which only the number is known."""
    return tuple(f"node-{index}" for index in range(count))


def numbers(value: str) -> int:
    """Return a text as a number, 0 for anything else."""
    if value.isdecimal() and len(value) <= _DIGITS:
        return int(value)
    return 0


class AddressVariables(NamedTuple):
    """Names of the variables in which a platform gives every node the addresses of all of them.

    Attributes:
        nodes: Variable with the number of nodes.
        rank: Variable with this node's index.
        addresses: Variable with the addresses, one a line, in the order of the indices.
        gpus: Variable with the GPUs of each node.
        leader: Variable with the first node's address; ``""``: there is none.
    """

    nodes: str
    rank: str
    addresses: str
    gpus: str
    leader: str = ""


def described_by_addresses(
    sources: Sources, title: str, advice: str, variables: AddressVariables
) -> Description:
    """Return the hosts of a platform that gives every node the addresses of all of them.

    Args:
        given: What the platform is read from.
        title: Name of the platform, for messages.
        advice: What to do if variables are missing.
        variables: The platform's variables.
    """
    reader = Reader(sources.variables, title, advice)
    nodes = reader.whole(variables.nodes, least=1)
    index = reader.index(variables.rank, count=nodes)
    if nodes == 1 and not reader.problems:  # it may have no address that others could use
        return Description(where=variables.nodes, gpus=_gpus(reader.optional(variables.gpus)))
    hosts = tuple(without_brackets(reader.text(variables.addresses)).split())
    if hosts and len(hosts) != nodes:
        reader.refuse(
            f"{len(hosts)} address(es) for {nodes} node(s)", variables.addresses, variables.nodes
        )
    first = without_brackets(reader.text(variables.leader)) if variables.leader else ""
    if reader.problems:
        return Description(problems=reader.problems)
    here = hosts[index]
    if first in hosts:  # the leader comes first, even if its index is not 0
        hosts = (first, *(host for host in hosts if host != first))
    return Description(
        resource_config=config_of(hosts, here),
        where=variables.addresses,
        gpus=_gpus(reader.optional(variables.gpus)),
    )


def _gpus(said: str) -> int | None:
    """Return how many GPUs the platform says; None if it does not."""
    return numbers(said) if said else None


def expand_nodes(listed: str) -> tuple[str, ...]:
    """Return the names in a node list, in order.

    Raises:
        ValueError: It is not one, or names too many nodes.

    >>> expand_nodes("gpu[08-10],login,r[1-2]n[0,2]")
    ('gpu08', 'gpu09', 'gpu10', 'login', 'r1n0', 'r1n2', 'r2n0', 'r2n2')
    """
    nodes: list[str] = []
    for word in re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+|[\[\],]", listed.replace(" ", "")):
        if word == ",":
            continue
        parts = re.findall(r"\[([^\[\]]*)\]|([^\[\]]+)", word)
        if not parts or word in "[]":
            raise ValueError(f"{listed!r} is not a list of nodes")
        choices: list[tuple[str, ...]] = []
        size = 1
        for inside, plain in parts:
            choice = (plain,) if plain else tuple(_numbers(inside, listed))
            choices.append(choice)
            size *= len(choice)
        if len(nodes) + size > _NODES_LIMIT:
            raise ValueError(f"{listed!r} names more than {_NODES_LIMIT} nodes")
        nodes += ("".join(words) for words in product(*choices))
    if not nodes:
        raise ValueError(f"{listed!r} names no node")
    return tuple(nodes)


def _numbers(inside: str, listed: str) -> Iterator[str]:
    """Yield what stands for a bracket: ``08-10,12``.

    A number keeps the leading zeros of the first of its range.
    """
    for entry in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", entry)
        if not match:
            raise ValueError(
                f"{listed!r} is not a list of nodes: {entry!r} is not a number or a range"
            )
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first) or int(last) - int(first) >= _NODES_LIMIT:
            raise ValueError(f"{listed!r} is not a list of nodes: {entry!r} is not a range")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
