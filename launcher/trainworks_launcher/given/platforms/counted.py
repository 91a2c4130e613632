"""Schedulers of which no more is read than how many hosts, or processes, a job has. Pure.

A job of one is started. One of several is told its hosts by a person: what is not known here (who starts ``train``, on
which hosts, in which order) would be guessed. To know more of one of them, give it a file of its own.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.contract.errors import Problem
from trainworks_launcher.given.platforms import Description, Given

COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "NHOSTS": "Grid Engine (qsub(1), ENVIRONMENTAL VARIABLES)",
        "FLUX_JOB_NNODES": "Flux (flux-environment(7))",
        "COBALT_JOBSIZE": "Cobalt (qsub(1))",
        "_CONDOR_NPROCS": "HTCondor's parallel universe (manual, Parallel Applications)",
        "BEAKER_REPLICA_COUNT": "Beaker (documentation, Distributed training)",
        "LEPTON_JOB_TOTAL_WORKERS": "DGX Cloud Lepton (documentation, Batch jobs)",
        "TPU_WORKER_HOSTNAMES": "Cloud TPU (documentation, Multislice and GKE)",
        "DMLC_NUM_WORKER": "MXJob, or another starter of MXNet (MXNet, Distributed training)",
        "MLP_WORKER_NUM": "Volcengine's machine learning platform (documentation, environment variables)",
        "BT_GROUP_SIZE": "Baseten (documentation, Training, multinode)",
        "NGC_ARRAY_SIZE": "NGC Base Command (user guide, Multi-node jobs)",
        "HOST_NUM": "Tencent's TI platform (documentation, environment variables)",
        "PJM_NODE": "Fujitsu's job operation software (pjsub(1), PJM_NODE)",
        "PADDLE_TRAINERS_NUM": "PaddleJob (kubeflow/training-operator, paddlepaddle/envvar.go)",
        "JAX_NUM_PROCESSES": "a starter of JAX (jax, jax.distributed.initialize)",
        "NUM_NODES": "a manifest",
        "NODE_COUNT": "a manifest",
    }
)
"""Variable with the number, or with the names -> the scheduler that sets it, with its source."""


def describe(given: Given) -> Description:
    """Return the job of this one host, or what to set on several."""
    found = [name for name in COUNTS if name in given.variables]
    several = [name for name in found if _number(given.variables[name]) != 1]
    if not several:
        return Description(where=found[0])
    name = several[0]
    what = f"{name}={given.variables[name]} says that the job has several hosts, and not which ones"
    advice = (
        f"set {names.HOSTS_VARIABLE}=a,b to the same list on every host and {names.HOST_VARIABLE} to its own name; for"
        " a job of this one host set both to its name"
    )
    problem = Problem(what, f"a variable of {COUNTS[name].partition(' (')[0]}", advice)
    return Description(problems=(problem,))


def _number(value: str) -> int:
    """Return the number that a variable says, or how many names it lists; 0 for nothing."""
    words = re.split(r"[,\s]+", value.strip()) if value.strip() else []
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else len(words)
