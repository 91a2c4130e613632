"""What a plan says a build would do: only dependents are built again, and the reasons are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from render.bumps import NEWER, bumped
from trainworks.facts.rows import Facts, SourceFile, TargetRow
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for
from trainworks.render.dockerfile import Rendering, render
from trainworks.render.forecast import forecast, inputs_of

MANIFEST = "manifest"
"""Its file has every version: it is the last layer, and is written again with any change."""


def planned(row: TargetRow, facts: Facts) -> tuple[ImagePlan, Rendering]:
    plan = make_plan(request_for(row, facts), facts)
    return plan, render(plan, facts)


def each_component_once(facts: Facts) -> Iterator[tuple[TargetRow, str]]:
    """Yield a target for each recipe that has a version of its own, in any target."""
    seen: set[str] = set()
    for row in facts.targets:
        for step in make_plan(request_for(row, facts), facts).steps:
            if step.version and step.recipe not in seen and (step.python or step.artifacts):
                seen.add(step.recipe)
                yield row, step.component


def dependents(component: str, plan: ImagePlan) -> set[str]:
    """Return what the rows say must be built again: what is built with a component, and with that again."""
    if component in {"builder", "cpython"}:
        return {step.component for step in plan.steps} - {"system", "cpython"}
    found = {component}
    for step in plan.steps:
        found |= {step.component} if found & set(step.builds_with) else set()
    return found


def test_a_bump_of_any_component_builds_its_dependents_again_and_nothing_else(facts: Facts) -> None:
    """One row is touched; the plan names the component, the old and the new version, and who is built with it."""
    recipes = []
    for row, component in each_component_once(facts):
        plan, rendering = planned(row, facts)
        changed = bumped(facts, row, component)
        name = facts.name_of(row)
        new_row = next(other for other in changed.targets if changed.name_of(other) == name)
        new_plan, new_rendering = planned(new_row, changed)
        expected = forecast(new_plan, new_rendering, changed, inputs_of(plan, rendering), "yesterday")
        again = {rebuild.component: rebuild.reasons for rebuild in expected.rebuilds}
        staged = {step.component for step in plan.steps if "FROM " in rendering.texts[step.component]}
        wanted = {*(dependents(component, plan) & staged), component, MANIFEST}
        assert set(again) == wanted, f"{name}: {component}"
        step = next(step for step in plan.steps if step.component == component)
        assert f"version: {step.version} -> {step.version}{NEWER}" in again[component]
        assert expected.layers_from == next(
            each.component for each in plan.steps if each.in_image and each.component in again
        )
        for other in wanted - {component, MANIFEST}:
            assert all(reason.endswith("is built again") for reason in again[other]), again[other]
        recipes.append(step.recipe)
    versioned = {
        step.recipe
        for row in facts.targets
        for step in make_plan(request_for(row, facts), facts).steps
        if step.version and (step.python or step.artifacts)
    }
    assert set(recipes) == versioned
    assert len(recipes) >= 8


def first(facts: Facts) -> TargetRow:
    return next(row for row in facts.targets if row.framework == "pytorch")


def test_the_same_inputs_build_nothing_and_download_nothing(facts: Facts) -> None:
    plan, rendering = planned(first(facts), facts)
    expected = forecast(plan, rendering, facts, inputs_of(plan, rendering), "yesterday")
    assert expected.rebuilds == ()
    assert expected.kept == tuple(step.component for step in plan.steps)
    assert (expected.download_bytes, expected.unknown_sizes) == (0, 0)


def test_a_first_build_downloads_every_file_of_the_lock(facts: Facts) -> None:
    plan, rendering = planned(first(facts), facts)
    expected = forecast(plan, rendering, facts, None)
    assert expected.kept == ()
    assert expected.download_bytes == sum(file.size for step in plan.steps for file in step.python)
    assert expected.unknown_sizes == 0


def test_a_changed_file_is_named_and_concerns_only_those_who_copy_it(facts: Facts) -> None:
    """A line of the launcher changes the launcher's part; the hostname shim, beside it in the tree, stays."""
    plan, rendering = planned(first(facts), facts)
    path = "launcher/trainworks_launcher/names.py"
    files = tuple(
        replace(file, content=file.content + b"# a comment\n") if file.path == path else file for file in facts.files
    )
    changed = replace(facts, files=files)
    new_plan, new_rendering = planned(first(facts), changed)
    expected = forecast(new_plan, new_rendering, changed, inputs_of(plan, rendering), "yesterday")
    assert [(each.component, each.reasons) for each in expected.rebuilds] == [("launcher", (f"file {path} changed",))]
    assert expected.download_bytes == 0


def test_a_new_package_of_the_distribution_builds_everything_again(facts: Facts) -> None:
    components = tuple(
        replace(row, debian=(*row.debian, "jq")) if row.name == "ssh" else row for row in facts.components
    )
    plan, rendering = planned(first(facts), facts)
    changed = replace(facts, components=components)
    new_plan, new_rendering = planned(first(facts), changed)
    expected = forecast(new_plan, new_rendering, changed, inputs_of(plan, rendering), "yesterday")
    again = {each.component: each.reasons for each in expected.rebuilds}
    assert again["system"] == ("recipe changed", "package jq is new")
    assert again["builder"] == ("system is built again",)
    assert "builder is built again" in again["torch"]


def test_what_is_new_and_what_is_gone_is_said(facts: Facts) -> None:
    request = request_for(first(facts), facts)
    plan, rendering = planned(first(facts), facts)
    less = make_plan(replace(request, without_components=("mpi4py",)), facts)
    expected = forecast(plan, rendering, facts, inputs_of(less, render(less, facts)), "yesterday")
    assert {each.component: each.reasons for each in expected.rebuilds}["mpi4py"] == ("new in this image",)


def test_every_file_of_a_context_is_an_input_of_some_part(facts: Facts) -> None:
    """Nothing that decides an image's bytes may change without the plan seeing it."""
    for row in facts.targets:
        plan, rendering = planned(row, facts)
        known = {name for part in inputs_of(plan, rendering).values() for name in part}
        unseen = [file.path for file in rendering.files if is_content(file) and f"file {file.path}" not in known]
        assert unseen == [], facts.name_of(row)


def is_content(file: SourceFile) -> bool:
    """Lists of downloads are inputs line by line; the folders beside them hold local copies of the same files."""
    return not file.path.startswith(("requirements/", "artifacts/", "wheels/"))


def test_the_size_is_that_of_the_recorded_build(facts: Facts) -> None:
    (record, *_) = facts.built
    row = next(row for row in facts.targets if facts.name_of(row) == record.target)
    plan, rendering = planned(row, facts)
    assert forecast(plan, rendering, facts, None).recorded_megabytes == record.megabytes > 0
    assert forecast(plan, rendering, replace(facts, built=()), None).recorded_megabytes == 0
