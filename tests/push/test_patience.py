"""How long a registry is waited for, what is not repeated, and what of a program's words is shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from push.hostile import Hostile, Request, digest_of, hostile_registry
from trainworks.errors import EngineError, RegistryError
from trainworks.host.settings import read_host_settings
from trainworks.registry.protocol import LONGEST_WAIT, Patience, RegistryUnreachableError, _seconds_of
from trainworks.registry.tools import Registries, what_failed

PATIENCE = Patience(attempts=3, pause=0.01)

STACK = [
    "Copying 3 layers",
    'Error: failed to perform "copy": mismatch sha256 digest of sha256:12',
    "goroutine 7 [running]:",
    *(f"  oras-go/internal/syncutil/limit.go:{number} +0xe6" for number in range(20)),
]


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with hostile_registry() as mine:
        mine.put_image("released", b"one", tag="v1")
        yield mine


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def registries(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registries]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with Registries(read_host_settings({}), report=said.append, patience=PATIENCE) as mine:
        yield mine


@pytest.mark.parametrize("text", ["1", "date"])
def test_a_registry_is_left_alone_for_as_long_as_it_asks(
    hostile: Hostile, registries: Registries, said: list[str], text: str
) -> None:
    begun: list[float] = []

    def busy(request: Request) -> bool:
        if "/manifests/" not in request.path:
            return False
        begun.append(time.monotonic())
        soon = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True) if text == "date" else text
        return len(begun) == 1 and request.answer(429, b"", Retry_After=soon)

    hostile.fault = busy
    assert registries.existing(f"{hostile.host}/released", "v1").digest
    assert len(begun) == 2
    # A date has whole seconds: of two that are left, one may be over.
    assert begun[1] - begun[0] > 0.9
    assert "it asks to wait" in said[0]


def test_a_registry_that_asks_for_hours_has_refused(hostile: Hostile, registries: Registries) -> None:
    hostile.fault = lambda request: request.answer(429, b"", Retry_After=str(int(LONGEST_WAIT) + 1))
    with pytest.raises(RegistryUnreachableError, match=r"failed 1 time: .* it asks to wait 301 s"):
        registries.existing(f"{hostile.host}/released", "v1")


@pytest.mark.parametrize(("text", "seconds"), [("7", 7), ("", 0), ("soon", 0), ("-3", 0), ("Thu, 01 Jan 1970", 0)])
def test_what_a_registry_may_ask_for(text: str, seconds: float) -> None:
    assert _seconds_of(text) == seconds


def test_the_line_that_says_what_failed_is_shown_and_not_the_end_of_a_stack() -> None:
    assert what_failed(STACK) == STACK[1]
    assert what_failed(["one", "two"]) == "one\ntwo"


@pytest.mark.parametrize(
    ("words", "kind", "shown"),
    [
        ("FATA[0001] writing blob: received unexpected HTTP status: 403 Forbidden", RegistryError, "HTTP 403"),
        ("error: PUT: unexpected status code 413: too large", RegistryError, "HTTP 413"),
        ('FATA writing blob: file integrity checksum failed for "usr/bin/x"', EngineError, "cannot read the image"),
    ],
)
def test_what_can_never_pass_is_not_repeated(
    hostile: Hostile, registries: Registries, tmp_path: Path, words: str, kind: type[Exception], shown: str
) -> None:
    """A program that ends with these words, as skopeo and docker do in the middle of an upload."""
    program, count = tmp_path / "skopeo", tmp_path / "count"
    (tmp_path / "words").write_text(words + "\n", encoding="utf-8")
    program.write_text(f"#!/bin/sh\necho once >> {count}\ncat {tmp_path}/words\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(kind) as caught:
        registries.push(f"{hostile.host}/released", (str(program),), show=lambda _line: None)
    assert shown in str(caught.value)
    assert count.read_text(encoding="utf-8") == "once\n"


def test_a_failure_that_nothing_explains_is_repeated(hostile: Hostile, registries: Registries, tmp_path: Path) -> None:
    program, count = tmp_path / "skopeo", tmp_path / "count"
    program.write_text(f"#!/bin/sh\necho once >> {count}\necho 'error: EOF'\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(RegistryError, match="although the registry answers: error: EOF"):
        registries.push(f"{hostile.host}/released", (str(program),), show=lambda _line: None)
    assert count.read_text(encoding="utf-8") == "once\n" * PATIENCE.attempts


def test_attachments_are_asked_by_the_interface_and_by_a_tag_where_it_is_missing(
    hostile: Hostile, registries: Registries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program is needed for it."""
    monkeypatch.setenv("PATH", "")
    digest = registries.existing(f"{hostile.host}/released", "v1").digest
    assert registries.referrers(f"{hostile.host}/released", digest) == ()
    hostile.fault = lambda request: "/referrers/" in request.path and request.answer(404, b"404 page not found")
    assert registries.referrers(f"{hostile.host}/released", digest) == ()
    attached = {"mediaType": "x", "digest": digest_of(b"a"), "size": 1}
    index = f'{{"schemaVersion": 2, "manifests": [{{"mediaType": "x", "digest": "{attached["digest"]}", "size": 1}}]}}'
    kind = "application/vnd.oci.image.index.v1+json"
    hostile.manifests["released", digest.replace(":", "-")] = kind, index.encode()
    assert registries.referrers(f"{hostile.host}/released", digest) == (attached,)
