"""Rendered contexts: golden, portable, closed in themselves, and changed by a
bump only where it matters.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from render.bumps import bumped
from render.differences import ADVICE, SAME, describe_differences
from trainworks.facts.load import load
from trainworks.facts.rows import Facts
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.plan.model import ImagePlan, Request
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for, row_named
from trainworks.render.dockerfile import Rendering, render


@pytest.fixture(scope="module")
def plans(facts: Facts) -> Mapping[str, ImagePlan]:
    return {facts.name_of(row): make_plan(request_for(row, facts), facts) for row in facts.targets}


@pytest.fixture(scope="module")
def renderings(plans: Mapping[str, ImagePlan], facts: Facts) -> Mapping[str, Rendering]:
    return {name: render(plan, facts) for name, plan in plans.items()}


WHOLE = {
    "pytorch-2.4.1-cu121-py311-debian12": "packages with CUDA: the image of the README",
    "tensorflow-2.21.0-cu129-py311-debian12": "packages of another framework",
    "pytorch-2.0.1-cu118-py310-ubuntu20.04-vendor": (
        "vendor sources with apt: every part is compiled, Python too"
    ),
}
"""The targets whose Dockerfiles are golden files, one of each kind, and why.

Of the others there is a digest.
"""

DIGESTS = "render/digests.txt"


def packages_text(plan: ImagePlan) -> str:
    """Return which component installs which distribution (hashes stand in the lock)."""
    return "".join(
        f"{step.component}: {file.name} {file.version}\n"
        for step in plan.steps
        for file in step.python
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", WHOLE)
def test_golden_dockerfile_and_packages(
    name: str,
    plans: Mapping[str, ImagePlan],
    renderings: Mapping[str, Rendering],
    golden: Callable[[str, str], None],
) -> None:
    golden(f"render/{name}/Dockerfile", renderings[name].dockerfile)
    golden(f"render/{name}/packages.txt", packages_text(plans[name]))


def test_golden_digests(
    plans: Mapping[str, ImagePlan],
    renderings: Mapping[str, Rendering],
    golden: Callable[[str, str], None],
    root: Path,
    tmp_path: Path,
) -> None:
    """Compare the same two texts of every other target, as one line each, and show a difference."""
    lines = {
        name: (
            f"{name} Dockerfile {digest(rendering.dockerfile)} packages"
            f" {digest(packages_text(plans[name]))}"
        )
        for name, rendering in sorted(renderings.items())
        if name not in WHOLE
    }
    path = root / "tests" / "golden" / DIGESTS
    if path.exists() and "TRAINWORKS_UPDATE_GOLDEN" not in os.environ:
        before = set(path.read_text(encoding="utf-8").splitlines())
        differing = [name for name, line in lines.items() if line not in before]
        if differing:
            pytest.fail(describe_differences(differing, renderings, root, tmp_path), pytrace=False)
    golden(DIGESTS, "".join(f"{line}\n" for line in lines.values()))


@pytest.fixture
def repository(root: Path, tmp_path: Path) -> Path:
    """Give a repository of git with one commit: what renders in this working tree."""
    for name in ("images", "templates", "launcher", "smdistributed", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "tests")
        shutil.copytree(root / name, tmp_path / name, ignore=ignored)
    shutil.copy(root / "build.py", tmp_path)
    settings = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=0")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "Begin")):
        subprocess.run(("git", *settings, *words), cwd=tmp_path, check=True)
    return tmp_path


def test_the_difference_from_the_last_commit_is_shown_once_for_all_targets_that_have_it(
    repository: Path, facts: Facts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    components = repository / "images" / "components.toml"
    before = 'debian = ["ca-certificates", "libpython3-stdlib", '
    text = components.read_text(encoding="utf-8")
    assert before in text
    after = 'debian = ["a-package", "ca-certificates", "libpython3-stdlib", '
    components.write_text(text.replace(before, after, 1), encoding="utf-8")
    changed_facts = load(repository)
    rows = [row for row in facts.targets if facts.name_of(row).endswith("py311-debian12")]
    unchanged, *changed = sorted(facts.name_of(row) for row in rows)[:3]
    renderings = {}
    for name in (unchanged, *changed):
        source = facts if name == unchanged else changed_facts
        row = row_named(name, source)
        renderings[name] = render(make_plan(request_for(row, source), source), source)
    folder = tmp_path_factory.mktemp("last-commit")
    shown = describe_differences([unchanged, *changed], renderings, repository, folder)
    same, different, advice = shown.split("\n\n")
    assert same == f"{unchanged}:\n{SAME}"
    assert different.startswith(f"{', '.join(changed)}:\n--- HEAD/Dockerfile\n+++ Dockerfile\n@@ ")
    added = re.findall(r"^[+-] .*", different, re.MULTILINE)
    assert added
    assert {line.split()[1] for line in added} == {"a-package"}
    assert advice == ADVICE


def test_every_golden_folder_is_a_whole_target(root: Path) -> None:
    assert {path.name for path in (root / "tests" / "golden" / "render").iterdir()} == {
        *WHOLE,
        "digests.txt",
    }


def instructions(dockerfile: str) -> list[str]:
    """Return the instructions, each as one line without its comments."""
    lines = [
        line
        for line in dockerfile.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


ALLOWED = ("FROM", "RUN", "COPY", "ENV", "LABEL", "WORKDIR", "ENTRYPOINT", "CMD")

NOT_PORTABLE = {
    "a heredoc": re.compile(r"<<-?['\"]?[A-Za-z_]"),
    "a syntax line": re.compile(r"^#\s*(syntax|escape|check)\s*=", re.IGNORECASE | re.MULTILINE),
    "COPY --link, --parents, --exclude": re.compile(
        r"^COPY .*--(link|parents|exclude)", re.MULTILINE
    ),
    "network or security modes": re.compile(r"--(network|security)="),
}
"""Things that an engine lacks, or has only since a later Dockerfile syntax than 1.2."""


def test_only_instructions_that_every_engine_knows(renderings: Mapping[str, Rendering]) -> None:
    for name, rendering in renderings.items():
        words = {line.split(" ", 1)[0] for line in instructions(rendering.dockerfile)}
        assert words <= set(ALLOWED), name
        titles = [
            title for title, pattern in NOT_PORTABLE.items() if pattern.search(rendering.dockerfile)
        ]
        assert titles == [], name


@pytest.mark.parametrize(
    "text",
    [
        "RUN cat <<EOF\nEOF",
        "# syntax=docker/dockerfile:1",
        "COPY --link a b",
        "RUN --network=none true",
    ],
)
def test_what_is_not_portable_would_be_seen(text: str) -> None:
    assert [title for title, pattern in NOT_PORTABLE.items() if pattern.search(text)] != []


def test_every_secret_is_one_that_the_host_gives(renderings: Mapping[str, Rendering]) -> None:
    secret_names = HostSettings(pip=PipSettings()).secrets("bookworm", "").keys()
    used = set()
    for rendering in renderings.values():
        mounted_secrets = set(re.findall(r"--mount=type=secret,id=([^\s,]+)", rendering.dockerfile))
        assert mounted_secrets <= secret_names
        used |= mounted_secrets
        read = set(re.findall(r"/run/secrets/([\w.]+)", rendering.dockerfile))
        assert read <= mounted_secrets
    assert used | {"mirror"} == secret_names, (
        "each is used; a mirror by targets that download artifacts"
    )


def sources(rendering: Rendering) -> Iterator[str]:
    """Yield the paths of the context that the Dockerfile copies or binds."""
    for line in instructions(rendering.dockerfile):
        if line.startswith("COPY") and "--from=" not in line:
            yield from [word for word in line.split()[1:-1] if not word.startswith("--")]
        yield from re.findall(r"--mount=type=bind,source=([^\s,]+)", line)


def test_what_one_part_downloads_has_names_of_its_own(plans: Mapping[str, ImagePlan]) -> None:
    """Each file lies in one folder, of a mirror and of a build context."""
    steps = [step for plan in plans.values() for step in plan.steps if len(step.artifacts) > 1]
    assert steps
    for step in steps:
        assert len({artifact.file for artifact in step.artifacts}) == len(step.artifacts), (
            step.component
        )


def test_what_is_copied_is_there_and_what_is_there_is_copied(
    renderings: Mapping[str, Rendering],
) -> None:
    for name, rendering in renderings.items():
        paths = {file.path for file in rendering.files}
        used = set()
        for source in sources(rendering):
            below = {path for path in paths if path == source or path.startswith(f"{source}/")}
            assert below, f"{name}: {source}"
            used |= below
        assert paths - used == set(), name


def test_stages_copy_only_from_earlier_ones_and_none_is_for_nothing(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering]
) -> None:
    for name, rendering in renderings.items():
        plan = plans[name]
        builder_images = [plan.builder_image] if plan.builder_image else []
        earlier_stages = list(dict.fromkeys([plan.image, *builder_images]))
        used = set()
        for line in instructions(rendering.dockerfile):
            if match := re.match(r"FROM (\S+) AS (\S+)", line):
                assert match[1] in earlier_stages, line
                assert match[2] not in earlier_stages, line
                used.add(match[1])
                earlier_stages.append(match[2])
            for stage in re.findall(r"--from=(\S+)|,from=([^\s,]+)", line):
                assert (stage[0] or stage[1]) in earlier_stages[:-1], line
                used.add(stage[0] or stage[1])
        assert earlier_stages[-1] == "image"
        assert set(earlier_stages) - {"image"} == used, name
        images = {plan.image, plan.builder_image}
        assert set(rendering.stage_components) == set(earlier_stages) - images


def test_a_part_is_built_again_when_a_part_that_it_copies_from_changes(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering]
) -> None:
    """Compare the sources of a stage's copies with its row (``builds_with``): the plan's account of
    a bump is the engine's.
    """
    for name, rendering in renderings.items():
        copied: dict[str, set[str]] = {}
        component = ""
        for line in instructions(rendering.dockerfile):
            if match := re.match(r"FROM \S+ AS (\S+)", line):
                component = rendering.stage_components[match[1]]
            for stage in re.findall(r"from=([^\s,]+)", line):
                copied.setdefault(component, set()).add(rendering.stage_components[stage])
        built_with = {
            step.component: set(step.builds_with)
            for step in plans[name].steps
            if step.builds_with and step.in_image
        }
        copied_from = {
            component: stages - {component}
            for component, stages in copied.items()
            if component not in ("image", "builder")
        }
        # A part that another one brings along has no stage of its own, and is as old as that one.
        without_stage = {
            component
            for component in built_with
            if component not in rendering.stage_components.values()
        }
        assert {component: stages for component, stages in copied_from.items() if stages} == {
            component: stages
            for component, stages in built_with.items()
            if component not in without_stage
        }, name


def test_the_final_stage_has_nothing_of_the_builder(renderings: Mapping[str, Rendering]) -> None:
    for name, rendering in renderings.items():
        final = rendering.dockerfile.split("FROM system AS image", 1)[1]
        assert "builder" not in final
        assert "apt-get" not in final, name


def test_every_requirement_is_pinned_and_hashed(renderings: Mapping[str, Rendering]) -> None:
    wheel = re.compile(r"[a-z0-9-]+==[^\s=]+ --hash=sha256:[0-9a-f]{64}")
    archive = re.compile(r"[a-z0-9-]+ [^\s=]+ \S+\.(tar\.gz|zip) [0-9a-f]{64}")
    for rendering in renderings.values():
        for file in rendering.files:
            if file.path.startswith("requirements/"):
                line = archive if file.path.endswith("-archives.txt") else wheel
                assert all(line.fullmatch(text) for text in file.content.decode().splitlines()), (
                    file.path
                )


def test_no_layer_of_wheels_is_larger_than_the_largest_wheel(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering]
) -> None:
    divided = set()
    for name, rendering in renderings.items():
        steps = [step for step in plans[name].steps if step.in_image]
        sizes = {package.sha256: package.size for step in steps for package in step.python}
        # A wheel that a component downloads by itself may be larger than those
        # of the lock, and its size is not known.
        if any(step.artifacts and step.python for step in steps):
            continue
        largest = max(sizes.values())
        for step in (step for step in steps if step.python):
            owned = [
                stage
                for stage, owner in rendering.stage_components.items()
                if owner == step.component
            ]
            stages = [stage for stage in owned if not stage.endswith("-archives")]
            contents = {file.path: file.content.decode() for file in rendering.files}
            # Wheels that are built of source archives are in the layer of the wheels beside them.
            lists = {
                stage: (f"requirements/{stage}.txt", f"requirements/{stage}-archives.txt")
                for stage in stages
            }
            texts = []
            for paths in lists.values():
                texts.append("".join(contents.get(path, "") for path in paths))
            layers = [re.findall(r"\b[0-9a-f]{64}\b", text) for text in texts if text]
            # Each wheel is in one layer, and each layer is copied.
            assert sorted(wheel_digest for layer in layers for wheel_digest in layer) == sorted(
                package.sha256 for package in step.python
            )
            assert all(f"COPY --from={stage} " in rendering.dockerfile for stage in stages), (
                f"{name} {stages}"
            )
            assert (
                max((sum(map(sizes.__getitem__, layer)) for layer in layers), default=0) <= largest
            ), f"{name} {step.component}"
            divided |= {step.component} if len(layers) > 1 else set()
        # Docker takes at most 127, those of the base image and of a user's own steps on top.
        image = rendering.dockerfile.rpartition("\nFROM ")[2]
        assert len(re.findall(r"^(COPY|RUN|ADD) ", image, re.MULTILINE)) < 80, name
    assert divided == {"cuda", "mxnet", "sagemaker-training", "tensorflow", "torch"}


def test_a_second_target_sends_little_but_its_own_wheels(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering], facts: Facts
) -> None:
    """Push or pull a target after another one with the same Python: it sends its layers beside the
    wheels that it adds.
    """
    layers: dict[str, set[frozenset[str]]] = {}
    sizes = {
        package.sha256: package.size
        for plan in plans.values()
        for step in plan.steps
        for package in step.python
    }
    for name, rendering in renderings.items():
        outside = {step.component for step in plans[name].steps if not step.in_image}
        stages = {
            f"requirements/{stage}.txt"
            for stage, of in rendering.stage_components.items()
            if of not in outside
        }
        texts = [file.content.decode() for file in rendering.files if file.path in stages]
        layers[name] = {frozenset(re.findall(r"sha256:(\w+)", text)) for text in texts}
    neighbours: dict[tuple[str, str], list[str]] = {}
    for row in facts.targets:
        plan = plans[name := facts.name_of(row)]
        if facts.sources_of(row) == "packages" and row.cuda != "cpu":
            neighbours.setdefault((plan.target.python, plan.base.architecture), []).append(name)
    pairs = [pair for names in neighbours.values() for pair in permutations(names, 2)]
    for first, second in pairs:
        own = frozenset[str]().union(*layers[second]) - frozenset[str]().union(*layers[first])
        sent = sum(sizes[wheel] for layer in layers[second] - layers[first] for wheel in layer)
        assert sent <= 1.02 * sum(sizes[wheel] for wheel in own), f"{second} after {first}"
    assert len(pairs) > 20


def test_no_address_and_no_setting_of_this_machine(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering]
) -> None:
    for name, rendering in renderings.items():
        # The manifest names the public index that a framework came from: jobs are told of it.
        index = json.dumps({"wheel_index": plans[name].wheel_index}).strip("{}")
        texts = [
            rendering.dockerfile,
            # The lists of downloads are addresses, a licence has its own, and
            # nothing else of the context is.
            *(
                file.content.decode().replace(index, "")
                for file in rendering.files
                if "launcher" not in file.path
                and not re.fullmatch(r"artifacts/[\w-]+\.txt|.*/LICENSE", file.path)
            ),
        ]
        assert [
            text
            for text in texts
            if re.search(r"https?://|file://|/root/\.(config|pip)|/home/", text)
        ] == []


def test_every_image_has_the_launcher_without_preflight(
    renderings: Mapping[str, Rendering],
) -> None:
    for rendering in renderings.values():
        paths = [file.path for file in rendering.files if file.path.startswith("launcher/")]
        assert "launcher/trainworks_launcher/command/cli.py" in paths
        assert [path for path in paths if "preflight" in path] == []


def test_the_manifest_says_what_the_launcher_reads(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering], root: Path
) -> None:
    own, smdistributed = (
        tomllib.loads((root / folder / "pyproject.toml").read_text("utf-8"))["project"]["version"]
        for folder in ("launcher", "smdistributed")
    )
    for name, rendering in renderings.items():
        manifest = json.loads(
            next(file.content for file in rendering.files if file.path == "image.json")
        )
        assert manifest["schema"] == 1
        assert manifest["name"] == name
        versions = {
            step.component: step.version
            for step in plans[name].steps
            if step.version and step.in_image
        }
        assert {
            component: row["version"] for component, row in manifest["components"].items()
        } == versions
        assert versions["launcher"] == own
        if "trainworks-smdistributed" in manifest["protected"]:
            assert versions["smp"] == versions["smddp"] == smdistributed
        assert manifest["programs"].keys() >= {"python", "mpirun", "sshd", "ssh", "ssh-keygen"}
        assert ("torchrun" in manifest["programs"]) is ("torch" in versions)
        assert all(path.startswith("/") for path in manifest["programs"].values())
        assert manifest["hostname_shim"].startswith("/")
        assert manifest["protected"]["mpi4py"] == versions["mpi4py"]
        assert manifest["instances"].keys() == plans[name].instances.keys()


def test_login_shells_and_ssh_have_the_environment_without_the_devices(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering]
) -> None:
    for name, rendering in renderings.items():
        texts = {
            file.path: file.content.decode()
            for file in rendering.files
            if file.path.startswith("shells/")
        }
        assert texts.keys() == {"shells/profile.sh", "shells/sshd.conf"}, name
        for text in texts.values():
            assert plans[name].environment["PATH"] in text
            assert "NVIDIA" not in text


# A bump touches only its dependents.


def sections(dockerfile: str) -> dict[str, str]:
    """Return the text of each stage, with the comment above it, by its component."""
    starts = [
        match.start() for match in re.finditer(r"^(# \S+.*\n)?FROM ", dockerfile, re.MULTILINE)
    ]
    texts = [dockerfile[start:end] for start, end in pairwise([*starts, len(dockerfile)])]
    named = {re.search(r" AS (\S+)", text): text for text in texts}
    return {match[1]: text for match, text in named.items() if match}


def versioned(facts: Facts) -> list[tuple[str, str]]:
    cells = []
    for row in [row for row in facts.targets if row.framework == "pytorch"][:3]:
        plan = make_plan(request_for(row, facts), facts)
        cells += [
            (facts.name_of(row), step.component)
            for step in plan.steps
            if step.python and step.version
        ]
    return cells


def test_a_bump_of_a_component_changes_its_stage_and_its_requirements_only(
    facts: Facts, plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering]
) -> None:
    rows = {facts.name_of(row): row for row in facts.targets}
    cells = versioned(facts)
    assert len(cells) > 20
    for name, component in cells:
        spoiled = bumped(facts, rows[name], component)
        row = next(row for row in spoiled.targets if spoiled.name_of(row) == name)
        plan = make_plan(request_for(row, spoiled), spoiled)
        before, after = renderings[name], render(plan, spoiled)
        old, new = sections(before.dockerfile), sections(after.dockerfile)
        # The comment above a stage has the version; nothing else of the Dockerfile may have it. The
        # variables of the image that tell a version are in its last instructions, and in the file
        # that login shells read.
        variables = {"PYTORCH_VERSION": "torch"}.items() & {
            (key, component) for key in plan.environment
        }
        # A component's comment is above the first of its stages.
        first = f"{component}-archives" if f"{component}-archives" in old else component
        assert [stage for stage in old if old[stage] != new[stage]] == [
            first,
            *(["image"] if variables else []),
        ]
        stages = {stage for stage, owner in before.stage_components.items() if owner == component}
        if not variables:
            assert instructions(before.dockerfile) == instructions(after.dockerfile)
        contents = {file.path: file.content for file in before.files}
        differing = {file.path for file in after.files if contents[file.path] != file.content}
        read = {"shells/profile.sh", "shells/sshd.conf"} if variables else set()
        files = {f"requirements/{stage}.txt" for stage in stages}
        if next(step.in_image for step in plan.steps if step.component == component):
            read.add("image.json")
        if plans[name].protected != plan.protected:
            read |= {"constraints.txt", "uv-settings.toml"}
        assert differing == {*files, *read}, f"{name} {component}"
        others = [step for step in plan.steps if step.component != component]
        assert others == [step for step in plans[name].steps if step.component != component]


def test_leaving_a_component_out_leaves_the_other_stages_as_they_are(
    facts: Facts, renderings: Mapping[str, Rendering]
) -> None:
    """Stages are shared between images of different components, so that the
    engine's cache serves both.
    """
    name = "pytorch-2.4.1-cu121-py311-debian12"
    request = Request(framework="pytorch", cuda="cu121", without_components=("rmm", "mpi4py"))
    full = sections(renderings[name].dockerfile)
    less = sections(render(make_plan(request, facts), facts).dockerfile)
    assert full.keys() - less.keys() == {"rmm", "mpi4py"}
    assert [stage for stage in less if less[stage] != full[stage]] == ["image"]


def test_what_is_compiled_is_hardened_and_looked_at(
    plans: Mapping[str, ImagePlan], renderings: Mapping[str, Rendering]
) -> None:
    seen = set()
    for name, plan in plans.items():
        if plan.target.sources != "packages":
            continue
        stages = re.split(r"^FROM ", renderings[name].dockerfile, flags=re.MULTILINE)
        compiling = {
            stage.split()[2]
            for stage in stages
            if re.search(r"^[^#]*\b(gcc|make|ninja) [-$]", stage, re.MULTILINE)
        }
        looked_at = {check.component for check in plan.checks if check.kind == "hardened-libraries"}
        assert compiling == looked_at, name
        assert all(
            "-Wl,-z,relro,-z,now" in stage
            for stage in stages
            if stage.split()[2:3] and stage.split()[2] in compiling
        )
        seen |= compiling
    assert seen == {"aws-ofi-nccl", "gdrcopy", "hostname-shim", "libfabric-cuda", "rdma-core"}
