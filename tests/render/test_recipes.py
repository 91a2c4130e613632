"""Recipes that do not fit their values: an error that names the file, before any engine starts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from trainworks.errors import RecipeError
from trainworks.facts.rows import Facts
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import Rendering, render

HEAD = "{#\n#}\n"
STAGE = "{% block stage %}\nFROM builder AS {{ component }}\nRUN true BODY\n{% endblock %}\n"


def stage(body: str = "", more: str = "") -> str:
    """Return a recipe whose stage runs this, with more behind it."""
    return HEAD + STAGE.replace("BODY", body) + more


def render_with(facts: Facts, component: str, text: str) -> Rendering:
    recipe = replace(facts.recipes[component], text=text)
    spoiled = replace(facts, recipes={**facts.recipes, component: recipe})
    return render(make_plan(Request(framework="pytorch", cuda="cpu"), spoiled), spoiled)


UNFIT: dict[str, tuple[str, str]] = {
    "unknown variables, all of them": (
        "torch",
        stage("{{ requirements }} {{ cuda_version }} {{ colour }}"),
    ),
    "files that nobody installs": ("torch", stage()),
    "packages that nobody installs": (
        "system",
        HEAD + "{% block stage %}\nFROM {{ base_reference }} AS system\n{% endblock %}\n",
    ),
    "files that there are none of": ("metis", stage("{{ requirements }}")),
    "Jinja that cannot be parsed": ("metis", stage("{{ version ")),
    "an attribute that is not there": ("metis", stage("{{ version.major.minor }}")),
    "arithmetic with a version": ("metis", stage("{{ version + 1 }}")),
    "a division by zero": ("metis", stage("{{ 1 // 0 }}")),
    "an unknown filter": ("metis", stage("{{ version | shout }}")),
    "a file that cannot be included": (
        "metis",
        stage("{% include '../../../../../etc/passwd' %}"),
    ),
    "a recipe that extends itself": ("metis", stage(more='{% extends "components/metis" %}')),
    "a macro without its argument": ("metis", stage("{{ apt() }}")),
    "a way out of the sandbox": ("metis", stage("{{ ''.__class__.__mro__ }}")),
    "gigabytes of numbers, or loops within loops": (
        "metis",
        stage("{{ range(10 ** 9) | list }}"),
    ),
    "gigabytes of blanks": ("metis", stage('{{ "%1000000000d" % 1 }}')),
    "a macro that calls itself": (
        "metis",
        stage("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
    ),
    "a misspelt instruction": ("metis", stage().replace("RUN", "RUNN")),
    "a line that goes on to nowhere": ("metis", stage("\\")),
    "a line that goes on to an instruction": ("metis", stage("\\\nRUN true")),
    "files of a stage that is not there": (
        "metis",
        stage() + "{% block image %}\nCOPY --from=metiss /a /b\n{% endblock %}",
    ),
    "a mount of a stage that is not there": (
        "metis",
        stage().replace("true", "--mount=type=bind,from=nowhere,target=/x true"),
    ),
    "a block that would be dropped": (
        "metis",
        stage() + "{% block imag %}COPY x y{% endblock %}",
    ),
}
"""A component, and a wrong recipe in the place of its own."""


def test_golden_problems_of_recipes(facts: Facts, golden: Callable[[str, str], None]) -> None:
    lines = []
    for title, (component, text) in UNFIT.items():
        with pytest.raises(RecipeError) as caught:
            render_with(facts, component, text)
        # A longer message goes on with Jinja's own words.
        lines.append(
            f"{title}\n  {re.sub(r'j2, line [0-9]+', 'j2, line N', caught.value.message)[:140]}\n"
        )
        lines += [f"  hint: {caught.value.hint[:50]}\n"] if caught.value.hint else []
    golden("facts/recipes.txt", "".join(lines))


@pytest.mark.parametrize("name", ["Dockerfile.j2", "macros.j2"])
def test_a_frame_or_macro_file_that_cannot_be_parsed(name: str, facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    spoiled = replace(facts, templates={**facts.templates, name: "line 1\n{% for x in %}\n"})
    with pytest.raises(RecipeError, match=rf"\Atemplates/{name}: line 2: "):
        render(plan, spoiled)


def test_a_frame_that_is_missing(facts: Facts) -> None:
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    with pytest.raises(RecipeError, match=r"\Atemplates/Dockerfile\.j2: "):
        render(plan, replace(facts, templates={"macros.j2": facts.templates["macros.j2"]}))


def test_values_of_the_environment_are_not_expanded(facts: Facts) -> None:
    recipe = replace(facts.recipes["metis"], environment={"PRICE": 'a "quoted" $HOME \\ end'})
    spoiled = replace(facts, recipes={**facts.recipes, "metis": recipe})
    rendering = render(make_plan(Request(framework="pytorch", cuda="cpu"), spoiled), spoiled)
    assert 'PRICE="a \\"quoted\\" \\$HOME \\\\ end"' in rendering.dockerfile


def test_a_line_break_in_the_environment_is_refused(facts: Facts) -> None:
    """Refuse a value that did not come through `load`, which refuses it in a row: in quotes it
    would still end the line.
    """
    recipe = replace(facts.recipes["metis"], environment={"EVIL": "x\nRUN curl evil"})
    spoiled = replace(facts, recipes={**facts.recipes, "metis": recipe})
    with pytest.raises(
        RecipeError,
        match=r"\Atemplates/Dockerfile\.j2: line \d+: 'x\\nRUN curl evil' has a control",
    ):
        render(make_plan(Request(framework="pytorch", cuda="cpu"), spoiled), spoiled)


def test_what_a_recipe_copies_has_to_be_there(facts: Facts) -> None:
    gone = ("files/compiler/compile-a-model", "files/system/", "launcher/trainworks_launcher/")
    left = replace(
        facts, files=tuple(file for file in facts.files if not file.path.startswith(gone))
    )
    plan = make_plan(Request(framework="pytorch", cuda="cpu"), facts)
    with pytest.raises(RecipeError) as caught:
        render(plan, left)
    assert caught.value.message.split("; ") == [
        "the recipe of compiler takes files/compiler/compile-a-model, which is missing",
        "the recipe of system, builder, licenses takes files/system, which is missing",
        "the recipe of licenses takes files/system/list-licenses, which is missing",
        "the recipe of launcher takes launcher/trainworks_launcher, which is missing",
    ]


def test_what_is_copied_as_it_is_has_its_sum(facts: Facts) -> None:
    rendering = render(make_plan(Request(framework="pytorch", cuda="cpu"), facts), facts)
    contents = {file.path: hashlib.sha256(file.content).hexdigest() for file in rendering.files}
    copied = {path: (component, sha256) for component, path, sha256 in rendering.copied}
    for path, component, source in (
        ("/opt/trainworks/image.json", "manifest", "image.json"),
        ("/etc/ssh/sshd_config.d/trainworks.conf", "ssh", "shells/sshd.conf"),
        ("/opt/trainworks/bin/train", "launcher", "launcher/entrypoint/train"),
        (
            "/opt/trainworks/lib/trainworks_launcher/environment/platforms/slurm.py",
            "launcher",
            "launcher/trainworks_launcher/environment/platforms/slurm.py",
        ),
    ):
        assert copied[path] == (component, contents[source])
    launcher = [path for path in contents if path.startswith("launcher/trainworks_launcher/")]
    assert len(launcher) == len(
        [path for path in copied if path.startswith("/opt/trainworks/lib/trainworks_launcher/")]
    )
    assert not [path for path in copied if path.startswith(("/opt/builder", "/opt/root"))]
