"""The command ``trainworks-preflight``: check a job on a laptop or in CI, before you pay for a
cluster.
"""

from __future__ import annotations

import shutil
import sys
from typing import Sequence

from trainworks_launcher import __version__
from trainworks_launcher.command.options import (
    SECRETS,
    Command,
    Option,
    UsageError,
    options_help,
    parse,
)
from trainworks_launcher.contract import names
from trainworks_preflight.report import preflight

COMMAND = Command(
    "trainworks-preflight",
    "check a job on a laptop or in CI, before you pay for a cluster",
    (
        Option("--distribution", "FILE", "the SDK's dict, as JSON or as a Python literal"),
        Option("--instance-type", "TYPE", "instance type of every host"),
        Option("--instance-count", "N", "number of hosts; default: 1"),
        Option(
            "--instance-group",
            "NAME=TYPE:N",
            "an instance group, instead of type and count",
            repeated=True,
        ),
        Option("--entry-point", "FILE", "the training script", needed=True),
        Option(
            "--source-dir", "DIR", "the folder of the training script; default: the script alone"
        ),
        Option("--hyperparameters", "FILE", "the job's hyperparameters, a dict as above"),
        Option(
            "--image-manifest",
            "FILE",
            "image.json of the image; without it, the image is assumed to have all",
        ),
        Option(
            "--framework",
            "NAME",
            "whose SDK estimator; default: pytorch",
            choices=("pytorch", "tensorflow", "mxnet"),
        ),
        Option(
            "--framework-version",
            "VERSION",
            "version of the framework in the image, without a manifest",
        ),
        Option("--format", "FORMAT", "text (default) or json", choices=("text", "json")),
        SECRETS,
    ),
)
"""The command and its options."""

_HELP = """\
usage: trainworks-preflight --entry-point FILE [OPTION...]

Check a job on a laptop or in CI, before you pay for a cluster. Nothing is started.

Try it:  echo "{{'torch_distributed': {{'enabled': True}}}}" > distribution.txt
         echo 'print("hello")' > train.py
         trainworks-preflight --distribution distribution.txt --entry-point train.py \\
             --instance-type TYPE --instance-count 2
In a checkout, without an installation: PYTHONPATH=launcher python -m trainworks_preflight

{options}
Exit status: 0: the job would start; {not_started}: it has problems, or the command line is wrong
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words after the command; default: those of this process.

    Returns:
        The exit status: 0 if the job would start, else 64.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not {"--help", "-h"}.isdisjoint(words):
        sys.stdout.write(
            _HELP.format(options=options_help((COMMAND,)), not_started=names.EXIT_NOT_STARTED)
        )
        return 0
    if words == ["--version"]:
        sys.stdout.write(f"trainworks-preflight {__version__}\n")
        return 0
    try:
        parsed = parse(COMMAND, words)
    except UsageError as error:
        sys.stderr.write(f"{error} (see: trainworks-preflight --help)\n")
        return names.EXIT_NOT_STARTED
    status, text = preflight(parsed, shutil.get_terminal_size((100, 24)).columns)
    sys.stdout.write(text)
    return status
