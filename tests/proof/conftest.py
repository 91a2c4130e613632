"""The proof of a tiny image."""

from __future__ import annotations

import pytest

from proof.support import Proven, ask, make_tree, prove
from trainworks.attestation.components import BillOfMaterials
from trainworks.facts.rows import Facts
from trainworks.imagetest.probe import packages


@pytest.fixture(scope="session")
def packages_answer(tmp_path_factory: pytest.TempPathFactory) -> packages.PackagesAnswer:
    """Give what the image says of itself."""
    return ask(make_tree(tmp_path_factory.mktemp("image")))


@pytest.fixture(scope="session")
def proven(facts: Facts, packages_answer: packages.PackagesAnswer) -> Proven:
    """Give the image's proof."""
    return prove(facts, packages_answer)


@pytest.fixture(scope="session")
def bill(proven: Proven) -> BillOfMaterials:
    """Give what the bills of materials are made of."""
    return proven.bill
