"""Secrets: found by name and by form, hidden wherever they come up, and nothing else hidden."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainworks_launcher.masking import MASK, Masker, is_secret_name, mask_urls


@pytest.mark.parametrize(
    "name",
    [
        "PASSWORD",
        "db_password",
        "dbPassword",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "HF_TOKEN",
        "hf-token",
        "SM_HP_HF_TOKEN",
        "TRAINWORKS_JOB_SECRET",
        "gcp_credentials",
        "apikey",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "PWD",
        "OLDPWD",
        "PATH",
        "tokenizer",
        "max_tokens",
        "num_key_value_heads",
        "monkey",
        "keyboard",
        "epochs",
        "_",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:pa55word@host/simple", f"https://{MASK}@host/simple"),
        (
            "see s3://bucket/key and git+https://tok@host/a.git",
            f"see s3://bucket/key and git+https://{MASK}@host/a.git",
        ),
        ("https://host/a@b", "https://host/a@b"),
        ("mail me@host.org", "mail me@host.org"),
    ],
)
def test_credentials_in_urls(text: str, masked: str) -> None:
    assert mask_urls(text) == masked


@pytest.mark.parametrize(
    ("argv", "masked"),
    [
        (("--token", "abc", "--epochs", "3"), ("--token", MASK, "--epochs", "3")),
        (("--token=abc", "--epochs=3"), (f"--token={MASK}", "--epochs=3")),
        (("-x", "HF_TOKEN=abc", "A=b"), ("-x", f"HF_TOKEN={MASK}", "A=b")),
        (("--use-token", "--epochs", "3"), ("--use-token", "--epochs", "3")),
        (("--token", "-5"), ("--token", MASK)),
        (("--lr", "0.1"), ("--lr", "0.1")),
    ],
)
def test_a_command_line(argv: tuple[str, ...], masked: tuple[str, ...]) -> None:
    assert Masker().words(argv) == masked


def test_a_value_is_hidden_wherever_it_comes_up_again() -> None:
    secret = "s3cr3t-value"
    masker = Masker({"HF_TOKEN": secret, "SM_HPS": json.dumps({"nested": {"api_key": "nested-s3cr3t"}}), "N": "1"})
    text = f"ValueError: cannot log in with {secret} or nested-s3cr3t"
    assert masker.text(text) == f"ValueError: cannot log in with {MASK} or {MASK}"
    shown = masker.variables({"HF_TOKEN": secret, "SM_HP_OTHER": f"a {secret}", "EPOCHS": "3", "EMPTY_TOKEN": ""})
    assert shown == {"HF_TOKEN": MASK, "SM_HP_OTHER": f"a {MASK}", "EPOCHS": "3", "EMPTY_TOKEN": ""}


def test_a_short_secret_is_hidden_in_its_own_place_only() -> None:
    masker = Masker({"token": "3"})
    assert masker.value("token", "3") == MASK
    assert masker.text("--epochs 3") == "--epochs 3"


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=6), st.text(max_size=200))
def test_no_secret_survives_and_masking_never_fails(variables: dict[str, str], text: str) -> None:
    masker = Masker(variables)
    for value in [value for name, value in variables.items() if is_secret_name(name) and len(value) >= 8]:
        assert value not in masker.text(text + value + text) or value in MASK
    masker.words((text, *variables))
