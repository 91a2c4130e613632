"""Test the wait for a registry, the requests that are not repeated, and the part of a program's
words that is shown.
"""

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
from trainworks.registry.protocol import (
    LONGEST_WAIT,
    Patience,
    RegistryUnreachableError,
    _parse_retry_after,
)
from trainworks.registry.tools import Registries, find_error_line

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
def notes() -> list[str]:
    return []


@pytest.fixture
def registries(
    notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registries]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with Registries(read_host_settings({}), report=notes.append, patience=PATIENCE) as mine:
        yield mine


@pytest.mark.parametrize("text", ["1", "date"])
def test_a_registry_is_left_alone_for_as_long_as_it_asks(
    hostile: Hostile, registries: Registries, notes: list[str], text: str
) -> None:
    begun: list[float] = []

    def busy(request: Request) -> bool:
        if "/manifests/" not in request.path:
            return False
        begun.append(time.monotonic())
        soon = (
            format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
            if text == "date"
            else text
        )
        return len(begun) == 1 and request.answer(429, b"", Retry_After=soon)

    hostile.fault = busy
    assert registries.read_manifest(f"{hostile.host}/released", "v1").digest
    assert len(begun) == 2
    # A date has whole seconds: of two that are left, one may be over.
    assert begun[1] - begun[0] > 0.9
    assert "it asks to wait" in notes[0]


def test_a_registry_that_asks_for_hours_has_refused(
    hostile: Hostile, registries: Registries
) -> None:
    hostile.fault = lambda request: request.answer(429, b"", Retry_After=str(int(LONGEST_WAIT) + 1))
    with pytest.raises(RegistryUnreachableError, match=r"failed 1 time: .* it asks to wait 301 s"):
        registries.read_manifest(f"{hostile.host}/released", "v1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("", 0),
        ("soon", 0),
        ("-3", 0),
        ("Thu, 01 Jan 1970", 0),
        ("Thu, 01 Jan 99999999999999999 00:00:00 GMT", 0),
    ],
)
def test_what_a_registry_may_ask_for(text: str, seconds: float) -> None:
    assert _parse_retry_after(text) == seconds


def test_the_line_that_says_what_failed_is_shown_and_not_the_end_of_a_stack() -> None:
    assert find_error_line(STACK) == STACK[1]
    assert find_error_line(["one", "two"]) == "one\ntwo"


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """A program whose words would mean a refusal, and a damaged image, if they were read."""
    program = tmp_path / "skopeo"
    words = "error: unexpected HTTP status: 403 Forbidden: file integrity checksum failed"
    program.write_text(
        f"#!/bin/sh\necho once >> {tmp_path}/count\necho '{words}'\nexit 1\n", encoding="utf-8"
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("status", "shown"), [(403, "permission denied"), (413, "HTTP 413"), (400, "HTTP 400")]
)
def test_what_the_registry_refuses_in_the_middle_of_an_upload_is_not_repeated(
    hostile: Hostile, registries: Registries, failing: Path, status: int, shown: str
) -> None:
    """Refuse the request that begins each upload: a proxy before it has a limit of sizes, or a rule
    against the method.
    """
    hostile.fault = lambda request: (
        request.command == "PATCH" and request.answer(status, b"<html>no</html>")
    )
    with pytest.raises(RegistryError, match=shown):
        registries.run_push(
            f"{hostile.host}/released",
            (str(failing),),
            show=lambda _line: None,
            check_image=lambda: None,
        )
    assert (failing.parent / "count").read_text(encoding="utf-8") == "once\n"


def test_a_failure_of_this_machine_is_not_blamed_on_the_registry(
    hostile: Hostile, registries: Registries, failing: Path
) -> None:
    def damaged() -> None:
        raise EngineError("the image on this machine is damaged")

    with pytest.raises(EngineError, match="is damaged"):
        registries.run_push(
            f"{hostile.host}/released",
            (str(failing),),
            show=lambda _line: None,
            check_image=damaged,
        )
    assert (failing.parent / "count").read_text(encoding="utf-8") == "once\n"


def test_a_failure_that_nothing_explains_is_repeated_whatever_the_program_says(
    hostile: Hostile, registries: Registries, failing: Path
) -> None:
    checks: list[int] = []
    with pytest.raises(
        RegistryError, match="although the registry answers: error: unexpected HTTP status: 403"
    ):
        registries.run_push(
            f"{hostile.host}/released",
            (str(failing),),
            show=lambda _line: None,
            check_image=lambda: checks.append(1),
        )
    assert (failing.parent / "count").read_text(encoding="utf-8") == "once\n" * PATIENCE.attempts
    assert checks == [1], "the image is read once"
    tried = [method for method, path, _ in hostile.seen if "/uploads/" in path]
    assert tried == [
        "POST",
        *["POST", "PATCH", "DELETE"] * PATIENCE.attempts,
    ], "what was tried is cancelled"


def test_a_registry_that_fails_for_a_moment_has_not_refused(
    hostile: Hostile, registries: Registries, failing: Path
) -> None:
    failed: list[int] = []

    def fault(request: Request) -> bool:
        if request.command != "PATCH" or failed:
            return False
        failed.append(1)
        return request.answer(503)

    hostile.fault = fault
    with pytest.raises(RegistryError, match="although the registry answers"):
        registries.run_push(
            f"{hostile.host}/released",
            (str(failing),),
            show=lambda _line: None,
            check_image=lambda: None,
        )
    assert (failing.parent / "count").read_text(encoding="utf-8") == "once\n" * PATIENCE.attempts


def test_attachments_are_asked_by_the_interface_and_by_a_tag_where_it_is_missing(
    hostile: Hostile, registries: Registries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask without any program."""
    monkeypatch.setenv("PATH", "")
    digest = registries.read_manifest(f"{hostile.host}/released", "v1").digest
    assert registries.read_referrers(f"{hostile.host}/released", digest) == ()
    hostile.fault = lambda request: (
        "/referrers/" in request.path and request.answer(404, b"404 page not found")
    )
    assert registries.read_referrers(f"{hostile.host}/released", digest) == ()
    attached = {"mediaType": "x", "digest": digest_of(b"a"), "size": 1}
    index = (
        '{"schemaVersion": 2, "manifests": [{"mediaType":'
        f' "x", "digest": "{attached["digest"]}", "size": 1}}]}}'
    )
    kind = "application/vnd.oci.image.index.v1+json"
    hostile.manifests["released", digest.replace(":", "-")] = kind, index.encode()
    assert registries.read_referrers(f"{hostile.host}/released", digest) == (attached,)
