"""Reads variables and lists of hosts, for the files of all platforms. Pure."""

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

_MAX_SHOWN = 16
"""Hosts of a list, or characters of a number, that a message shows."""

_NODES_LIMIT = 65536
"""Largest number of nodes in one list, of hosts and of ranks. ``a[0-999999999]`` would fill the
memory.
"""

_DIGITS = 9
"""Digits of the longest number that is read."""


class Reader:
    """Reads a platform's variables, and collects the problems with them.

    Attributes:
        wrong: Problems with variables that are set.
        missing: Names of required variables that are not set.
    """

    def __init__(self, variables: Mapping[str, str], title: str, advice: str) -> None:
        """Begin without problems.

        Args:
            variables: The process's environment.
            title: Name of the platform for messages, for example ``AWS Batch``.
            advice: How to start the job so that all variables are set.
        """
        self.wrong: list[Problem] = []
        self.missing: list[str] = []
        self._variables = variables
        self._title = title
        self._advice = advice

    def address(self, name: str) -> str:
        """Return the leader's address, for example ``10.0.0.4``, in a job of several hosts.

        ``""`` if the variable is not set, which is noted. Note a problem if the other hosts cannot
        reach the address (``why_no_leader``); it is returned nevertheless.
        """
        address = without_brackets(self.text(name))
        if not address:
            return ""
        mistake = why_no_leader(address)
        if mistake:
            self.refuse(mistake, name, advice="give the name or address of the first host alone")
        return address

    def text(self, *aliases: str) -> str:
        """Return the value of the first variable that is set.

        If none is set, return ``""`` and note the first one as missing.

        Args:
            aliases: Names of one variable in different releases of the platform.
        """
        value = self.optional(*aliases)
        if not value:
            self.missing.append(aliases[0])
        return value

    def optional(self, *aliases: str) -> str:
        """Return the value of the first variable that is set; ``""`` if none is."""
        for name in aliases:
            value = self._variables.get(name, "").strip()
            if value:
                return value
        return ""

    def integer(self, *aliases: str, least: int = 0, most: int | None = None) -> int:
        """Return the value of the first variable that is set, as an integer.

        ``least`` if the variable is missing or wrong, which is noted. most: largest number; None:
        _NODES_LIMIT.
        """
        value = self.text(*aliases)
        return self.number(value, aliases[0], least=least, most=most)

    def index(self, *aliases: str, count: int) -> int:
        """Return the index of one of ``count`` hosts or ranks, from 0.

        0 if the variable is missing or wrong, which is noted.
        """
        # A count that is itself missing or wrong is no limit.
        most = None if self.problems else count - 1
        return self.integer(*aliases, most=most)

    def number(self, value: str, name: str, least: int = 0, most: int | None = None) -> int:
        """Return a variable's value, or a part of it, as an integer. A wrong one is noted.

        Args:
            value: Text of the number; ``""`` if the variable is missing, which ``text`` has noted.
            name: Name of the variable.
            least: Smallest number; the result if the value is missing or wrong.
            most: Largest number; None: _NODES_LIMIT.
        """
        if not value:
            return least
        limit = _NODES_LIMIT if most is None else most
        is_number = value.isdecimal() and len(value) <= _DIGITS
        if is_number and least <= int(value) <= limit:
            return int(value)

        shown = value
        if len(value) > _MAX_SHOWN:
            shown = f"{value[:_MAX_SHOWN]}..."
        if most is not None:
            possible = f"from {least} to {most}"
        else:
            possible = f"of at least {least}"
            # A number other than 0 is wrong because it is too large.
            if value.isdecimal() and value.strip("0"):
                possible += " that a job can have"
        self.refuse(f"{shown!r} is not a whole number {possible}", name)
        return least

    def refuse(self, mistake: str, *variables: str, advice: str = "") -> None:
        """Note a problem with variables.

        Args:
            mistake: The mistake, one sentence without a full stop.
            variables: Names of the variables.
            advice: The remedy; ``""``: the platform's general one.
        """
        noun = "variable" if len(variables) == 1 else "variables"
        where = f"{noun} {', '.join(variables)}"
        self.wrong.append(Problem(mistake, where, advice or self._advice))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems; one problem names all missing variables together."""
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


def make_config(hosts: Sequence[str], current: str) -> Mapping[str, Json]:
    """Return a resource config.

    Args:
        hosts: Names of all hosts, the leader first.
        current: This host's name.
    """
    return MappingProxyType({"current_host": current, "hosts": [*hosts]})


RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Variables by which torch.distributed finds rank 0's store."""


def find_rendezvous(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names in RENDEZVOUS that are set; the launcher leaves these variables alone."""
    return tuple(name for name in RENDEZVOUS if variables.get(name))


def is_loopback(address: str) -> bool:
    """Return whether a name or an address leads every host to itself, for example 127.0.0.1."""
    if address in ("localhost", "::1"):
        return True
    return re.fullmatch(r"127(\.\d{1,3}){3}", address) is not None


def why_no_leader(address: str, count: int = 0) -> str:
    """Return why other hosts cannot reach a leader at an address; ``""`` if they can.

    An address with a scheme (``tcp://a``), a port or an unexpanded variable (``$LEADER``) is
    refused.

    Args:
        address: The leader's name or address.
        count: Number of hosts; 0: not known.
    """
    if is_loopback(address):
        return f"{address!r} leads every host to itself, and the job has {count or 'several'}"
    if not is_host_name(address):
        return f"{address!r} is not the name or address of a host alone"
    return ""


def describe_one_host(title: str, where: str, words: Iterable[str], advice: str) -> Description:
    """Return a job of this one host; a refusal if the scheduler names several hosts, or none.

    Args:
        title: Name of the scheduler, for example ``LSF``.
        where: Variable with the hosts, for example ``LSB_MCPU_HOSTS``.
        words: Names of the hosts; a name may come more than once.
        advice: How to start the launcher on every host.
    """
    hosts = tuple(dict.fromkeys(words))
    if len(hosts) == 1:
        return Description(where=where)
    if hosts:
        mistake = f"{title} gave the job {len(hosts)} hosts"
        example = ",".join(hosts[:_MAX_SHOWN])
        if len(hosts) > _MAX_SHOWN:
            example += ",..."
    else:
        mistake = f"{where} does not say which hosts the job has"
        example = "a,b"
    mistake += ", and not how train is started on them"
    advice += (
        f", and set {names.HOSTS_VARIABLE}={example} and {names.HOST_VARIABLE} to the host's"
        " own name; for a job of this one host set both to its name"
    )
    problem = Problem(mistake, f"the variables of {title}", advice)
    return Description(problems=(problem,))


def make_labels(count: int) -> tuple[str, ...]:
    """Return labels for hosts with unknown names: ``node-0``, ``node-1``."""
    return tuple(f"node-{index}" for index in range(count))


def read_number(value: str) -> int:
    """Return a text as a number; 0 if it is not a number."""
    if value.isdecimal() and len(value) <= _DIGITS:
        return int(value)
    return 0


class AddressVariables(NamedTuple):
    """Names of the variables with which a platform tells every node the addresses of all nodes.

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


def describe_by_addresses(
    sources: Sources, title: str, advice: str, variables: AddressVariables
) -> Description:
    """Return the hosts of a platform that tells every node the addresses of all nodes.

    Args:
        sources: The sources of the platform.
        title: Name of the platform, for messages.
        advice: How to start the job so that all variables are set.
        variables: Names of the platform's variables.
    """
    reader = Reader(sources.variables, title, advice)
    nodes = reader.integer(variables.nodes, least=1)
    index = reader.index(variables.rank, count=nodes)
    gpus = _read_gpus(reader.optional(variables.gpus))
    if nodes == 1 and not reader.problems:  # a single node needs no address
        return Description(where=variables.nodes, gpus=gpus)

    hosts = tuple(without_brackets(reader.text(variables.addresses)).split())
    if hosts and len(hosts) != nodes:
        mistake = f"{len(hosts)} address(es) for {nodes} node(s)"
        reader.refuse(mistake, variables.addresses, variables.nodes)
    leader = ""
    if variables.leader:
        leader = without_brackets(reader.text(variables.leader))
    if reader.problems:
        return Description(problems=reader.problems)

    current = hosts[index]
    if leader in hosts:  # the leader comes first, even if its index is not 0
        workers = [host for host in hosts if host != leader]
        hosts = (leader, *workers)
    return Description(
        resource_config=make_config(hosts, current), where=variables.addresses, gpus=gpus
    )


def _read_gpus(value: str) -> int | None:
    """Return the platform's number of GPUs; None if its variable is not set."""
    return read_number(value) if value else None


def expand_nodes(listed: str) -> tuple[str, ...]:
    """Return the names in Slurm's form of a node list, in order.

    Raises:
        ValueError: The text is not such a list, or names too many nodes.

    >>> expand_nodes("gpu[08-10],login,r[1-2]n[0,2]")
    ('gpu08', 'gpu09', 'gpu10', 'login', 'r1n0', 'r1n2', 'r2n0', 'r2n2')
    """
    nodes: list[str] = []
    # Words are separated by commas outside of brackets. A comma is a word, and so is a bracket
    # without its counterpart.
    for word in re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+|[\[\],]", listed.replace(" ", "")):
        if word == ",":
            continue
        # Pairs of (text in brackets, plain text), of which one is empty.
        parts = re.findall(r"\[([^\[\]]*)\]|([^\[\]]+)", word)
        if not parts or word in "[]":
            raise ValueError(f"{listed!r} is not a list of nodes")
        # A word of several parts, such as r[1-2]n[0,2], names one node for each combination.
        choices: list[tuple[str, ...]] = []
        size = 1
        for bracket, plain in parts:
            choice = (plain,) if plain else tuple(_expand_bracket(bracket, listed))
            choices.append(choice)
            size *= len(choice)
        if len(nodes) + size > _NODES_LIMIT:
            raise ValueError(f"{listed!r} names more than {_NODES_LIMIT} nodes")
        for words in product(*choices):
            nodes.append("".join(words))
    if not nodes:
        raise ValueError(f"{listed!r} names no node")
    return tuple(nodes)


def _expand_bracket(bracket: str, listed: str) -> Iterator[str]:
    """Yield the numbers in a bracket: 08, 09, 10 and 12 for ``08-10,12``.

    All numbers of a range have as many digits as its first one.

    Args:
        bracket: Text between the brackets.
        listed: The list that has the bracket, for the error.

    Raises:
        ValueError: An entry is not a number or a range, or a range is too long.
    """
    for entry in bracket.split(","):
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
