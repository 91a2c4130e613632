"""Switch on hooks (``programs/python``) in every Python that a job starts, without a change of its
script.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping

from trainworks_launcher.contract import names
from trainworks_launcher.environment.environment import Environment
from trainworks_launcher.plan.plan import NodePlan
from trainworks_launcher.supervise.hang import activation


def variables(plan: NodePlan, environment: Environment) -> Mapping[str, str]:
    """Return the variables that switch on the hooks in the job's processes.

    These are the names of the hooks, and a PYTHONPATH on which Python finds them: the launcher's
    directory, then the path that the job has.

    Args:
        plan: The plan of this host.
        environment: What was read on this host.
    """
    has_starter = plan.ranks_by in ("mpirun", "torchrun")
    is_on = {
        "stacks": activation.needs_stacks(plan, environment),
        "exit": environment.variables.get(names.CLEAN_EXIT_VARIABLE, "").strip() != "off",
        "end": True,
        # A process with peers notes that it leaves its program.
        "leave": has_starter or plan.control is not None,
        "ray": plan.mode == "ray",
        "world": has_starter,
    }
    hooks = [name for name in is_on if is_on[name]]
    path = plan.env.get("PYTHONPATH") or environment.variables.get("PYTHONPATH", "")
    directory = str(Path(environment.launcher_directory, "programs", "python"))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (directory, path))),
        names.PYTHON_HOOKS_VARIABLE: " ".join(hooks),
    }
