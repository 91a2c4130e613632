"""Recipes that do not fit their values: an error that names the file, before any engine starts."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from trainworks.errors import RecipeError
from trainworks.facts.rows import Facts
from trainworks.plan.model import Request
from trainworks.plan.resolve import make_plan
from trainworks.render.dockerfile import Rendering, render

HEAD = "{#\n#}\n"
STAGE = "{% block stage %}\nFROM builder AS {{ component }}\nRUN true BODY\n{% endblock %}\n"


def render_with(facts: Facts, component: str, text: str) -> Rendering:
    recipe = replace(facts.recipes[component], text=text)
    spoiled = replace(facts, recipes={**facts.recipes, component: recipe})
    return render(make_plan(Request(framework="pytorch", cuda="cpu"), spoiled), spoiled)


@pytest.mark.parametrize(
    ("component", "text", "message", "hint"),
    [
        pytest.param(
            "torch",
            HEAD + STAGE.replace("BODY", "{{ requirements }} {{ cuda_version }} {{ colour }}"),
            "templates/components/torch.j2: it reads `colour`, which its component does not have; "
            "it reads `cuda_version`, which",
            "it may read: architecture, archives, artifacts, base_reference, ",
            id="unknown variables, all of them",
        ),
        pytest.param(
            "torch",
            HEAD + STAGE.replace("BODY", ""),
            "templates/components/torch.j2: it ignores `requirements`, which its row gives",
            "it may read: ",
            id="files that nobody installs",
        ),
        pytest.param(
            "system",
            HEAD + "{% block stage %}\nFROM {{ base_reference }} AS system\n{% endblock %}\n",
            "templates/components/system.j2: it ignores `packages`, which its row gives",
            "it may read: ",
            id="packages that nobody installs",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ requirements }}"),
            "templates/components/metis.j2: it reads `requirements`, which its component does not have",
            "it may read: architecture, archives, artifacts, base_reference, ",
            id="files that there are none of",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ version "),
            "templates/components/metis.j2: line ",
            "",
            id="Jinja that cannot be parsed",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ version.major.minor }}"),
            "templates/components/metis.j2: line 5: 'str object' has no attribute 'major'",
            "",
            id="an attribute that is not there",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ version + 1 }}"),
            "templates/components/metis.j2: line 5: can only concatenate str",
            "",
            id="arithmetic with a version",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ 1 // 0 }}"),
            "templates/components/metis.j2: line 5: integer division or modulo by zero",
            "",
            id="a division by zero",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ version | shout }}"),
            "templates/components/metis.j2: line 5: No filter named 'shout'.",
            "",
            id="an unknown filter",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{% include '../../../../../etc/passwd' %}"),
            "templates/components/metis.j2: line 5: a recipe takes nothing from other templates",
            "",
            id="a file that cannot be included",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "") + '{% extends "components/metis" %}',
            "templates/components/metis.j2: line 7: a recipe takes nothing from other templates",
            "",
            id="a recipe that extends itself",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ apt() }}"),
            "templates/components/metis.j2: line 5: parameter 'suite' was not provided (in templates/macros.j2, line ",
            "",
            id="a macro without its argument",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ ''.__class__.__mro__ }}"),
            "templates/components/metis.j2: line 5: access to attribute '__class__' of 'str' object is unsafe",
            "",
            id="a way out of the sandbox",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{{ range(10 ** 9) | list }}"),
            "templates/components/metis.j2: it reads `range`, which its component does not have",
            "it may read: ",
            id="gigabytes of numbers, or loops within loops",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", '{{ "%1000000000d" % 1 }}'),
            "templates/components/metis.j2: line 5: recipes do not calculate with %",
            "",
            id="gigabytes of blanks",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"),
            "templates/components/metis.j2: line 5: it calls or includes itself without an end",
            "",
            id="a macro that calls itself",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("RUN", "RUNN").replace("BODY", ""),
            "templates/components: the recipe of metis: 'RUNN' is not an instruction that recipes use",
            "did you mean RUN?",
            id="a misspelt instruction",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "\\"),
            "templates/components: the recipe of metis: its last line ends with a backslash, and nothing follows",
            "",
            id="a line that goes on to nowhere",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "\\\nRUN true"),
            "templates/components: the recipe of metis: the line before RUN ends with a backslash",
            "",
            id="a line that goes on to an instruction",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "") + "{% block image %}\nCOPY --from=metiss /a /b\n{% endblock %}",
            "the recipe of metis takes files of the stage 'metiss', which is missing",
            "did you mean metis?",
            id="files of a stage that is not there",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("true BODY", "--mount=type=bind,from=nowhere,target=/x true"),
            "the recipe of metis takes files of the stage 'nowhere', which is missing",
            "",
            id="a mount of a stage that is not there",
        ),
        pytest.param(
            "metis",
            HEAD + STAGE.replace("BODY", "") + "{% block imag %}COPY x y{% endblock %}",
            "templates/components/metis.j2: unknown block 'imag'",
            "a recipe has: image, stage",
            id="a block that would be dropped",
        ),
    ],
)
def test_a_recipe_that_does_not_fit(component: str, text: str, message: str, hint: str, facts: Facts) -> None:
    with pytest.raises(RecipeError) as caught:
        render_with(facts, component, text)
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


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
    """Where a value did not come through `load`, which refuses it in a row: in quotes it would still end the line."""
    recipe = replace(facts.recipes["metis"], environment={"EVIL": "x\nRUN curl evil"})
    spoiled = replace(facts, recipes={**facts.recipes, "metis": recipe})
    with pytest.raises(RecipeError, match=r"\Atemplates/Dockerfile\.j2: line \d+: 'x\\nRUN curl evil' has a control"):
        render(make_plan(Request(framework="pytorch", cuda="cpu"), spoiled), spoiled)


def test_what_a_recipe_copies_has_to_be_there(facts: Facts) -> None:
    gone = ("files/compiler/compile-a-model", "files/system/", "launcher/trainworks_launcher/")
    left = replace(facts, files=tuple(file for file in facts.files if not file.path.startswith(gone)))
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
            "/opt/trainworks/lib/trainworks_launcher/given/platforms/slurm.py",
            "launcher",
            "launcher/trainworks_launcher/given/platforms/slurm.py",
        ),
    ):
        assert copied[path] == (component, contents[source])
    launcher = [path for path in contents if path.startswith("launcher/trainworks_launcher/")]
    assert len(launcher) == len(
        [path for path in copied if path.startswith("/opt/trainworks/lib/trainworks_launcher/")]
    )
    assert not [path for path in copied if path.startswith(("/opt/builder", "/opt/root"))]
