"""A tag is absent if the registry says so, with HTTP 404 and a code of the protocol.

Every other answer is an error.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from push.hostile import BASIC, Hostile, Request, as_json, hostile_registry
from push.support import PASSWORD, USER, docker_configuration
from trainworks.cli import main
from trainworks.errors import RegistryError
from trainworks.registry.tools import Registries
from trainworks_testing.certificates import Authority

HTML = b"<html>Bad Request</html>"


def problem(code: str) -> bytes:
    return as_json({"errors": [{"code": code, "message": "unknown error, not found"}]})


SPOILED: dict[str, Callable[[Request], bool]] = {
    "400 of a proxy": lambda request: request.answer(400, HTML, Content_Type="text/html"),
    "400 UNKNOWN": lambda request: request.answer(400, problem("UNKNOWN")),
    "400 MANIFEST_UNKNOWN": lambda request: request.answer(400, problem("MANIFEST_UNKNOWN")),
    "403": lambda request: request.answer(403, problem("DENIED")),
    "403 of a proxy": lambda request: request.answer(403, HTML),
    "401 without a challenge": lambda request: request.answer(401),
    "404 of a web server": lambda request: request.answer(404, b"<html>404 Not Found</html>"),
    "404 empty": lambda request: request.answer(404),
    "404 with another code": lambda request: request.answer(404, problem("BLOB_UNKNOWN")),
    "404 with two codes": lambda request: request.answer(
        404, as_json({"errors": [{"code": "MANIFEST_UNKNOWN"}, {"code": "DENIED"}]})
    ),
    "404 with odd JSON": lambda request: request.answer(404, b'{"errors": "MANIFEST_UNKNOWN"}'),
    "404 without errors": lambda request: request.answer(404, b'{"errors": []}'),
    "404 NOT_FOUND, of a registry without a list of tags": lambda request: request.answer(
        404, problem("NOT_FOUND")
    ),
    "406": lambda request: request.answer(406, b"no"),
    "410": lambda request: request.answer(410, problem("MANIFEST_UNKNOWN")),
    "413": lambda request: request.answer(413, HTML),
    "421": lambda request: request.answer(421, HTML),
    "451": lambda request: request.answer(451, HTML),
    "429": lambda request: request.answer(429, problem("TOOMANYREQUESTS")),
    "503": lambda request: request.answer(503, b"not found"),
    "204": lambda request: request.answer(204),
    "200 of a portal": lambda request: request.answer(
        200, b"<html>Please sign in</html>", Content_Type="text/html"
    ),
    "200 with another JSON": lambda request: request.answer(200, b'{"errors": []}'),
    "200 cut off": lambda request: request.answer(
        200, b'{"schemaVersion": 2', Content_Length="999"
    ),
    "a redirect to nowhere": lambda request: request.answer(302, Location="/portal"),
    "a redirect in a circle": lambda request: request.answer(307, Location=request.path),
    "nothing": lambda request: not request.connection.close(),
}
"""Wrong answers to the question for a tag, as of a proxy, a portal or a broken registry."""


@pytest.fixture
def registry() -> Iterator[Hostile]:
    """Give a registry in memory that has an image under two names; oras is not needed to ask it."""
    with hostile_registry() as mine:
        mine.put_image("released", b"one", tag="v1")
        mine.put_image("team/image", b"two", tag="v1")
        yield mine


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_not_known_to_be_absent_is_an_error(
    name: str, registry: Hostile, registries: Registries
) -> None:
    registry.fault = lambda request: (
        "/released/manifests/" in request.path and SPOILED[name](request)
    )
    with pytest.raises(RegistryError) as caught:
        registries.find_manifest(f"{registry.host}/released", "v1")
    assert "has no v1" not in str(caught.value)
    assert f"{registry.host}" in str(caught.value)


@pytest.mark.parametrize("code", ["MANIFEST_UNKNOWN", "NAME_UNKNOWN"])
def test_what_the_registry_says_is_absent(
    code: str, registry: Hostile, registries: Registries
) -> None:
    registry.fault = lambda request: request.path != "/v2/" and request.answer(404, problem(code))
    assert registries.find_manifest(f"{registry.host}/released", "v2") is None


@pytest.mark.parametrize(
    ("pages", "absent"),
    [
        ([["v0", "v2"], ["v3"]], True),
        ([["v0", "v2"], ["v1"]], False),
        ([None], True),
        (["v1"], False),
    ],
    ids=["not in the list", "on the second page", "an empty list", "no list"],
)
def test_harbors_own_code_counts_if_the_list_of_tags_agrees(
    pages: list[object], absent: bool, registry: Hostile, registries: Registries
) -> None:
    def harbor(request: Request) -> bool:
        parts = urlsplit(request.path)
        if not parts.path.endswith("/tags/list"):
            return request.answer(404, problem("NOT_FOUND"))
        page = int(parse_qs(parts.query).get("page", ["0"])[0])
        more = (
            {"Link": f'</v2/released/tags/list?page={page + 1}>; rel="next"'}
            if page + 1 < len(pages)
            else {}
        )
        return request.answer(200, as_json({"name": "released", "tags": pages[page]}), **more)

    registry.fault = harbor
    place = f"{registry.host}/released"
    if absent:
        assert registries.find_manifest(place, "v1") is None
    else:
        with pytest.raises(RegistryError, match="NOT_FOUND"):
            registries.find_manifest(place, "v1")


def test_a_repository_that_harbor_does_not_have(registry: Hostile, registries: Registries) -> None:
    registry.fault = lambda request: (
        request.path != "/v2/" and request.answer(404, problem("NOT_FOUND"))
    )
    assert registries.find_manifest(f"{registry.host}/new", "v1") is None


def test_another_host_cannot_say_that_it_is_absent(
    registry: Hostile, registries: Registries
) -> None:
    """The other host may be late, or a mirror."""
    with hostile_registry() as other:
        registry.fault = lambda request: (
            "/manifests/" in request.path
            and request.answer(307, Location=f"{other.url}{request.path}")
        )
        with pytest.raises(RegistryError, match=f"HTTP 404 Not Found from {other.host}"):
            registries.find_manifest(f"{registry.host}/released", "v1")
        other.put_image("released", b"three", tag="v1")
        assert registries.find_manifest(f"{registry.host}/released", "v1") is not None


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", ["400 of a proxy", "400 UNKNOWN", "421", "404 empty", "a redirect to nowhere"]
)
def test_a_tag_that_never_moves_does_not_move(
    name: str, hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spoil the target's answers by a proxy until something is sent."""
    hostile.put_image("released", b"one", tag="v1")
    hostile.put_image("team/image", b"two", tag="v1")
    before = dict(hostile.manifests)

    def spoils(request: Request) -> bool:
        sent = any(method != "GET" for method, _, _ in hostile.seen[:-1])
        return not sent and "/released/manifests/" in request.path and SPOILED[name](request)

    hostile.fault = spoils
    assert (
        main(["promote", f"{hostile.host}/team/image:v1", f"{hostile.host}/released"])
        == RegistryError.exit_status
    )
    assert hostile.manifests == before
    assert {method for method, _, _ in hostile.seen} == {"GET"}, "nothing was sent"
    assert f"reading {hostile.host}/released:v1" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["login", "identity", "nobody"])
def test_a_token_is_asked_for_as_its_registry_says(
    kind: str, registry: Hostile, registries: Registries, tmp_path: Path
) -> None:
    forms: list[dict[str, list[str]]] = []

    def tokens(request: Request) -> bool:
        if request.path.startswith("/token"):
            length = int(request.headers.get("Content-Length") or 0)
            query = request.rfile.read(length).decode() if length else urlsplit(request.path).query
            forms.append(parse_qs(query))
            token_key = "access_token" if length else "token"
            return request.answer(200, as_json({token_key: "t0ken"}))
        if request.headers.get("Authorization") == "Bearer t0ken":
            return False
        scope = "repository:released:pull"
        challenge = f'Bearer realm="{registry.url}/token",service="here, there",scope="{scope}"'
        return request.answer(401, WWW_Authenticate=challenge)

    registry.fault = tokens
    if kind == "login":
        docker_configuration(tmp_path / "docker", {registry.host: (USER, PASSWORD)})
    elif kind == "identity":
        empty = base64.b64encode(b"00000000-0000-0000-0000-000000000000:").decode()
        rows = {"auths": {registry.host: {"auth": empty, "identitytoken": "refresh-me"}}}
        (tmp_path / "docker" / "config.json").write_text(json.dumps(rows), encoding="utf-8")
    place = f"{registry.host}/released"
    assert registries.find_manifest(place, "v1") is not None
    assert registries.find_manifest(place, "v2") is None
    assert len(forms) == 1, "a token is good for more than one question"
    assert forms[0]["scope"] == ["repository:released:pull"]
    assert forms[0]["service"] == ["here, there"]
    assert forms[0].get("refresh_token") == (["refresh-me"] if kind == "identity" else None)
    (sent,) = [login for _, path, login in registry.seen if path.startswith("/token")]
    assert sent == (BASIC if kind == "login" else "")


@pytest.mark.parametrize(
    ("status", "content"),
    [(403, b"{}"), (200, b"<html>"), (200, b'{"token": 7}'), (404, problem("NAME_UNKNOWN"))],
)
def test_a_token_service_that_gives_none_is_an_error(
    status: int, content: bytes, registry: Hostile, registries: Registries
) -> None:
    registry.fault = lambda request: (
        request.answer(status, content)
        if request.path.startswith("/token")
        else request.answer(401, WWW_Authenticate=f'Bearer realm="{registry.url}/token"')
    )
    with pytest.raises(RegistryError):
        registries.find_manifest(f"{registry.host}/released", "v1")


def test_a_login_stays_with_its_registry(
    authority: Authority, registries: Registries, tmp_path: Path
) -> None:
    """Read from the registry's other addresses without the login, and never without TLS."""
    with (
        hostile_registry(authority) as mine,
        hostile_registry(authority) as store,
        hostile_registry() as clear,
    ):
        docker_configuration(
            tmp_path / "docker",
            dict.fromkeys((mine.host, store.host, clear.host), (USER, PASSWORD)),
        )
        mine.login = True
        image = mine.put_image("a", b"layer", tag="v1")
        store.put_image("a", b"layer", tag="v1")

        def moved(request: Request) -> bool:
            target = store if "/manifests/" in request.path else clear
            return request.headers.get("Authorization") == BASIC and request.answer(
                307, Location=f"{target.url}{request.path}"
            )

        mine.fault = moved
        manifest = registries.find_manifest(f"{mine.host}/a", "v1")
        assert manifest is not None
        assert manifest.digest == image["digest"]
        assert [login for _, _, login in store.seen] == [""]
        with pytest.raises(RegistryError, match="address without TLS; nothing was sent there"):
            registries.read_blob(f"{mine.host}/a", manifest.configuration)
        assert clear.seen == []


def test_what_a_registry_repeats_of_a_login_is_not_printed(
    registry: Hostile, registries: Registries, tmp_path: Path
) -> None:
    docker_configuration(tmp_path / "docker", {registry.host: (USER, PASSWORD)})
    registry.login = True
    words = json.dumps(
        {"errors": [{"code": "DENIED", "message": f"{USER} with {PASSWORD} sent {BASIC}"}]}
    )
    registry.fault = lambda request: (
        "/manifests/" in request.path
        and request.headers.get("Authorization") == BASIC
        and request.answer(400, words.encode())
    )
    with pytest.raises(RegistryError) as caught:
        registries.find_manifest(f"{registry.host}/released", "v1")
    message = str(caught.value)
    assert f"{USER} with *** sent Basic ***" in message, message
