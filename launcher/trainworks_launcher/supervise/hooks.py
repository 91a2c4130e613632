"""What is switched on in every Python that a job starts, without a change of
its script (programs/python).
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
    """Return the variables of the job's processes: which hooks, and the path on
    which Python finds them.
    """
    asked = {
        "stacks": activation.needs_stacks(plan, environment),
        "exit": environment.variables.get(names.CLEAN_EXIT_VARIABLE, "").strip() != "off",
        "end": True,
        "leave": plan.ranks_by in ("mpirun", "torchrun")
        or plan.control is not None,  # it has peers
        "ray": plan.mode == "ray",
        "world": plan.ranks_by in ("mpirun", "torchrun"),
    }
    hooks = [name for name, wanted in asked.items() if wanted]
    path = plan.env.get("PYTHONPATH") or environment.variables.get("PYTHONPATH", "")
    words = (str(Path(environment.launcher_directory, "programs", "python")), path)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, words)),
        names.PYTHON_HOOKS_VARIABLE: " ".join(hooks),
    }
