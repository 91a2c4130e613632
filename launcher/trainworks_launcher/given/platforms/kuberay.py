"""KubeRay: Ray's pods know their cluster's head, and nothing of each other. Pure.

Source: ray-project/kuberay, ray-operator/controllers/ray/common/pod.go, setContainerEnvVars.
"""

from __future__ import annotations

from trainworks_launcher.contract import names
from trainworks_launcher.given.platforms import Description, Given
from trainworks_launcher.given.platforms.common import Reader

_ADVICE = (
    f"let Ray start the script itself, or set {names.HOSTS_VARIABLE} and {names.HOST_VARIABLE} on every host that runs"
    " train; if each is a job of its own, set both to its own name"
)


def describe(given: Given) -> Description:
    """Return what is missing."""
    reader = Reader(given.variables, "KubeRay", _ADVICE)
    reader.text(names.HOSTS_VARIABLE)
    return Description(problems=reader.problems)
