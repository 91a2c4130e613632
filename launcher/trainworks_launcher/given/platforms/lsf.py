"""IBM Spectrum LSF: a job's hosts are known, but not who starts what on them. Pure.

A job script runs on the first host only, and may start the others in several ways; on some clusters the first host
takes no part. So a job of one host is recognised, and one of several is told the hosts by a person.
Source: IBM Spectrum LSF, Environment variables set for job execution.
"""

from __future__ import annotations

from trainworks_launcher.given.platforms import Description, Given
from trainworks_launcher.given.platforms.common import on_one_host

_ADVICE = "start train once on each host, for example with blaunch"


def describe(given: Given) -> Description:
    """Return the job of this one host, or what to set on several."""
    variables = given.variables
    words = variables.get("LSB_MCPU_HOSTS", "").split()[::2] or variables.get("LSB_HOSTS", "").split()
    words = words or given.read(variables.get("LSB_DJOB_HOSTFILE", "")).split()
    index = variables.get("LSB_JOBINDEX", "0").strip()
    number = "_".join(word for word in (variables.get("LSB_JOBID", "").strip(), index) if word not in ("", "0"))
    return on_one_host("LSF", "LSB_MCPU_HOSTS", words, _ADVICE)._replace(job_id=number)
