"""The identity of a job: values that all its hosts share, so that no host of another job, or of an
earlier attempt, can join.

Each part is sent as a short digest, and a refusal names the parts that differ. All parts are equal
on every host: the platform gives each host the same hyperparameters and job name, and the image the
same launcher. An edited script, or an image that was built again, makes another job of the same
name. Values that differ by host (paths below the base directory, devices, the rest of the
environment) are not parts.
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
"""Hexadecimal digits of a digest that are sent: enough to tell two jobs apart."""

_MAYBE_UNKNOWN = ("image", "code")
"""Parts that a host may lack: its image has no manifest, or it has no code, which it has to report.
"""


def identity_of(environment: Environment, control: Control, mode: str) -> dict[str, Json]:
    """Return the parts of a job's identity: the part's name for people -> a digest.

    Secrets among the hyperparameters are left out, because a short one could be guessed from its
    digest.
    """
    parts = _parts_of(environment, control, mode)
    digests: dict[str, Json] = {}
    for part, value in parts.items():
        digest = hashlib.sha256(compact(value).encode()).hexdigest()
        digests[part] = digest[:_DIGITS]
    return digests


def _parts_of(environment: Environment, control: Control, mode: str) -> dict[str, Json]:
    """Return the parts of a job's identity: name for people -> value.

    Parts that this host lacks (``_MAYBE_UNKNOWN``) are left out.
    """
    reserved = environment.reserved
    program = entry_point.program_name(environment.variables, reserved)
    command_line = environment.invocation.program
    code = ""
    if command_line or program:
        code = digest_of_entry(environment.code, command_line or (program,))
    if command_line:
        # Not the arguments, which may be a host's own: train -- train.py --node "$SLURM_NODEID".
        count = 2 if command_line[0] == "-m" else 1
        program = " ".join(command_line[:count]) or program
    name = environment.variables.get(names.JOB_NAME_VARIABLE) or reserved.text(names.JOB_NAME)
    attempt = platforms.job_name(environment.platform.platform, environment.variables)
    redacted = Redactor(environment.hyperparameters).json(dict(environment.hyperparameters))
    parts: dict[str, Json] = {
        "launcher version": __version__,
        "job name": [name, *attempt],
        "hosts": [*control.hosts, control.leader, control.minimum_hosts],
        "mode": mode,
        "program": [program, environment.drivers.command, *environment.drivers.arguments],
        "hyperparameters": redacted,
    }
    if environment.manifest.document:
        parts["image"] = environment.manifest.document
    if code:
        parts["code"] = code
    return parts


def as_text(identity: Mapping[str, Json]) -> str:
    """Return an identity as one text for a proof, the same for equal identities."""
    return json.dumps(dict(identity), sort_keys=True)


def differences(ours: Mapping[str, Json], theirs: Json) -> str:
    """Return the names of the parts that differ, for a sentence; "" if the two are one job.

    Parts that the other host may lack are compared only if it has sent them.
    """
    received = mapping(theirs)
    if not received:
        # An older launcher sends something else.
        return "launcher version"
    different = []
    for part, digest in ours.items():
        if part not in received and part in _MAYBE_UNKNOWN:
            continue
        if received.get(part) != digest:
            different.append(part)
    return ", ".join(different)
