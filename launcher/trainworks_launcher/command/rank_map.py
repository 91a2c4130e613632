"""Draw which rank is on which host and GPU: a line for each host, a column for each GPU. Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import Sequence

from trainworks_launcher.contract.modes import MODES
from trainworks_launcher.environment.environment import Devices
from trainworks_launcher.job.placement import Placement

_MAX_HOSTS = 12
"""Hosts that are shown."""

_MAX_COLUMNS = 16
"""Ranks of a host that are shown one by one; of more only the first and the last one."""


def rank_map(placement: Placement, devices: Devices) -> tuple[str, ...]:
    """Draw the map of a job's ranks.

    A rank has the GPU of its local rank, which is how scripts choose it. All hosts are drawn with
    the number of GPUs of this host, because the others' is not known.

    Args:
        placement: The hosts and the ranks of each.
        devices: The GPUs of this host.

    Returns:
        The lines; ``()`` for a job of one process, or one that has no ranks.
    """
    mode, hosts, slots = MODES[placement.mode], placement.distribution_hosts, placement.slots
    if mode.one_per_host or placement.tasks is not None or sum(slots) < 2:
        return ()
    device = "GPU" if devices.gpus else "local"
    columns = max(*slots, devices.gpus, 1)
    # The first rank of each host, and the number of all ranks.
    starts = [0, *accumulate(slots)]
    names = [f"{host} *" if host == placement.host else host for host in hosts]
    # Indices of the hosts that have a line. Of many hosts the first ones, and the last one.
    shown = list(range(len(hosts)))
    if len(hosts) > _MAX_HOSTS:
        shown = [*range(_MAX_HOSTS - 1), len(hosts) - 1]
    width = max(len(names[index]) for index in shown)
    cell_width = max(len(str(starts[-1] - 1)), 2) + 1

    lines = [_title(hosts, slots, devices.gpus - max(slots), device)]
    if columns <= _MAX_COLUMNS:
        heading = [str(column) for column in range(columns)]
        lines.append(f"  {device:<{width}} {_cells(heading, cell_width)}")
    for index in shown:
        ranks: Sequence[int] = range(starts[index], starts[index + 1])
        if columns <= _MAX_COLUMNS:
            idle = ["-"] * (devices.gpus - len(ranks))
            row = _cells([*map(str, ranks), *idle], cell_width)
        else:
            row = f" {ranks[0]}-{ranks[-1]}"
        if index == len(hosts) - 1 and len(shown) < len(hosts):
            lines.append(f"  and {len(hosts) - len(shown)} more hosts, up to")
        lines.append(f"  {names[index]:<{width}} {row}")
    return tuple(lines)


def _cells(texts: Sequence[str], width: int) -> str:
    """Return texts side by side, each right-aligned in so many characters."""
    return "".join(text.rjust(width) for text in texts)


def _title(hosts: Sequence[str], slots: Sequence[int], idle: int, device: str) -> str:
    """Return the first line, for example ``Ranks, 2 hosts x 8 (* is this host):``.

    Args:
        hosts: All hosts.
        slots: Number of ranks of each.
        idle: Number of devices of a host that have no rank; below 1 for none.
        device: ``GPU`` or ``local``.
    """
    title = f"Ranks, {len(hosts)} host"
    if len(hosts) > 1:
        title += "s"
    if len(set(slots)) == 1:
        title += f" x {slots[0]}"
    unused = ""
    if idle == 1:
        unused = f", 1 {device} of each idle"
    elif idle > 1:
        unused = f", {idle} {device}s of each idle"
    return f"{title} (* is this host{unused}):"
