"""Run by the Python of sagemaker-training's own virtual environment: print the variables that the
real package exports, for many inputs.

Reads a JSON list of ``{"base": directory, "variables": {...}}`` from standard input, writes a JSON
list of ``{"variables": {...}, "arguments": [...]}`` or ``{"error": type, "text": ...}``. One
process for all inputs, because the import alone takes half a second; the module is loaded anew for
each, since it reads the base directory on import.
"""

import importlib
import json
import os
import sys
import types


def main() -> None:
    cases = json.load(sys.stdin)
    path = list(sys.path)
    module = None
    results = []
    for case in cases:
        os.environ.clear()
        os.environ.update(case["variables"])
        os.environ["SAGEMAKER_BASE_DIR"] = case["base"]
        before = dict(os.environ)
        try:
            name = "sagemaker_training.environment"
            module = importlib.reload(module) if module else importlib.import_module(name)
            results.append(export(module, before))
        except Exception as error:  # noqa: BLE001  what it raises is what is asked for
            results.append({"error": type(error).__name__, "text": str(error)})
        sys.path[:] = path
    json.dump(results, sys.stdout)


def export(module: types.ModuleType, before: dict[str, str]) -> dict[str, object]:
    """Do the steps of ``train`` before the script, as far as the environment goes."""
    environment = module.Environment()
    arguments = environment.to_cmd_args()
    variables = environment.to_env_vars()
    sys.path.insert(0, module.code_dir)  # entry_point.install
    module.write_env_vars(variables)
    exported = {
        name: value
        for name, value in os.environ.items()
        if name in variables or value != before.get(name)
    }
    return {"variables": exported, "arguments": arguments}


main()
