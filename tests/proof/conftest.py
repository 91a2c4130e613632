"""The proof of a tiny image."""

from __future__ import annotations

import pytest

from proof.support import Proven, ask, make_tree, prove
from trainworks.attestation.components import BillOfMaterials
from trainworks.facts.rows import Facts
from trainworks.imagetest.probe import packages


@pytest.fixture(scope="session")
def packages_answer(tmp_path_factory: pytest.TempPathFactory) -> packages.PackagesAnswer:
    """Return the image's answer about its own packages."""
    return ask(make_tree(tmp_path_factory.mktemp("image")))


@pytest.fixture(scope="session")
def proven(facts: Facts, packages_answer: packages.PackagesAnswer) -> Proven:
    """Give the image's proof."""
    return prove(facts, packages_answer)


@pytest.fixture(scope="session")
def bill(proven: Proven) -> BillOfMaterials:
    """Return the inputs of the bills of materials."""
    return proven.bill
