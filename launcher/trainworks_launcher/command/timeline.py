"""The hosts of a job that has ended, as lines of time: until the first output, until the end. Pure."""

from __future__ import annotations

from typing import Mapping

from trainworks_launcher.contract.values import Json, mapping, printable, text

_WIDTH = 40
_HOSTS = 20


def timeline(summary: Mapping[str, Json]) -> tuple[str, ...]:
    """Return a line a host; ``()`` for what is no summary of a job.

    Args:
        summary: What names.SUMMARY_FILE has: seconds, and of each host the seconds to its first output.
    """
    whole, listed = _seconds(summary.get("seconds")), summary.get("hosts")
    hosts = [mapping(host) for host in listed] if isinstance(listed, list) else []
    if whole is None or not hosts:
        return ()
    end = printable(text(summary.get("kind")))[:20]
    lines = [f"Last run, {end} {whole:,.1f} s after the start of the program (. no output yet, # after the first):"]
    names = [printable(text(host.get("host")))[:80] for host in hosts[:_HOSTS]]
    width = max(map(len, names))
    for name, host in zip(names, hosts):
        first = _seconds(host.get("seconds_to_first_output"))
        silent = _WIDTH if first is None else min(round(_WIDTH * first / whole), _WIDTH) if whole else 0
        said = "no output is known" if first is None else f"first output after {first:,.1f} s"
        lines.append(f"  {name:<{width}}  {'.' * silent}{'#' * (_WIDTH - silent)}  {said}")
    if len(hosts) > _HOSTS:
        lines.append(f"  and {len(hosts) - _HOSTS} more hosts")
    return tuple(lines)


def _seconds(value: Json) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
        return None
    return float(value)
