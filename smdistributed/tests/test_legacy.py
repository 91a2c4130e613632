"""Modules that no longer exist: made on demand, real ones win, one line each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ranks import free_port, rank_variables

SCRIPT = """
import smdistributed.modelparallel.torch as smp
import sys
assert not {"torch._six", "apex", "amp_C"} & set(sys.modules)
import torch
from torch._six import inf, string_classes
assert inf == float("inf") and isinstance("", string_classes) and not isinstance(1, string_classes)

import amp_C
from apex.multi_tensor_apply import multi_tensor_applier
source = [torch.tensor([3.0], dtype=torch.float16), torch.tensor([[4.0]], dtype=torch.float16)]
target = [torch.zeros(1), torch.zeros(1, 1)]
flag = torch.zeros(1, dtype=torch.int32)
multi_tensor_applier(amp_C.multi_tensor_scale, flag, [source, target], 0.5)
assert [float(each) for each in target] == [1.5, 2.0] and not flag
norm, none = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [source], False)
assert norm.tolist() == [5.0] and none.numel() == 0
norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [source], True)
assert norm.tolist() == [5.0] and each.tolist() == [3.0, 4.0]
assert multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [[]], False)[0].tolist() == [0.0]
source[0][0] = float("nan")
multi_tensor_applier(amp_C.multi_tensor_scale, flag, [source, target], 1.0)
assert flag.tolist() == [1]
"""

MISSING = """
import smdistributed.modelparallel.torch

for name in (
    "from apex import amp",
    "import apex.optimizers",
    "from amp_C import multi_tensor_adam",
    "import torch._seven",
):
    try:
        exec(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} works")
"""

REAL = """
import smdistributed.modelparallel.torch
import amp_C, apex
assert (amp_C.real, apex.real) == (True, True)
try:
    import apex.multi_tensor_apply
except ImportError:
    print("as it was")
"""


def run(script: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    command, environment = [sys.executable, "-c", start + script], {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def warnings_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("smdistributed: ")]


def test_the_modules_are_made_and_each_is_announced_once() -> None:
    done = run(SCRIPT)
    assert done.returncode == 0, done.stderr
    assert warnings_of(done) == [
        f"smdistributed: the module {text}"
        for text in (
            "torch._six is not installed: its names come from Python now",
            "amp_C is not installed: multi_tensor_scale and multi_tensor_l2norm are plain PyTorch",
            "apex.multi_tensor_apply is not installed: a stand-in calls functions of amp_C",
        )
    ]


def test_what_has_no_stand_in_is_missing_as_before() -> None:
    done = run(MISSING)
    assert done.returncode == 0, done.stderr


def test_amp_of_apex_is_refused_with_what_to_use() -> None:
    for line in ("from apex import amp", "import apex.amp"):
        done = run(f"import smdistributed.modelparallel.torch\n{line}")
        assert done.returncode == 1
        assert (
            "ImportError: apex is not installed, and smp does not work with apex.amp. Take it out"
            in done.stderr
        )
        assert "smp.model_creation(dtype=...)" in done.stderr


APEX = """
import torch, types
_amp_state = types.SimpleNamespace()
"""
INITIALIZE = """
from apex.amp._amp_state import _amp_state

def initialize(model, optimizer):
    _amp_state.opt_properties = "O1"
    return model, optimizer
"""


def test_a_model_that_amp_of_a_real_apex_has_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "apex" / "amp").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    (tmp_path / "apex" / "amp" / "_amp_state.py").write_text(APEX)
    (tmp_path / "apex" / "amp" / "__init__.py").write_text(INITIALIZE)
    script = """
import torch
import smdistributed.modelparallel.torch as smp
from apex import amp
smp.init({})
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
FIRST
smp.DistributedModel(model)
SECOND
smp.DistributedOptimizer(optimizer)
print("wrapped")
"""
    own = {**rank_variables(0, 1, free_port()), "CUDA_VISIBLE_DEVICES": ""}
    only_imported = run(script.replace("FIRST", "").replace("SECOND", ""), tmp_path, **own)
    assert (only_imported.returncode, only_imported.stdout) == (
        0,
        "wrapped\n",
    ), only_imported.stderr
    call = "amp.initialize(model, optimizer)"
    for where, refusing in (
        ("FIRST", "smp.DistributedModel"),
        ("SECOND", "smp.DistributedOptimizer"),
    ):
        changed = script.replace(where, call).replace("FIRST", "").replace("SECOND", "")
        done = run(changed, tmp_path, **own)
        assert done.returncode == 1
        assert (
            f"SMPConfigError: apex.amp is on, and {refusing} cannot divide what it has"
            in done.stderr
        )


def test_a_real_module_wins(tmp_path: Path) -> None:
    (tmp_path / "amp_C.py").write_text("real = True\n")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("real = True\n")
    done = run(REAL, tmp_path)
    assert (done.returncode, done.stdout) == (0, "as it was\n"), done.stderr
    assert warnings_of(done) == []


def test_only_a_process_that_imports_the_library_has_them() -> None:
    done = run("import torch, torch._six")
    assert done.returncode == 1
    assert "No module named 'torch._six'" in done.stderr


def test_in_a_job_of_smp_they_are_there_before_smp_is_imported() -> None:
    done = run(
        "import torch, amp_C\nfrom torch._six import inf", SM_HP_MP_PARAMETERS='{"partitions": 2}'
    )
    assert done.returncode == 0, done.stderr
    assert len(warnings_of(done)) == 2


def test_the_second_version_of_smp_is_refused_with_what_to_use() -> None:
    for script in ("import smdistributed.modelparallel.torch\n", "import torch\n"):
        for line in ("import torch.sagemaker as tsm", "import torch.sagemaker.tensor_parallel"):
            done = run(script + line, SM_HP_MP_PARAMETERS='{"hybrid_shard_degree": 2}')
            assert done.returncode == 1
            last = done.stderr.splitlines()[-1]
            assert last.startswith(
                "ModuleNotFoundError: No module named 'torch.sagemaker': it is smp's second version"
            )
            assert "fully_shard" in last
    quiet = "import torch, smdistributed.modelparallel.torch, pkgutil, importlib.util\n"
    assert run(quiet + "assert importlib.util.find_spec('torch._seven') is None").returncode == 0
