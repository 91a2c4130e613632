"""What the hosts of one job have in common, so that no host of another job, or
of an earlier attempt, is let in.

Each part is sent as a short digest, and the refusal names the parts that differ. All of them are
equal on every host: the platform gives each host the same hyperparameters and job name, and the
image the same launcher. A script that was edited, or an image that was built anew, makes another
job of the same name. What differs by host (paths below the base directory, devices, the rest of the
environment) is not among them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Mapping

from trainworks_launcher import __version__
from trainworks_launcher.contract import names
from trainworks_launcher.contract.json_values import Json, compact, mapping
from trainworks_launcher.contract.redaction import Redactor
from trainworks_launcher.environment import entry_point, platforms
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.environment.source_dir import digest_of_entry
from trainworks_launcher.plan.plan import Control

_DIGITS = 16
_MAYBE_UNKNOWN = ("image", "code")
"""Parts that a host need not know: its image has no manifest, or the code is
missing there, which it has to tell.
"""


def identity_of(environment: Environment, control: Control, mode: str) -> dict[str, Json]:
    """Return the parts of a job's identity: what a person calls each, and a digest of it.

    Secrets among the hyperparameters are left out, because a short one could be
    guessed from its digest.
    """
    reserved = environment.reserved
    program = entry_point.program_name(environment.variables, reserved)
    asked = environment.invocation.program
    # Arguments of a command line may be a host's own: train -- train.py --node "$SLURM_NODEID".
    code = digest_of_entry(environment.code, asked or (program,)) if asked or program else ""
    program = " ".join(asked[:2] if asked[:1] == ("-m",) else asked[:1]) or program
    name = environment.variables.get(names.JOB_NAME_VARIABLE) or reserved.text(names.JOB_NAME)
    attempt = platforms.job_name(environment.platform.platform, environment.variables)
    parts: Mapping[str, Json] = {
        "launcher version": __version__,
        "job name": [name, *attempt],
        "hosts": [*control.hosts, control.leader, control.minimum_hosts],
        "mode": mode,
        "program": [program, environment.drivers.command, *environment.drivers.arguments],
        "hyperparameters": Redactor(environment.hyperparameters).json(
            dict(environment.hyperparameters)
        ),
    }
    known = {"image": environment.manifest.document, "code": code}
    parts = {**parts, **{part: value for part, value in known.items() if value}}
    return {
        part: hashlib.sha256(compact(value).encode()).hexdigest()[:_DIGITS]
        for part, value in parts.items()
    }


def as_text(identity: Mapping[str, Json]) -> str:
    """Return an identity as one text, for a proof."""
    return json.dumps(dict(identity), sort_keys=True)


def differences(ours: Mapping[str, Json], theirs: Json) -> str:
    """Return the parts that differ, for a sentence; "" if the two are one job.

    What is not known is not compared.
    """
    found = mapping(theirs)
    if not found:
        return "launcher version"
    compared = (part for part in ours if part in found or part not in _MAYBE_UNKNOWN)
    return ", ".join(part for part in compared if found.get(part) != ours[part])
