"""PBS (OpenPBS, PBS Professional, Torque): a job's hosts are in a file, and a script runs on the first one only. Pure.

As with LSF, a job of one host is recognised, and one of several is told the hosts by a person. Sources: OpenPBS,
qsub(1B), Environment variables, PBS_NODEFILE; Torque, qsub, PBS_NUM_NODES.
"""

from __future__ import annotations

from trainworks_launcher.given.platforms import Description, Given
from trainworks_launcher.given.platforms.common import on_one_host

_ADVICE = "start train once on each host, for example with pbsdsh"


def describe(given: Given) -> Description:
    """Return the job of this one host, or what to set on several."""
    variables = given.variables
    words = given.read(variables.get("PBS_NODEFILE", "")).split()
    if not words and variables.get("PBS_NUM_NODES", "").strip() == "1":
        words = [given.hostname]
    number = variables.get("PBS_JOBID", "").strip()
    return on_one_host("PBS", "PBS_NODEFILE", words, _ADVICE)._replace(job_id=number)
