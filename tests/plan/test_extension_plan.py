"""Extensions as values: names, requirements against a base, and entry points as
the launcher will understand them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from trainworks.extend.constraints import (
    Move,
    checks_again,
    hidden_by,
    kept_of,
    moves_of,
    targets_for,
)
from trainworks.extend.plan import (
    EntryPoint,
    ExtensionPlan,
    check_names,
    check_packages,
    find_entry_point,
)
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, ExtensionLock
from trainworks.facts.rows import Facts, SourceFile
from trainworks.plan.checks import (
    CommandCheck,
    DebianPackageCheck,
    LabelCheck,
    PathCheck,
    PythonImportsCheck,
    SecretsCheck,
)
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks_launcher.environment.entry_point import choose_entry_point
from trainworks_launcher.environment.source_dir import inspect_code

HASH = " \\\n    --hash=sha256:" + "0123456789abcdef" * 4

OURS = ExtendedBase(
    reference="trainworks/pytorch-training:1",
    identifier="sha256:" + "b" * 64,
    python="/opt/venv/bin/python",
    version="3.11",
    glibc="2.36",
    machine="x86_64",
    environment={
        "PATH": "/opt/trainworks/bin:/opt/venv/bin:/opt/ml/code:/usr/bin:/bin",
        "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
    },
    distributions=(
        BaseDistribution(name="torch", version="2.13.0+cpu"),
        BaseDistribution(name="NumPy", version="2.4.0"),
    ),
    kept={"torch": "2.13.0+cpu"},
)
FOREIGN = replace(
    OURS,
    reference="123456789012.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.4-gpu",
    python="/opt/conda/bin/python",
    environment={"PATH": "/opt/conda/bin:/usr/bin:/bin"},
    launcher=False,
)


@pytest.mark.parametrize(
    ("base", "tag", "problem"),
    [
        ("my/image:1", "my/other:1", ""),
        ("my/image", "host.example:5000/my/other:1", ""),
        (FOREIGN.reference, "my/other:1", ""),
        ("my/image@sha256:" + "0" * 64, "my/other:1", ""),
        ("my image", "my/other:1", "--base 'my image' is not the name of an image"),
        ("-v", "my/other:1", "--base '-v' is not"),
        ("my/image:1", "My/Other:1", "in lower case, such as my/image:1"),
        ("my/image:1", "my/other", "such as my/image:1"),
        ("my/image:1", "my/other:", "is not the name of an image with its tag"),
        ("my/image:1", "my/other@sha256:" + "0" * 64, "is not the name of an image with its tag"),
        ("my/image:1", "my/image:1", "the base image's own name"),
    ],
)
def test_names_of_images(base: str, tag: str, problem: str) -> None:
    problems = check_names(base, tag)
    assert len(problems) == bool(problem)
    assert problem in "".join(problems)


def test_all_that_is_wrong_with_the_names_is_said_at_once() -> None:
    assert len(check_names("a b", "A")) == 2


def test_what_is_kept_is_what_the_manifest_says_with_the_version_that_is_installed() -> None:
    rows = (
        BaseDistribution(name="torch", version="2.13.1+cpu"),
        BaseDistribution(name="NumPy", version="2.4.0"),
        BaseDistribution(name="of_the_system", version="1", removable=False),
    )
    protected = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}
    expected = {"torch": "2.13.1+cpu", "tensorflow": "2.21.0", "of-the-system": "1"}
    assert kept_of(protected, rows, ("num*",)) == expected


def test_another_makers_image_keeps_what_the_components_of_ours_protect(facts: Facts) -> None:
    names = (
        "torch",
        "nvidia-nccl-cu12",
        "triton",
        "mpi4py",
        "tensorflow",
        "numpy",
        "requests",
        "fsspec",
    )
    rows = [BaseDistribution(name=name, version="1") for name in names]
    patterns = [pattern for component in facts.components for pattern in component.protected]
    assert list(kept_of({}, rows, patterns)) == [
        "torch",
        "nvidia-nccl-cu12",
        "triton",
        "mpi4py",
        "tensorflow",
    ]


MOVED = replace(
    OURS,
    distributions=(
        BaseDistribution(name="torch", version="2.13.0+cpu"),
        BaseDistribution(name="fsspec", version="2026.9.0"),
        BaseDistribution(name="NumPy", version="2.4.0"),
    ),
)


def test_targets_that_have_what_the_base_is_too_old_for(facts: Facts) -> None:
    """Find targets of packages, with the base's accelerator, and with the companions that are asked
    for.
    """
    assert targets_for([("torch", ">=2.16")], OURS, facts) == []
    cuda = replace(OURS, kept={"torch": "2.4.1", "nvidia-cudnn-cu12": "9.1"})
    assert targets_for([("torch", ">=2.10,<2.11")], cuda, facts) == [
        "pytorch-2.10.0-cu128-py311-debian12",
        "pytorch-2.10.0-cu128-py313-debian13",
    ]
    assert targets_for([("torch", "==2.10.0"), ("torchvision", "==0.1")], cuda, facts) == []
    # Without CUDA there is none with another Python; an image with CUDA runs there, too.
    assert targets_for([("python", ">=3.12"), ("torch", ">=2.15")], OURS, facts) == [
        "pytorch-2.15.0-cu132-py313-debian13"
    ]


def test_moves() -> None:
    moves = moves_of([("fsspec", "2024.9.0"), ("numpy", "2.4.0"), ("six", "1")], MOVED)
    assert moves == (Move(name="fsspec", old="2026.9.0", new="2024.9.0"),)


def test_code_that_hides_a_module_is_named() -> None:
    files = [
        SourceFile(path=path, content=b"")
        for path in ("torch.py", "random.py", "mine/torch.py", "a/random.txt")
    ]
    assert "the code's own random, torch would be imported" in hidden_by(files, OURS)
    assert hidden_by(files[2:], OURS) == ""


def test_the_bases_own_tests_run_again_where_something_moved(facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    components = {step.component: step.version for step in plan.steps if step.version}
    base = replace(OURS, components=components, missing=("compiler",))
    assert checks_again(plan, base, ()) == checks_again(None, base, (MOVE,)) == ()
    checks = checks_again(plan, base, (MOVE,))
    tested_components = {check.component for check in checks}
    assert {"torch", "open-mpi", "mpi4py", "tensorboard"} <= tested_components
    assert "compiler" not in tested_components, "the base was built without it"
    assert "image" not in tested_components, "how an image is made is not asked again"
    assert "torch" not in {
        check.component
        for check in checks_again(plan, replace(base, components={"torch": "1"}), (MOVE,))
    }
    board = Move(name="tensorboard", old="2.21.0", new="2.20.0")
    assert "tensorboard" not in {check.component for check in checks_again(plan, base, (board,))}


MOVE = Move(name="fsspec", old="2026.9.0", new="2024.9.0")


def test_what_moved_is_promised_once() -> None:
    plan = ExtensionPlan(
        tag="my/train:1",
        base=MOVED,
        lock=ExtensionLock(pins=f"fsspec==2024.9.0{HASH}"),
    )
    assert plan.moves == (MOVE,)
    titles = {check.why: check.command for check in plan.checks if isinstance(check, CommandCheck)}
    assert titles["the base's other 2 distributions are as they were"][-2] == "torch==2.13.0+cpu"
    assert titles[
        "1 required distribution is installed as locked, and nothing is left of what was there"
    ][-1] == ("fsspec==2024.9.0")


FILES: Mapping[str, bool] = {
    "train.py": False,
    "run.sh": False,
    "tool": True,
    "notes.txt": False,
    "package/__init__.py": False,
    "package/__main__.py": False,
    "package/train.py": False,
}


@pytest.mark.parametrize(
    ("program", "project", "kind", "file"),
    [
        ("train.py", False, "script", "train.py"),
        ("package/train.py", False, "script", "package/train.py"),
        ("run.sh", False, "shell", "run.sh"),
        ("tool", False, "command", "tool"),
        ("-m package.train", False, "module", "package/train.py"),
        ("-m package", False, "module", "package/__main__.py"),
        ("-m torch.distributed.run", False, "module", ""),
        ("package/train.py", True, "package", "package/train.py"),
        ("package.train", True, "package", ""),
        ("run.sh", True, "shell", "run.sh"),
        ("tool", True, "command", "tool"),
    ],
)
def test_entry_points(program: str, project: bool, kind: str, file: str) -> None:
    assert find_entry_point(program, FILES, project=project) == EntryPoint(
        kind=kind, name=program, file=file
    )


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("trian.py", "did you mean train.py?"),
        ("../train.py", "is not a path below --source"),
        ("package//train.py", "is not a path below --source"),
        ("/opt/ml/code/train.py", "is not a path below --source"),
        ("--help", "is not a path below --source"),
        ("notes.txt", "chmod +x"),
        ("-m package.trian", "did you mean package/train.py?"),
        ("-m package/train", "not the name of a Python module"),
        ("package.train", "no such file: package.train"),
        ("", "is not a path"),
    ],
)
def test_entry_points_that_are_refused(program: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        find_entry_point(program, FILES, project=False)
    assert reason in str(caught.value)


@pytest.mark.parametrize("project", [False, True])
def test_the_launcher_understands_each_entry_point_as_the_builder_does(
    project: bool, tmp_path: Path
) -> None:
    """Compare the two sides, which never import each other: only this test holds them together."""
    files = {**FILES, **({"setup.py": False} if project else {})}
    for name, executable in files.items():
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o755 if executable else 0o644
        path.touch(mode=mode)
    programs = [
        *FILES,
        *(
            "-m package",
            "-m package.train",
            "-m package/train",
            "package.train",
            "trian.py",
            "../train.py",
            "./train.py",
        ),
        *("/opt/ml/code/train.py", "--help", "train me.py", "package/none.py", "none.sh"),
    ]
    agreed = 0
    for program in programs:
        code, _ = inspect_code(str(tmp_path), str(tmp_path / "code"), program)
        theirs, problems = choose_entry_point(program, code, ("python",), ())
        try:
            ours = find_entry_point(program, files, project=project)
        except ValueError:
            assert problems, f"{program} is refused here, and would be started"
        else:
            assert (problems, theirs.kind) == ([], ours.kind), program
            agreed += 1
    assert agreed >= 6
    assert os.access(tmp_path / "code" / "tool", os.X_OK)


CODE = (SourceFile(path="train.py", content=b"print('trained')\n"),)
SCRIPT = EntryPoint(kind="script", name="train.py", file="train.py")


def test_an_image_of_ours_gets_only_what_it_lacks() -> None:
    plan = ExtensionPlan(
        tag="my/train:1", base=OURS, lock=ExtensionLock(), files=CODE, entry_point=SCRIPT
    )
    assert plan.path_has_code
    assert plan.environment == {"SAGEMAKER_PROGRAM": "train.py"}
    again = replace(OURS, environment={**OURS.environment, "SAGEMAKER_PROGRAM": "train.py"})
    plan = ExtensionPlan(
        tag="my/train:1", base=again, lock=ExtensionLock(), files=CODE, entry_point=SCRIPT
    )
    assert plan.environment == {}


def test_a_foreign_image_gets_path_and_directory_and_is_not_asked_for_a_plan() -> None:
    plan = ExtensionPlan(
        tag="my/train:1",
        base=FOREIGN,
        lock=ExtensionLock(pins=f"six==1{HASH}"),
        files=CODE,
        entry_point=SCRIPT,
    )
    assert not plan.path_has_code
    assert plan.environment == {
        "SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code",
        "SAGEMAKER_PROGRAM": "train.py",
    }
    commands = [check.command for check in plan.checks if isinstance(check, CommandCheck)]
    assert not any(command[0] == "train" for command in commands)
    assert {type(check) for check in plan.checks} == {
        *(CommandCheck, PythonImportsCheck, LabelCheck, PathCheck, SecretsCheck)
    }


def test_debian_packages_are_checked_and_labelled() -> None:
    assert check_packages(("g++", "libgl1")) == []
    assert "--apt '-y' is not the name of a Debian package" in check_packages(("-y",))
    plan = ExtensionPlan(
        tag="my/train:1",
        base=OURS,
        lock=ExtensionLock(),
        apt=("libgl1", "g++", "g++"),
    )
    assert plan.labels["trainworks.apt"] == "g++ libgl1"
    assert [check.package for check in plan.checks if isinstance(check, DebianPackageCheck)] == [
        "g++",
        "libgl1",
    ]


def test_the_project_itself_is_not_imported() -> None:
    plan = ExtensionPlan(
        tag="my/train:1",
        base=OURS,
        lock=ExtensionLock(pins=f"six==1{HASH}", local={"mine": "1"}, project="mine"),
        files=CODE,
        entry_point=SCRIPT,
        installed=("setup.py",),
    )
    (imports,) = [check for check in plan.checks if isinstance(check, PythonImportsCheck)]
    assert imports.distributions == ("six",)
    assert any(
        isinstance(check, CommandCheck) and check.expect == '"requirements": [],'
        for check in plan.checks
    )


def test_a_digest_of_the_base_is_named_and_never_the_one_that_the_base_itself_came_from() -> None:
    label = "org.opencontainers.image.base.digest"
    inherited = replace(OURS, labels={label: "sha256:" + "1" * 64})
    known_base = replace(inherited, digest="trainworks/pytorch-training@sha256:" + "2" * 64)
    for base, expected in ((OURS, None), (inherited, ""), (known_base, "sha256:" + "2" * 64)):
        plan = ExtensionPlan(
            tag="my/train:1", base=base, lock=ExtensionLock(), files=CODE, entry_point=None
        )
        assert plan.labels.get(label) == expected
    assert known_base.source == known_base.digest
    assert inherited.source == inherited.reference
