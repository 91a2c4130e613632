"""The command ``train``, and the entry point of the image.

``train``                      run this host's part of the job
``train --plan [--host NAME]`` print the plan of this host (or another one) as JSON and run nothing
``train --version``, ``--help``
anything else                  executed as given: ``docker run IMAGE bash``
"""

from __future__ import annotations

import os
import sys
from typing import Sequence

from trainworks_launcher import __version__, names

_HELP = """\
usage: train                        run this host's part of the training job
       train --plan [--host NAME]   print what would be run on this host (or on NAME), as JSON; runs nothing
       train --version | --help
       PROGRAM [ARGUMENT...]        anything else is executed as given, for example: bash

The job is described by the platform's files below /opt/ml (moved by SAGEMAKER_BASE_DIR):
  input/config/hyperparameters.json   {{"sagemaker_program": "train.py", "epochs": "3"}}; --epochs 3 reaches the script
  input/config/resourceconfig.json    {{"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}}; may be absent
  code/                               the script, and requirements.txt to install before it
A distribution is switched on by a hyperparameter: {mpi} (mpirun) or
{torch} (torchrun); {per_host}
sets the processes of each host, the default is one per GPU.

Try it:  mkdir -p ml/code && echo 'print("hello")' > ml/code/train.py
         SAGEMAKER_PROGRAM=train.py SAGEMAKER_BASE_DIR=$PWD/ml train

Exit status: the script's own; 128 + N after signal N. The launcher's own refusals:
  {not_started}  the job's inputs were refused, nothing was started
  {preparation}  code or requirements could not be prepared, or the program could not be started
  {hosts}  a host never came, or was lost
  {launcher}  the launcher itself failed
Settings (variables): {grace}, {join},
  {prepare}, {heartbeat},
  {control}, {master}, {manifest},
  {prefix}, {secret}, {restarts}, {min_hosts},
  {style} (value, flag, json, key=value, none)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status. ``arguments`` defaults to the process's own."""
    words: list[str] = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] == "train":
        words = words[1:]
    elif words and not words[0].startswith("-"):
        return _execute(words)
    if words in (["--help"], ["-h"]):
        sys.stdout.write(_help())
        return 0
    if words == ["--version"]:
        sys.stdout.write(f"trainworks-launcher {__version__}\n")
        return 0
    if not words:
        return _train()
    if words[0] == "--plan" and (len(words) == 1 or (len(words) == 3 and words[1] == "--host")):
        return _plan(words[2] if len(words) == 3 else "")
    sys.stderr.write(f"trainworks: {' '.join(words)!r} is not understood; see: train --help\n")
    return names.EXIT_NOT_STARTED


def _help() -> str:
    return _HELP.format(
        mpi=names.MPI_ENABLED,
        torch=names.TORCH_DISTRIBUTED_ENABLED,
        per_host=names.PROCESSES_PER_HOST,
        not_started=names.EXIT_NOT_STARTED,
        preparation=names.EXIT_PREPARATION,
        hosts=names.EXIT_HOSTS,
        launcher=names.EXIT_LAUNCHER,
        grace=names.STOP_GRACE_VARIABLE,
        join=names.JOIN_LIMIT_VARIABLE,
        prepare=names.PREPARE_LIMIT_VARIABLE,
        heartbeat=names.HEARTBEAT_LIMIT_VARIABLE,
        control=names.CONTROL_PORT_VARIABLE,
        master=names.MASTER_PORT_VARIABLE,
        manifest=names.IMAGE_MANIFEST_VARIABLE,
        prefix=names.LOG_PREFIX_VARIABLE,
        secret=names.JOB_SECRET_VARIABLE,
        restarts=names.MAX_RESTARTS_VARIABLE,
        min_hosts=names.MIN_HOSTS_VARIABLE,
        style=names.ARGUMENT_STYLE_VARIABLE,
    )


def _execute(words: Sequence[str]) -> int:
    """Become another program; returns only if that fails."""
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        hint = "; to train, give no argument or: train" if isinstance(error, FileNotFoundError) else ""
        sys.stderr.write(f"trainworks: cannot execute {words[0]!r}: {error.strerror or error}{hint}\n")
        return names.EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else names.EXIT_NOT_EXECUTABLE


def _plan(host: str) -> int:
    """Print a plan."""
    from trainworks_launcher.environment import read_environment
    from trainworks_launcher.errors import RefusalError
    from trainworks_launcher.job import make_job
    from trainworks_launcher.modes import plan_host

    try:
        plan = plan_host(make_job(read_environment(os.environ), host))
    except RefusalError as refusal:
        sys.stderr.write(f"trainworks: {refusal}\n")
        return refusal.status
    sys.stdout.write(plan.to_json())
    return 0


def _train() -> int:
    """Run this host's part."""
    from trainworks_launcher import output
    from trainworks_launcher.environment import read_environment
    from trainworks_launcher.errors import RefusalError
    from trainworks_launcher.job import describe, make_job
    from trainworks_launcher.modes import plan_host
    from trainworks_launcher.outcome import FAILED, Outcome
    from trainworks_launcher.supervise import run_plan

    environment = read_environment(os.environ)
    try:
        job = make_job(environment)
        plan = plan_host(job)
    except RefusalError as refusal:
        output.log(str(refusal))
        output.clear_outcome_files(environment.base_directory)
        outcome = Outcome(FAILED, refusal.status, environment.hostname, str(refusal))
        output.write_outcome_files(environment.base_directory, outcome)
        return refusal.status
    for warning in plan.warnings:
        output.log(f"warning: {warning}")
    output.log(describe(job))
    return run_plan(plan, environment)
