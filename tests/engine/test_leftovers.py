"""Test the leftovers of builders that were killed: known by their owner, ended by the next builder,
and nothing else is touched.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainworks.engine.orphans import (
    container_name,
    end_left_children,
    has_ended,
    owner,
    remove_left_containers,
)

SAY_OWNER = "from trainworks.engine.orphans import owner; print(owner(), flush=True); input()"

START_A_CHILD = """
import os, subprocess
from trainworks.engine.orphans import OWNER, owner

waits = ("sh", "-c", "echo $$; read nothing")
child = subprocess.Popen(
    waits, env={**os.environ, OWNER: owner()}, stdin=subprocess.PIPE, start_new_session=True
)
input()
"""


@contextmanager
def python(program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a program; return the process and its first line."""
    with subprocess.Popen(
        (sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_process_is_known_while_it_lives_and_afterwards() -> None:
    assert not has_ended(owner())
    with python(SAY_OWNER) as (process, other):
        assert not has_ended(other)
        process.kill()
        process.wait()
        assert has_ended(other)


@pytest.mark.parametrize("changed", [0, 1], ids=["another boot", "another namespace"])
def test_of_other_kernels_and_namespaces_nothing_is_known(changed: int) -> None:
    words = owner().split(".")
    words[changed] = f"{'0' * (8 if changed == 0 else 3)}"
    words[2] = "4194304"
    assert not has_ended(".".join(words))
    assert has_ended(".".join((*owner().split(".")[:2], "4194304", "1")))


def test_a_number_that_another_process_has_now_is_not_its_owner() -> None:
    *words, _ = owner().split(".")
    assert has_ended(".".join((*words, "1")))


def test_only_containers_of_the_dead_are_removed() -> None:
    left = container_name().replace(owner(), ".".join((*owner().split(".")[:2], "4194304", "1")))
    removed: list[str] = []
    remove_left_containers(
        [container_name(), "trainworks-0123456789ab", left, f"{left}-mine", "web"], removed.append
    )
    assert removed == [left]


def test_a_build_that_goes_on_after_its_builder_was_killed_is_interrupted() -> None:
    with python(START_A_CHILD) as (builder, number):
        watched = os.pidfd_open(int(number))
        end_left_children()
        assert not process_has_ended(watched, milliseconds=0), "its builder lives"
        builder.kill()
        builder.wait()
        end_left_children()
        assert process_has_ended(watched, milliseconds=300_000)
        os.close(watched)


def process_has_ended(watched: int, *, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    return bool(poll.poll(milliseconds))
