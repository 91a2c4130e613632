"""Test which known name is meant by an unknown one: one rule, in the builder."""

from __future__ import annotations

import pytest

from trainworks.suggestions import WORDS, alike, nearest

CELLS = ("cpu", "cu121", "cu124", "cu126", "cu128", "cu130", "cu132", "neuron")
COMMANDS = (
    "build",
    "extend",
    "check",
    "lock",
    "report",
    "diff",
    "push",
    "promote",
    "prove",
    "verify",
)
OPTIONS = (
    "--framework",
    "--cuda",
    "--framework-version",
    "--python",
    "--only",
    "--verbose",
    "--with",
    "--without",
)
VERSIONS = ("2.4.1", "2.6.0", "2.10.0", "2.13.0")


@pytest.mark.parametrize(
    ("word", "known_words", "expected"),
    [
        # Far from everything.
        ("xyz", ["pytorch"], ""),
        ("anything", [], ""),
        ("", COMMANDS, ""),
        ("pytorch", COMMANDS, ""),
        ("images", COMMANDS, ""),
        ("keras", ["mxnet", "pytorch", "tensorflow"], ""),
        ("cu999", ["cpu", "neuron"], ""),
        ("--procs", ["--plan", "explain", "check", "--help", "--version"], ""),
        # The same, written otherwise.
        ("Pytorch", ["pytorch", "tensorflow"], "pytorch"),
        ("CU121", CELLS, "cu121"),
        ("open_mpi", ["open-mpi", "mpi4py"], "open-mpi"),
        ("only", OPTIONS, "--only"),
        # Versions.
        ("12.1", CELLS, "cu121"),
        ("12.1.1", CELLS, "cu121"),
        ("cuda12.4", CELLS, "cu124"),
        ("cuda-12.4", CELLS, "cu124"),
        ("cuda121", CELLS, "cu121"),
        ("121", CELLS, "cu121"),
        ("311", ["3.11", "3.13"], "3.11"),
        ("cu121", ["pytorch-2.4.1-cu121-py311", "pytorch-2.6.0-cu124-py311"],
         "pytorch-2.4.1-cu121-py311"),
        ("cu12", CELLS, "cu128"),
        ("13", CELLS, "cu132"),
        ("cu999", CELLS, ""),
        ("13.3", [*CELLS, "cu133"], "cu133"),
        ("2.4", VERSIONS, "2.4.1"),
        ("v2.4", VERSIONS, "2.4.1"),
        ("2.4.1+cu121", VERSIONS, "2.4.1"),
        ("2.1", VERSIONS, ""),
        ("2", VERSIONS, "2.13.0"),
        ("py311", ["3.11", "3.13"], "3.11"),
        ("cu121", VERSIONS, ""),
        # Beginnings and parts.
        ("--frame", OPTIONS, "--framework"),
        ("pytorch-2.4.1", ["pytorch-2.4.1-cu121", "pytorch-2.13.0-cpu"], "pytorch-2.4.1-cu121"),
        ("torch", ["none", "mpi", "torch_distributed"], "torch_distributed"),
        ("train.pyc", ["train.py", "prepare.py"], "train.py"),
        ("microbatch", ["microbatches", "partitions"], "microbatches"),
        # The names that people use.
        ("--version", OPTIONS, "--framework-version"),
        ("torch", ["mxnet", "pytorch", "tensorflow"], "pytorch"),
        ("tf", ["mxnet", "pytorch", "tensorflow"], "tensorflow"),
        # Letters.
        ("pytorh", ["pytorch", "tensorflow"], "pytorch"),
        ("--framwork", OPTIONS, "--framework"),
        ("buid", COMMANDS, "build"),
        ("trian.py", ["train.py", "prepare.py"], "train.py"),
        ("sped", ["memory", "speed"], "speed"),
        ("TPP", ["TPD", "cluster"], "TPD"),
    ],
)  # fmt: skip
def test_nearest(word: str, known_words: list[str], expected: str) -> None:
    assert nearest(word, known_words) == expected


def test_all_that_may_be_meant_is_in_order() -> None:
    assert alike("12", CELLS)[:2] == ["cu128", "cu126"]
    assert alike("prof", ["proof", "promote", "profile"]) == ["profile", "proof"]


def test_no_word_means_itself() -> None:
    assert [word for word, name in WORDS.items() if word == name] == []
