"""Hyperparameters to arguments: the table that scripts depend on (the same as sagemaker-training's)."""

from __future__ import annotations

import pytest

from trainworks_launcher.hyperparameters import decode_values, split_reserved, to_arguments, truth
from trainworks_launcher.values import Json


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", 0.1, ("--lr", "0.1")),
        ("n", 3, ("-n", "3")),
        ("batch-size", 64, ("--batch-size", "64")),
        ("amp", True, ("--amp", "True")),
        ("amp", False, ("--amp", "False")),
        ("tag", None, ("--tag", "")),
        ("tag", "", ("--tag", "")),
        ("tag", "two words; $HOME", ("--tag", "two words; $HOME")),
        ("layers", [1, 2], ("--layers", "[1, 2]")),
        ("words", ["a", "b"], ("--words", "['a', 'b']")),
        ("options", {"b": 1, "a": "x"}, ("--options", "a=x,b=1")),
        ("big", 1e-05, ("--big", "1e-05")),
        ("umlaut", "größe", ("--umlaut", "größe")),
    ],
)
def test_one_hyperparameter(name: str, value: Json, expected: tuple[str, ...]) -> None:
    assert to_arguments({name: value}) == expected


def test_arguments_are_sorted_by_name() -> None:
    assert to_arguments({"b": 1, "a": 2, "aa": 3}) == ("-a", "2", "--aa", "3", "-b", "1")


@pytest.mark.parametrize(
    ("delivered", "decoded"),
    [("3", 3), ("0.5", 0.5), ('"it is"', "it is"), ("it is", "it is"), ("true", True), ("True", "True"), ("", "")],
)
def test_the_platform_delivers_strings(delivered: str, decoded: Json) -> None:
    assert decode_values({"x": delivered}) == {"x": decoded}


def test_reserved_names_never_reach_the_script() -> None:
    user, reserved = split_reserved(
        {"epochs": 1, "sagemaker_anything": 2, "_tuning_objective_metric": "m", "default_user_module_name": "x"}
    )
    assert dict(user) == {"epochs": 1}
    assert set(reserved) == {"sagemaker_anything", "_tuning_objective_metric", "default_user_module_name"}


ON: tuple[Json, ...] = (True, "true", "True", 1, "1")
OFF: tuple[Json, ...] = (False, "false", None, "", 0, "0", 2, [])


@pytest.mark.parametrize("value", ON)
def test_what_switches_on(value: Json) -> None:
    assert truth(value) is True


@pytest.mark.parametrize("value", OFF)
def test_what_does_not(value: Json) -> None:
    assert truth(value) is False
