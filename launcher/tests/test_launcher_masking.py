"""Secrets: found by name and by form, hidden wherever they come up, and nothing else hidden."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_support import environment, plan

from trainworks_launcher.command.explain import explain, to_table
from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.contract.redaction import MASK, Redactor, is_secret_name, redact_urls
from trainworks_launcher.job.arguments import STYLES


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


SORT_KEY, RANDOM = "val_loss", "8f14e45fceea167a5a36dedd4bea2543"


@pytest.mark.parametrize("name", ["key", "KEY", "keys"])
def test_a_value_of_a_mere_key_is_hidden_only_if_it_looks_like_a_secret(name: str) -> None:
    redactor = Redactor({"sort": json.dumps({name: SORT_KEY}), "other": json.dumps({name: RANDOM})})
    for value, hidden in ((SORT_KEY, False), (RANDOM, True)):
        shown = MASK if hidden else value
        assert redactor.json({"sort": {name: value}}) == {"sort": {name: shown}}
        assert redactor.value("SM_HP_SORT", f'{{"{name}":"{value}"}}') == f'{{"{name}":"{shown}"}}'
        assert redactor.words((f"--{name}", value, f"--{name}={value}", f"{name}={value}")) == (
            (f"--{name}", shown, f"--{name}={shown}", f"{name}={shown}")
        )
        assert redactor.text(f"sorted by {value}") == f"sorted by {shown}"


@pytest.mark.parametrize("name", ["DB_PASS", "DB_PASSWORD", "HF_TOKEN"])
def test_a_secret_may_have_the_form_of_a_fraction(name: str) -> None:
    assert Redactor({name: "98765432.1"}).text("login 98765432.1") == f"login {MASK}"


@pytest.mark.parametrize(
    ("text", "redacted"),
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
def test_credentials_in_urls(text: str, redacted: str) -> None:
    assert redact_urls(text) == redacted


LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7xY9zA1cD3fG5hJ"  # made up


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"401 for hf_{LETTERS}: who are you", f"401 for {MASK}: who are you"),
        (f"git clone failed: ghp_{LETTERS}", f"git clone failed: {MASK}"),
        (f"github_pat_11AAAA_{LETTERS}, glpat-{LETTERS[:20]}", f"{MASK}, {MASK}"),
        (
            f"headers={{'Authorization': 'Bearer {LETTERS}'}}",
            f"headers={{'Authorization': 'Bearer {MASK}'}}",
        ),
        (f"authorization: Basic {LETTERS}==", f"authorization: Basic {MASK}"),
        (f"curl -H 'x: bearer {LETTERS}.x'", f"curl -H 'x: bearer {MASK}'"),
        (f"jwt eyJhbGciOiJI.{LETTERS}.sig-1", f"jwt {MASK}"),
        (f"https://h/k?X-Amz-Credential={LETTERS}%2F&X-Amz-Signature={LETTERS}&p=1", None),
        (f"https://h/k?AWSAccessKeyId={LETTERS}&Signature={LETTERS}%3D", None),
        (f"https://h/k?sv=2024&sig={LETTERS}", f"https://h/k?sv=2024&sig={MASK}"),
        ("key AKIAIOSFODNN7EXAMPLE is not valid", f"key {MASK} is not valid"),
        (f"AKIAIOSFODNN7EXAMPLE:{LETTERS}/Z", MASK),
        (f"{{'SecretAccessKey': '{LETTERS}'}}", f"{{'SecretAccessKey': '{MASK}'}}"),
        (f"aws_session_token = {LETTERS}", f"aws_session_token = {MASK}"),
        (f"sk-proj-{LETTERS} nvapi-{LETTERS}", f"{MASK} {MASK}"),
        (
            f"-----BEGIN RSA PRIVATE KEY-----\n{LETTERS}\n-----END RSA PRIVATE KEY-----\nx",
            f"{MASK}\nx",
        ),
    ],
)
def test_tokens_of_a_known_form(text: str, redacted: str | None) -> None:
    shown = Redactor().text(text)
    assert LETTERS not in shown
    assert redacted is None or shown == redacted
    assert Redactor().text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "from huggingface_hub import hf_hub_download",
        "Basic training of bearer authentication tokens: 12",
        "commit 8f14e45fceea167a5a36dedd4bea2543aabbccdd, sha256:" + "0a" * 32,
        "sk-learn-contrib-and-other-long-names",
        "Secret access key: none",
        "https://h/a?token=3&signature=v4",
        "AKIA is a prefix",
        (
            "RuntimeError: CUDA error at"
            " /opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:1518"
        ),
    ],
)
def test_what_only_looks_a_little_like_a_token_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize(
    ("argv", "redacted"),
    [
        (("--token", "abc", "--epochs", "3"), ("--token", MASK, "--epochs", "3")),
        (("--token=abc", "--epochs=3"), (f"--token={MASK}", "--epochs=3")),
        (("-x", "HF_TOKEN=abc", "A=b"), ("-x", f"HF_TOKEN={MASK}", "A=b")),
        (("--use-token", "--epochs", "3"), ("--use-token", "--epochs", "3")),
        (("--token", "-5"), ("--token", MASK)),
        (("--lr", "0.1"), ("--lr", "0.1")),
    ],
)
def test_a_command_line(argv: tuple[str, ...], redacted: tuple[str, ...]) -> None:
    assert Redactor().words(argv) == redacted


def test_a_value_is_hidden_wherever_it_comes_up_again() -> None:
    secret = "s3cr3t-value"
    redactor = Redactor(
        {
            "HF_TOKEN": secret,
            "SM_HPS": json.dumps({"nested": {"api_key": "nested-s3cr3t"}}),
            "N": "1",
        }
    )
    text = f"ValueError: cannot log in with {secret} or nested-s3cr3t"
    assert redactor.text(text) == f"ValueError: cannot log in with {MASK} or {MASK}"
    shown = redactor.variables(
        {"HF_TOKEN": secret, "SM_HP_OTHER": f"a {secret}", "EPOCHS": "3", "EMPTY_TOKEN": ""}
    )
    assert shown == {"HF_TOKEN": MASK, "SM_HP_OTHER": f"a {MASK}", "EPOCHS": "3", "EMPTY_TOKEN": ""}


def test_a_short_secret_is_hidden_in_its_own_place_only() -> None:
    redactor = Redactor({"token": "3"})
    assert redactor.value("token", "3") == MASK
    assert redactor.text("--epochs 3") == "--epochs 3"


@given(
    st.dictionaries(st.text(max_size=20), st.text(max_size=40), max_size=6), st.text(max_size=200)
)
def test_no_secret_survives_and_masking_never_fails(variables: dict[str, str], text: str) -> None:
    redactor = Redactor(variables)
    for value in [
        value for name, value in variables.items() if is_secret_name(name) and len(value) >= 8
    ]:
        assert value not in redactor.text(text + value + text) or value in MASK
    redactor.words((text, *variables))


PLACES: tuple[Callable[[str], dict[str, Json]], ...] = (
    lambda secret: {"my-token": secret},
    lambda secret: {"password": json.dumps(secret)},
    lambda secret: {"db": {"user": "me", "password": secret}},
    lambda secret: {"logins": [{"api_key": secret}, 1]},
    lambda secret: {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_custom_mpi_options": f"-x A=1 -x HF_TOKEN={shlex.quote(secret)}",
    },
)
"""Where a job can carry a secret."""


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=20, deadline=None)
@given(
    place=st.sampled_from(PLACES),
    more=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
)
def test_no_secret_of_any_length_or_form_is_in_a_plan_that_is_shown(
    style: str, place: Callable[[str], dict[str, Json]], more: str
) -> None:
    secret = f"S3cr{more}"
    job_environment = environment({**place(secret), "sagemaker_argument_style": style, "epochs": 3})
    redactor = Redactor(job_environment.variables, job_environment.hyperparameters)
    shown = plan(job_environment).redacted(redactor)
    assert "S3cr" not in shown.to_json()
    assert "S3cr" not in to_table(shown, explain(shown, job_environment.variables), 100)
    assert "epochs" in shown.env["SM_HPS"], "the rest is as it was"


HIDDEN = [
    # A connection string in a variable, and a traceback's quotation of it. Sources: the makers'
    # documentation of each.
    ("AccountKey=c2VjcmV0a2V5MTIz+/==;EndpointSuffix=core.windows.net", "c2VjcmV0a2V5MTIz+/=="),
    ("Endpoint=sb://h/;SharedAccessKeyName=Root;SharedAccessKey=abcDEF12345=", "abcDEF12345="),
    ("Server=h;Uid=me;Pwd=Pa55word-x;Encrypt=yes", "Pa55word-x"),
    ("Driver=x;UID=me;PWD=Pa55word-x", "Pa55word-x"),
    ("Server=h;Password='Pa55;word x';Initial Catalog=db", "Pa55;word x"),
    ('Server=h;Password="Pa55;word x";Initial Catalog=db', "Pa55;word x"),
    ("Server=h;password=Pa55&wo;rd;Encrypt=yes", "Pa55&wo;rd"),
    ("user=me&password=Pa55word-x&next=1", "Pa55word-x"),
]


@pytest.mark.parametrize(("value", "secret"), HIDDEN)
def test_a_secret_of_a_connection_string_is_hidden_where_it_comes_up(
    value: str, secret: str
) -> None:
    redactor = Redactor({"CONNECTION": value})
    assert (
        redactor.text(f"ValueError: cannot log in with {secret}: bad")
        == f"ValueError: cannot log in with {MASK}: bad"
    )
    shown = redactor.json(value)
    assert secret not in f"{shown}"
    assert f"{shown}".count("=") >= value.count("=") - secret.count("="), "the other pairs stay"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (
            "post to https://hooks.slack.com/services/T0/B0/x1y2z3 failed",
            f"https://hooks.slack.com/services/{MASK} f",
        ),
        ("https://hooks.slack.com/triggers/E0/1/abc", f"https://hooks.slack.com/triggers/{MASK}"),
        ("https://discord.com/api/webhooks/12/aB-c", f"https://discord.com/api/webhooks/{MASK}"),
        (
            "https://x.webhook.office.com/webhookb2/1@2/IncomingWebhook/3/4",
            f"webhook.office.com/webhookb2/{MASK}",
        ),
        ("not known before: AccountKey=Zm9vYmFy;x=1", f"AccountKey={MASK};x=1"),
        ("Server=h;Pwd=abc;Encrypt=yes", f"Server=h;Pwd={MASK};Encrypt=yes"),
        ("Command ['mysql', '--pass', 'hunter22'] failed", f"['mysql', '--pass', '{MASK}'] failed"),
        ("ran: tool --pass=hunter22 --lr 0.1", f"tool --pass={MASK} --lr 0.1"),
        ("ran: tool --pw hunter22 --lr 0.1", f"tool --pw {MASK} --lr 0.1"),
        ("ran: tool --db-pass hunter22", f"--db-pass {MASK}"),
        ("ran: tool --api-key hunter22 x", f"--api-key {MASK} x"),
        ("ran: tool --password 'hunter 22' x", f"--password {MASK} x"),
    ],
)
def test_secrets_in_a_text_that_no_variable_has(text: str, redacted: str) -> None:
    shown = Redactor().text(text)
    assert redacted in shown
    assert Redactor().text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "password_embedding=0.3;token_loss=1e-4",
        "PWD=/home/me;OLDPWD=/work",
        "num_pass=3 forward_pass=12 bypass=1 compass=2",
        "--num-pass 3 --forward-pass fused --passes 2 --max-tokens 12",
        "usage: train.py [-h] [--token TOKEN] [--api-key API_KEY]",
        "loss=0.1;accuracy=0.9&x=1",
        "sha256:" + "0a" * 32,
        "see https://slack.com/help and https://discord.com/api/v10/channels/1",
        "pwd: /opt/ml/code",
    ],
)
def test_what_is_no_secret_stays_in_texts_and_hyperparameters(text: str) -> None:
    assert Redactor({"NOTE": text}).text(text) == text
    assert Redactor().json(text) == text


def test_an_option_named_pass_is_hidden_and_a_pass_over_data_is_not() -> None:
    words = (
        "--pass",
        "x",
        "--pw=y",
        "--db-pass",
        "z",
        "--num-pass",
        "3",
        "--forward_pass=a",
        "--pw",
        "w",
    )
    redacted = (
        "--pass",
        MASK,
        f"--pw={MASK}",
        "--db-pass",
        MASK,
        "--num-pass",
        "3",
        "--forward_pass=a",
        "--pw",
        MASK,
    )
    assert Redactor().words(words) == redacted
