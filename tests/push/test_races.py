"""Two pushes that want one fixed tag for two images: one gets it, and the other
is told whose it is.

The registry is in memory and real HTTP; it holds requests back until a test says so, so that every
order of two pushes' requests can be tried. No order is left to the clock.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from push.hostile import IMAGE, Hostile, Request, as_json, digest_of, hostile_registry
from trainworks.errors import RegistryError
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings
from trainworks.registry.protocol import Patience
from trainworks.registry.tags import add_to_list, claim_tag, set_tags
from trainworks.registry.tools import Registries

NAME, TAG = "team/image", "v1"
HOSTS = ("127.0.0.1", "localhost")
"""The two names under which two pushes know the registry: so it can tell whose a request is."""


@dataclass(frozen=True)
class End:
    """The end of a push: the error's words, or ``""``, and the tags that the push reported."""

    error: str
    tags: tuple[str, ...] = ()


@pytest.fixture
def registry() -> Iterator[Hostile]:
    """Give a registry with two images, which have no tag yet."""
    with hostile_registry() as mine:
        yield mine


def images(mine: Hostile, number: int = 0) -> list[str]:
    return [
        str(mine.put_image(NAME, f"{side} {number}".encode(), tag="")["digest"]) for side in HOSTS
    ]


def push(
    mine: Hostile,
    side: int,
    digest: str,
    *,
    patience: Patience | None = None,
    moving: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (TAG,),
) -> End:
    """Set the tags as one of the two pushes."""
    place = mine.host.replace("127.0.0.1", HOSTS[side]) + f"/{NAME}"
    with Registries(HostSettings(pip=PipSettings()), patience=patience) as registries:
        try:
            return End(
                "",
                tuple(
                    set_tags(
                        registries, place, registries.read_manifest(place, digest), fixed, moving
                    )
                ),
            )
        except RegistryError as error:
            return End(error.message)


def tagged(mine: Hostile, tag: str = TAG) -> str:
    return digest_of(mine.manifests[NAME, tag][1])


def side_of(request: Request) -> int:
    return HOSTS.index(request.headers["Host"].partition(":")[0])


def wants(request: Request, method: str, tag: str = TAG) -> bool:
    return request.command == method and request.path == f"/v2/{NAME}/manifests/{tag}"


@dataclass
class Turns:
    """Lets the requests of two pushes pass in a given order.

    Then, and once one of them has ended, in any.
    """

    order: list[int]
    ended_sides: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, request: Request) -> bool:
        if request.path == "/v2/" or "/manifests/" not in request.path:
            return False
        side = side_of(request)
        with self.changed:
            self.changed.wait_for(lambda: self._is_turn_of(side), timeout=60)
            if self.order and self.order[0] == side:
                self.order.pop(0)
            self.changed.notify_all()
        return False

    def _is_turn_of(self, side: int) -> bool:
        while self.order and self.order[0] in self.ended_sides:
            self.order.pop(0)
        return not self.order or self.order[0] == side

    def end(self, side: int) -> None:
        with self.changed:
            self.ended_sides.add(side)
            self.changed.notify_all()


def race(mine: Hostile, order: list[int]) -> list[End]:
    """Have two pushes at once, their requests in this order; return how each ended."""
    digests = images(mine)
    turns = Turns(order)
    mine.fault = turns.wait

    def one(side: int) -> End:
        try:
            return push(mine, side, digests[side])
        finally:
            turns.end(side)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(one, range(2)))
    mine.fault = lambda _request: False
    winners = [side for side in range(2) if not ends[side].error]
    assert len(winners) == 1, (ends, tagged(mine))
    (winner,) = winners
    assert ends[winner].tags == (TAG,)
    assert tagged(mine) == digests[winner]
    assert f"{NAME}:{TAG} is another image ({digests[winner]})" in ends[1 - winner].error
    return ends


CHANCE = random.Random(73)
ORDERS = [[CHANCE.randrange(2) for _ in range(20)] for _ in range(30)]
"""A push that wins makes ten requests."""


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join("AB"[side] for side in order))
def test_of_two_pushes_at_once_one_gets_the_tag_in_any_order_of_their_requests(
    order: list[int], registry: Hostile
) -> None:
    race(registry, list(order))


@pytest.mark.parametrize("length", range(1, 11))
def test_a_push_that_comes_at_any_moment_of_another_one(length: int, registry: Hostile) -> None:
    """The first one stands still after each of its requests in turn, while the
    other one does all that it does.
    """
    race(registry, [0] * length + [1] * 200)


def meanwhile(
    mine: Hostile, when: Callable[[Request], bool], action: Callable[[], object], *, after: bool
) -> None:
    """Do something once, before a request is answered or after it was."""
    armed = [True]

    def fault(request: Request) -> bool:
        if armed and (request.command == "GET" if after and len(armed) == 2 else when(request)):
            if after and len(armed) == 1:
                armed.append(True)
                return False
            armed.clear()
            action()
        return False

    mine.fault = fault


def test_a_whole_push_between_look_and_put(registry: Hostile) -> None:
    """The tag goes back to the push that was told that it has it."""
    mine, other = images(registry)
    ends: list[End] = []
    meanwhile(
        registry,
        lambda request: wants(request, "PUT") and side_of(request) == 0,
        lambda: ends.append(push(registry, 1, other)),
        after=False,
    )
    late = push(registry, 0, mine)
    assert ends == [End("", (TAG,))]
    assert f"is another image ({other})" in late.error
    assert tagged(registry) == other
    # The same again: each is told the same.
    assert push(registry, 1, other) == End("", (TAG,))
    assert f"is another image ({other})" in push(registry, 0, mine).error
    assert tagged(registry) == other


def test_a_whole_push_between_put_and_the_last_look(registry: Hostile) -> None:
    mine, other = images(registry)
    ends: list[End] = []
    meanwhile(
        registry,
        lambda request: wants(request, "PUT"),
        lambda: ends.append(push(registry, 1, other)),
        after=True,
    )
    assert push(registry, 0, mine) == End("", (TAG,))
    (end,) = ends
    assert f"is another image ({mine})" in end.error
    assert tagged(registry) == mine


def test_a_program_without_claims_that_sets_the_tag_before_the_last_look(registry: Hostile) -> None:
    mine, other = images(registry)

    def foreign() -> None:
        registry.manifests[NAME, TAG] = registry.manifests[NAME, other]

    meanwhile(registry, lambda request: wants(request, "PUT"), foreign, after=True)
    end = push(registry, 0, mine, patience=Patience(pause=0.02))
    assert f"is another image ({other})" in end.error
    assert tagged(registry) == other


def test_a_push_that_was_ended_with_its_claim_does_not_keep_the_tag(registry: Hostile) -> None:
    mine, other = images(registry)
    waits: list[bytes] = []

    def cut(request: Request) -> bool:
        waits.append(b"")
        return (
            side_of(request) == 0
            and wants(request, "PUT")
            and request.answer(403, as_json({"errors": []}))
        )

    registry.fault = cut
    assert "permission denied" in push(registry, 0, mine).error
    registry.fault = lambda _request: False
    assert (NAME, claim_tag(TAG)) in registry.manifests
    assert push(registry, 1, other) == End("", (TAG,))
    assert tagged(registry) == other


def test_two_tags_of_two_pushes_go_to_one_of_them(registry: Hostile) -> None:
    digests = images(registry)
    together = threading.Barrier(2)

    def one(side: int) -> End:
        together.wait(60)
        tags = ("v1", "v2") if side else ("v2", "v1")
        return push(registry, side, digests[side], fixed=tags)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(one, range(2)))
    (winner,) = [side for side in range(2) if not ends[side].error]
    assert {tagged(registry, "v1"), tagged(registry, "v2")} == {digests[winner]}


@pytest.mark.parametrize(
    "code", ["TAG_INVALID", "ImageTagAlreadyExistsException", "MANIFEST_INVALID"]
)
@pytest.mark.parametrize("status", [400, 409])
def test_a_registry_whose_tags_are_immutable_decides_itself(
    registry: Hostile, status: int, code: str
) -> None:
    mine, other = images(registry)
    problem = as_json({"errors": [{"code": code, "message": "the tag already exists"}]})

    def immutable(request: Request) -> bool:
        tag = request.path.rpartition("/")[2]
        exists = (NAME, tag) in registry.manifests
        return request.command == "PUT" and exists and request.answer(status, problem)

    ends: list[End] = []

    def fault(request: Request) -> bool:
        if wants(request, "PUT") and side_of(request) == 0 and not ends:
            ends.append(push(registry, 1, other))
        return immutable(request)

    registry.fault = fault
    late = push(registry, 0, mine)
    assert [end.tags for end in ends] == [(TAG,)]
    assert f"is another image ({other})" in late.error
    assert tagged(registry) == other


def test_a_moving_tag_that_another_push_moved_is_not_told(registry: Hostile) -> None:
    mine, other = images(registry)

    def move() -> None:
        registry.manifests[NAME, "latest"] = registry.manifests[NAME, other]

    meanwhile(registry, lambda request: wants(request, "PUT", "latest"), move, after=True)
    assert push(registry, 0, mine, moving=("latest", "next")) == End("", (TAG, "next"))


@pytest.mark.parametrize("reference", ["tag", "digest"])
def test_a_registry_that_alters_a_manifest_gets_no_image_told(
    registry: Hostile, reference: str
) -> None:
    mine, _ = images(registry)
    kind, content = registry.manifests[NAME, mine]
    altered = content + b" "

    def alter(request: Request) -> bool:
        is_present = (NAME, TAG) in registry.manifests
        reference_wanted = TAG if reference == "tag" else mine
        return (
            is_present
            and wants(request, "GET", reference_wanted)
            and request.answer(200, altered, Content_Type=kind)
        )

    registry.fault = alter
    assert push(registry, 0, mine, patience=Patience(pause=0.02)).error


ARCHITECTURES = ("amd64", "arm64")


def built_for(mine: Hostile, architecture: str, number: int = 0) -> str:
    """Have an image for these processors; return its digest."""
    configuration = as_json({"architecture": architecture, "os": "linux", "number": number})
    config = {
        **mine.put_blob(NAME, configuration),
        "mediaType": "application/vnd.oci.image.config.v1+json",
    }
    value = {"schemaVersion": 2, "mediaType": IMAGE, "config": config, "layers": []}
    return str(mine.put_manifest(NAME, value)["digest"])


def share(mine: Hostile, side: int, digest: str) -> bool:
    """Add an image to the tag of several architectures, as one of two pushes."""
    place = mine.host.replace("127.0.0.1", HOSTS[side]) + f"/{NAME}"
    with Registries(HostSettings(pip=PipSettings())) as registries:
        return add_to_list(registries, place, registries.read_manifest(place, digest), TAG)


def shared(mine: Hostile) -> set[str]:
    return {
        str(manifest["digest"])
        for manifest in json.loads(mine.manifests[NAME, TAG][1])["manifests"]
    }


@pytest.mark.parametrize("length", range(1, 9))
def test_two_architectures_at_once_are_both_in_the_tag(length: int, registry: Hostile) -> None:
    digests = [built_for(registry, architecture) for architecture in ARCHITECTURES]
    turns = Turns([0] * length + [1] * 200)
    registry.fault = turns.wait

    def one(side: int) -> bool:
        try:
            return share(registry, side, digests[side])
        finally:
            turns.end(side)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [True, True]
    assert shared(registry) == set(digests)


@pytest.mark.parametrize("after", [False, True], ids=["before the put", "after the put"])
def test_an_image_that_another_push_replaced_in_the_list_is_not_told(
    registry: Hostile, *, after: bool
) -> None:
    first, second = (built_for(registry, "amd64", number) for number in range(2))
    ends: list[bool] = []
    meanwhile(
        registry,
        lambda request: wants(request, "PUT"),
        lambda: ends.append(share(registry, 1, second)),
        after=after,
    )
    assert not share(registry, 0, first)
    assert ends == [True]
    assert shared(registry) == {second}
