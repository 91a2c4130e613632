"""OAR (Grid'5000 and other clusters): a job's hosts are in a file, and a script runs on the first one only. Pure.

As with LSF, a job of one host is recognised, and one of several is told the hosts by a person. Source: OAR, user
documentation, environment variables of a job: OAR_NODEFILE has a line for each core.
"""

from __future__ import annotations

from trainworks_launcher.given.platforms import Description, Given
from trainworks_launcher.given.platforms.common import on_one_host

_ADVICE = "start train once on each host, for example with oarsh"


def describe(given: Given) -> Description:
    """Return the job of this one host, or what to set on several."""
    variables = given.variables
    words = given.read(variables.get("OAR_NODEFILE", "") or variables.get("OAR_NODE_FILE", "")).split()
    return on_one_host("OAR", "OAR_NODEFILE", words, _ADVICE)._replace(job_id=variables.get("OAR_JOB_ID", "").strip())
