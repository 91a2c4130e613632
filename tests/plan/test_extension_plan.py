"""Extensions as values: names, requirements against a base, and entry points as the launcher will understand them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from trainworks.extend.kept import (
    Move,
    broken_by,
    checks_again,
    conflicts,
    kept_of,
    left_behind,
    line_of,
    moves_of,
)
from trainworks.extend.plan import (
    EntryPoint,
    check_distribution,
    check_foreign,
    check_names,
    check_packages,
    find_entry_point,
    make_extension,
)
from trainworks.extend.reading.lines import check_hashes, locked_versions, read_requirements
from trainworks.extend.requirements import BaseDistribution, ExtendedBase, GitRequirement, wrong_builds
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
from trainworks_launcher.given.entry import choose_entry_point
from trainworks_launcher.given.source import look_at_code

HASH = "--hash=sha256:" + "0123456789abcdef" * 4

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
    complaints=("sagemaker 2 requires cloudpickle, which is not installed.",),
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
        ("my/image:1", "My/Other:1", "lower case: my/other:1"),
        ("my/image:1", "my/other", "such as my/other:1"),
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


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--user", "--user is not an option that extend knows"),
        ("--index-url", "--index-url needs a value"),
        ("--find-links 'wheels", "the quotes do not fit together"),
        ("-r a b.txt", "'b.txt' belongs to no option"),
        ("six --no-deps", "--no-deps cannot stand behind a requirement"),
        ("--index-url https://me:secret@packages.example/simple", "has a password or token in it"),
        ("--extra-index-url https://token@packages.example/simple", "name a variable with it: ${NAME}"),
        ("--index-url https://me:${NOT_SET}@packages.example/simple", "the variable NOT_SET is not set"),
        ("https://token@packages.example/x-1-py3-none-any.whl", "has a password or token in it"),
        ("https://packages.example/x-1.tar.gz", "this is not a wheel"),
        ("https://packages.example/x", "this is not a wheel"),
        ("hg+https://packages.example/x", "hg+https:// is not supported"),
        ("./x-1.tar.gz", "this is not a wheel"),
        ("dist/x-1.zip", "this is not a wheel"),
        ("./x.whl", "does not have the name of a wheel"),
        ("y @ ./x-1-py3-none-any.whl", "is a wheel of x, not of y"),
        ("git+ftp://git.example/x", "begins with git+https://"),
        ("git+https://token@git.example/x", "has a password or token in it"),
        ("git+ssh://git:secret@git.example/x", "has a password or token in it"),
        ("git+https://git.example/x@--upload-pack=evil", "is not the name of a branch"),
        ("git+https://git.example/x#subdirectory=../y", "is not a folder of the repository"),
        ("pandas=2", "not a requirement"),
        ("x==1 --hash=md5:abc", "sha256"),
    ],
)
def test_lines_that_are_refused(line: str, problem: str) -> None:
    read = read_requirements(f"six\n\n{line}  # why\n", "requirements.txt")
    assert len(read.problems) == 1
    assert read.problems[0].startswith("requirements.txt line 3: ")
    assert problem in read.problems[0]
    assert [each.name for each in read.requirements] == ["six"]


@pytest.mark.parametrize(
    ("line", "path", "constraint"),
    [
        ("-r other.txt", "other.txt", False),
        ("-rother.txt", "other.txt", False),
        ("--requirement '../a b.txt'", "../a b.txt", False),
        ("-c other.txt", "other.txt", True),
        ("--constraint=other.txt", "other.txt", True),
    ],
)
def test_lines_that_include_a_file(line: str, path: str, constraint: bool) -> None:
    (found,) = read_requirements(line, "r").includes
    assert (found.path, found.constraint) == (path, constraint)


@pytest.mark.parametrize(
    "line",
    [
        "./dist/x-1.0-py3-none-any.whl[a] ; python_version > '3'",
        "x[a] @ file:///home/me/dist/x-1.0-py3-none-any.whl ; python_version > '3'",
    ],
)
def test_a_wheel_is_a_requirement_of_its_version(line: str) -> None:
    (found,) = read_requirements(line, "r").requirements
    assert found.text == "x[a]==1.0 ; python_version > '3'"
    assert found.wheel.endswith("/dist/x-1.0-py3-none-any.whl")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("git+https://h.example/a/b.git", {"url": "https://h.example/a/b.git"}),
        ("git+ssh://git@h.example/a@v1.0", {"url": "ssh://git@h.example/a", "reference": "v1.0"}),
        (
            "git+file:///a@main#egg=B[x]&subdirectory=py/b",
            {"url": "file:///a", "reference": "main", "name": "b", "extras": "[x]", "subdirectory": "py/b"},
        ),
        (
            "b[x]@git+https://h.example/a@f/new ; python_version > '3'",
            {
                "url": "https://h.example/a",
                "reference": "f/new",
                "name": "b",
                "extras": "[x]",
                "marker": "python_version > '3'",
            },
        ),
    ],
)
def test_git_requirements(line: str, expected: dict[str, str]) -> None:
    (found,) = read_requirements(line, "r").sources
    assert found == GitRequirement(place=found.place, **expected)


def test_a_file_of_names_and_versions_is_read_whole() -> None:
    text = f"# head\nPandas>=2,<3 ; python_version > '3' # tail\n\nscikit.learn[x]==1.5 \\\n  {HASH} \\\n    {HASH}\n"
    read = read_requirements(text, "r")
    assert read.problems == ()
    assert [(row.name, row.hashed, row.pinned) for row in read.requirements] == [
        ("pandas", False, False),
        ("scikit-learn", True, True),
    ]
    (problem,) = check_hashes(read.requirements)
    assert problem.startswith("r line 2: Pandas>=2,<3 ; python_version > '3': no hash, but other lines have")


def test_a_hash_needs_a_version() -> None:
    for text in (f"six>=1 {HASH}", f"six==1.* {HASH}"):
        assert "pin the version" in check_hashes(read_requirements(text, "r").requirements)[0]


def test_beside_hashes_a_git_requirement_needs_its_commit() -> None:
    for reference, count in (("main", 1), ("0123456789" * 4, 0)):
        read = read_requirements(f"six==1 {HASH}\ngit+https://h.example/a@{reference}", "r")
        assert len(check_hashes(read.requirements, read.sources)) == count


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
    names = ("torch", "nvidia-nccl-cu12", "triton", "mpi4py", "tensorflow", "numpy", "requests", "fsspec")
    rows = [BaseDistribution(name=name, version="1") for name in names]
    patterns = [pattern for component in facts.components for pattern in component.protected]
    assert list(kept_of({}, rows, patterns)) == ["torch", "nvidia-nccl-cu12", "triton", "mpi4py", "tensorflow"]


def refused(text: str, base: ExtendedBase, facts: Facts) -> list[str]:
    return conflicts(read_requirements(text, "r").requirements, base, facts)


def test_only_what_is_kept_is_refused(facts: Facts) -> None:
    assert refused("numpy<2\nrequests==2.0\nfsspec==2024.9.0\nsix\n", OURS, facts) == []
    assert refused("torch==2.4.1 ; sys_platform == 'win32'\n", OURS, facts) == []
    (problem,) = refused("./torch-2.13.0-py3-none-any.whl", OURS, facts)
    assert "keeps torch 2.13.0+cpu" in problem


def test_one_refusal_names_all_lines_and_the_targets_that_fit(facts: Facts) -> None:
    text = "datasets\ntorch==2.10.0\ntorchaudio==2.10.0\ntorchvision==0.25.0\n"
    (problem,) = refused(text, OURS, facts)
    assert problem.splitlines() == [
        (
            f"{OURS.reference} keeps torch 2.13.0+cpu and goes with torchaudio, torchvision for just that. Take these "
            "lines out, or extend pytorch-2.10.0-cu128-py311-debian12 or pytorch-2.10.0-cu128-py313-debian13:"
        ),
        "    r line 2: torch==2.10.0",
        "    r line 3: torchaudio==2.10.0",
        "    r line 4: torchvision==0.25.0",
    ]
    (problem,) = refused("torch==2.9.1\n", OURS, facts)
    assert "Take this line out; no target has it:\n" in problem


def test_what_goes_with_the_bases_torch_is_no_conflict(facts: Facts) -> None:
    base = replace(OURS, kept={"torch": "2.10.0"}, distributions=(BaseDistribution(name="torch", version="2.10.0"),))
    lock = facts.locks["pytorch-2.10.0-cu128-py311-debian12"]
    (vision,) = [package.version for package in lock.packages if package.name == "torchvision"]
    assert refused(f"torch==2.10.0\ntorchvision=={vision}\ntorchaudio\n", base, facts) == []
    (problem,) = refused("torchvision==0.1\n", base, facts)
    assert f"keeps torch 2.10.0 and goes with torchvision {vision} for just that" in problem


@pytest.mark.parametrize(
    ("line", "resolved"),
    [
        ("torch==2.4.1+cu121", "torch==2.4.1"),
        ("torch[opt-einsum]==2.4.1+cu121", "torch[opt-einsum]==2.4.1"),
        ("torch>=2", "torch>=2"),
    ],
)
def test_a_build_of_torch_may_be_named_with_its_local_version(line: str, resolved: str, facts: Facts) -> None:
    torch = BaseDistribution(name="torch", version="2.4.1", build="2.4.1+cu121")
    base = replace(OURS, kept={"torch": "2.4.1"}, distributions=(torch,))
    assert refused(line, base, facts) == []
    (requirement,) = read_requirements(line, "r").requirements
    assert line_of(requirement, base) == resolved
    (problem,) = refused("torch==2.4.1+cu118\n", base, facts)
    assert "keeps torch 2.4.1" in problem


MOVED = replace(
    OURS,
    distributions=(
        BaseDistribution(
            name="torch", version="2.13.0+cpu", requires=("fsspec>=0.8.5", "absent", "numpy; extra == 'x'")
        ),
        BaseDistribution(name="fsspec", version="2026.9.0", size=1),
        BaseDistribution(name="NumPy", version="2.4.0", size=60_000_000),
    ),
)


def test_moves_and_what_they_leave_behind() -> None:
    moves = moves_of([("fsspec", "2024.9.0"), ("numpy", "2.4.0"), ("six", "1")], MOVED)
    assert moves == (Move(name="fsspec", old="2026.9.0", new="2024.9.0", size=1),)
    assert left_behind(moves) == ""
    assert "60 MB of replaced files stay in the base's layers" in left_behind(moves_of([("numpy", "1.26.4")], MOVED))


def test_what_a_move_breaks() -> None:
    assert broken_by([("fsspec", "2024.9.0")], MOVED) == ()
    assert broken_by([("fsspec", "0.8.0")], MOVED) == ("torch",)
    assert broken_by([], MOVED, ("fsspec",)) == ("torch",)


def test_the_bases_own_tests_run_again_where_something_moved(facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    components = {step.component: step.version for step in plan.steps if step.version}
    base = replace(OURS, components=components, missing=("compiler",))
    assert checks_again(plan, base, ()) == checks_again(None, base, (MOVE,)) == ()
    checks = checks_again(plan, base, (MOVE,))
    found = {check.component for check in checks}
    assert {"torch", "open-mpi", "mpi4py", "tensorboard"} <= found
    assert "compiler" not in found, "the base was built without it"
    assert "image" not in found, "how an image is made is not asked again"
    assert "torch" not in {
        check.component for check in checks_again(plan, replace(base, components={"torch": "1"}), (MOVE,))
    }
    board = Move(name="tensorboard", old="2.21.0", new="2.20.0")
    assert "tensorboard" not in {check.component for check in checks_again(plan, base, (board,))}


MOVE = Move(name="fsspec", old="2026.9.0", new="2024.9.0")


def test_what_moved_is_promised_once() -> None:
    plan = make_extension(
        tag="my/train:1",
        base=MOVED,
        requirements=f"fsspec==2024.9.0 {HASH}",
        locked=(("fsspec", "2024.9.0"),),
        resolved=True,
        removed=("numpy",),
        files=(),
        entry_point=None,
        released={"fsspec": "2024-09-04"},
    )
    assert (plan.moves, plan.removed) == ((replace(MOVE, size=1),), ("numpy",))
    titles = {check.why: check.command for check in plan.checks if isinstance(check, CommandCheck)}
    assert titles["the base's other 1 distributions are as they were"][-1] == "torch==2.13.0+cpu"
    assert titles["nothing is left of what was replaced"][-2:] == ("fsspec==2026.9.0", "numpy==")
    (imports,) = [check for check in plan.checks if isinstance(check, PythonImportsCheck)]
    assert imports.released == (("fsspec", "2024-09-04"),)


@pytest.mark.parametrize(
    ("torch", "vision", "fits"),
    [
        ("2.13.0+cpu", "0.28.0", False),
        ("2.13.0+cpu", "0.28.0+cu130", False),
        ("2.13.0+cpu", "0.28.0+cpu", True),
        ("2.4.1", "0.19.1", True),
    ],
)
def test_what_is_compiled_with_torch_is_of_the_same_build(torch: str, vision: str, fits: bool) -> None:
    base = replace(OURS, distributions=(BaseDistribution(name="torch", version=torch),))
    problems = wrong_builds((("six", "1"), ("torchvision", vision)), base, {"torchvision"})
    assert problems == ([] if fits else problems)
    assert [f"torchvision {vision} is not built for the base's torch {torch}" in each for each in problems] == (
        [] if fits else [True]
    )


def test_the_version_that_the_base_has_is_no_conflict(facts: Facts) -> None:
    for text in ("torch==2.13.0", "torch==2.13.0+cpu", "torch", "torch>=2.4,<3"):
        assert refused(text, OURS, facts) == []


def test_locked_versions_are_those_that_hold_in_the_base() -> None:
    text = f"b==2 {HASH}\na==1.0 {HASH}\nc==3 ; python_version < '3.9' {HASH}\n"
    read = read_requirements(text, "r")
    assert check_hashes(read.requirements) == []
    assert locked_versions(read.requirements, OURS) == (("a", "1.0"), ("b", "2"))


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
    assert find_entry_point(program, FILES, project=project) == EntryPoint(kind=kind, name=program, file=file)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("trian.py", "did you mean train.py?"),
        ("../train.py", "'..'"),
        ("./train.py", "'.'"),
        ("package//train.py", "empty"),
        ("/opt/ml/code/train.py", "name it train.py"),
        ("/home/me/train.py", "absolute path"),
        ("--help", "starts with -"),
        ("train me.py", "characters other than"),
        ("notes.txt", "chmod +x"),
        ("-m package.trian", "did you mean package/train.py?"),
        ("-m package/train", "not the name of a Python module"),
        ("package.train", "no such file: package.train"),
        ("", "empty"),
    ],
)
def test_entry_points_that_are_refused(program: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        find_entry_point(program, FILES, project=False)
    assert reason in str(caught.value)


@pytest.mark.parametrize("project", [False, True])
def test_the_launcher_understands_each_entry_point_as_the_builder_does(project: bool, tmp_path: Path) -> None:
    """The two never import each other: this is what holds them together."""
    files = {**FILES, **({"setup.py": False} if project else {})}
    for name, executable in files.items():
        path = tmp_path / "code" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755 if executable else 0o644)
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
        code, _ = look_at_code(str(tmp_path), str(tmp_path / "code"), program)
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


def test_another_launcher_needs_a_file() -> None:
    installed = EntryPoint(kind="module", name="-m torch.distributed.run", file="")
    script = EntryPoint(kind="script", name="train.py", file="train.py")
    assert check_foreign(installed, OURS) == check_foreign(script, FOREIGN) == check_foreign(None, FOREIGN) == []
    assert "does not have our launcher" in check_foreign(installed, FOREIGN)[0]


CODE = (SourceFile(path="train.py", content=b"print('trained')\n"),)
SCRIPT = EntryPoint(kind="script", name="train.py", file="train.py")


def test_an_image_of_ours_gets_only_what_it_lacks() -> None:
    plan = make_extension(
        tag="my/train:1", base=OURS, requirements="", locked=(), resolved=True, files=CODE, entry_point=SCRIPT
    )
    assert plan.path_has_code
    assert plan.environment == {"SAGEMAKER_PROGRAM": "train.py"}
    again = replace(OURS, environment={**OURS.environment, "SAGEMAKER_PROGRAM": "train.py"})
    plan = make_extension(
        tag="my/train:1", base=again, requirements="", locked=(), resolved=True, files=CODE, entry_point=SCRIPT
    )
    assert plan.environment == {}


def test_a_foreign_image_gets_path_and_directory_and_is_not_asked_for_a_plan() -> None:
    plan = make_extension(
        tag="my/train:1",
        base=FOREIGN,
        requirements=f"six==1 {HASH}",
        locked=(("six", "1"),),
        resolved=False,
        files=CODE,
        entry_point=SCRIPT,
    )
    assert not plan.path_has_code
    assert plan.environment == {"SAGEMAKER_SUBMIT_DIRECTORY": "/opt/ml/code", "SAGEMAKER_PROGRAM": "train.py"}
    commands = [check.command for check in plan.checks if isinstance(check, CommandCheck)]
    assert not any(command[0] == "train" for command in commands)
    assert any(FOREIGN.complaints[0] in command for command in commands), "what the base's pip check says is known"
    assert {type(check) for check in plan.checks} == {
        *(CommandCheck, PythonImportsCheck, LabelCheck, PathCheck, SecretsCheck)
    }


@pytest.mark.parametrize(
    ("distribution", "suite", "fits"),
    [("debian", "bookworm", True), ("ubuntu", "jammy", True), ("amzn", "", False), ("", "", False)],
)
def test_debian_packages_go_into_debian_and_ubuntu(distribution: str, suite: str, fits: bool) -> None:
    base = replace(OURS, distribution=distribution, suite=suite)
    assert check_distribution((), base) == []
    problems = check_distribution(("g++",), base)
    assert [f"{base.reference} is {distribution or 'an unknown'}" in each for each in problems] == [True] * (not fits)


def test_debian_packages_are_checked_and_labelled() -> None:
    assert check_packages(("g++", "libgl1")) == []
    assert "--apt '-y' is not the name of a Debian package" in check_packages(("-y",))
    plan = make_extension(
        tag="my/train:1",
        base=OURS,
        requirements="",
        locked=(),
        resolved=True,
        files=(),
        entry_point=None,
        apt=("libgl1", "g++", "g++"),
    )
    assert plan.labels["trainworks.apt"] == "g++ libgl1"
    assert [check.package for check in plan.checks if isinstance(check, DebianPackageCheck)] == ["g++", "libgl1"]


def test_the_project_itself_is_not_imported() -> None:
    plan = make_extension(
        tag="my/train:1",
        base=OURS,
        requirements=f"mine==1 {HASH}\nsix==1 {HASH}",
        locked=(("mine", "1"), ("six", "1")),
        resolved=True,
        files=CODE,
        entry_point=SCRIPT,
        project="mine",
        installed=("setup.py",),
    )
    (imports,) = [check for check in plan.checks if isinstance(check, PythonImportsCheck)]
    assert imports.distributions == ("six",)
    assert any(isinstance(check, CommandCheck) and check.expect == '"requirements": [],' for check in plan.checks)


def test_a_digest_of_the_base_is_named_and_never_the_one_that_the_base_itself_came_from() -> None:
    label = "org.opencontainers.image.base.digest"
    inherited = replace(OURS, labels={label: "sha256:" + "1" * 64})
    known = replace(inherited, digest="trainworks/pytorch-training@sha256:" + "2" * 64)
    for base, expected in ((OURS, None), (inherited, ""), (known, "sha256:" + "2" * 64)):
        plan = make_extension(
            tag="my/train:1", base=base, requirements="", locked=(), resolved=True, files=CODE, entry_point=None
        )
        assert plan.labels.get(label) == expected
    assert known.source == known.digest
    assert inherited.source == inherited.reference
