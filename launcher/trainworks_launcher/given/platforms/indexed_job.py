"""Kubernetes' Indexed Job, and JobSet, which is made of them: a pod knows its index and nothing of the others. Pure.

So the manifest says the hosts, and plain ``hosts`` reads them, with the index. What is left to this file are pods whose
manifest does not: they may be parts of one job, or jobs of their own, and are not started as the wrong one.
Source: Kubernetes, Jobs, completion mode; the variable is set in every container of an Indexed Job.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.given.platforms import Description, Given
from trainworks_launcher.given.platforms.common import Reader

_ADVICE = (
    f"set {names.HOSTS_VARIABLE} in the manifest, for example JOB-[0-3].SERVICE (docs/platforms/jobset.md); if each pod"
    f" is a job of its own, set it to the pod's own name"
)


def describe(given: Given) -> Description:
    """Return what is missing."""
    reader = Reader(given.variables, "a Kubernetes Indexed Job", _ADVICE)
    reader.text(names.HOSTS_VARIABLE)
    return Description(problems=reader.problems)
