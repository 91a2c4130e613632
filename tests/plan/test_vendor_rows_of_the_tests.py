"""The targets that engine tests add to the rows: a row of ours that does not
fit shows before hours of building.
"""

from __future__ import annotations

from pathlib import Path

from image import source_page, vendor
from trainworks.facts.load import load
from trainworks.plan.model import ImagePlan
from trainworks.plan.resolve import make_plan
from trainworks.plan.select import request_for

SUM = "5" * 64


def planned(root: Path, target: str) -> ImagePlan:
    facts = load(root)
    (row,) = (row for row in facts.targets if facts.name_of(row) == target)
    return make_plan(request_for(row, facts), facts)


def test_the_small_target_with_vendor_sources(tmp_path: Path) -> None:
    plan = planned(vendor.make_checkout(tmp_path, SUM), vendor.TARGET)
    assert {"metis", "efa-installer", "torch"} <= {step.component for step in plan.steps}


def test_the_image_of_the_source_page(tmp_path: Path) -> None:
    digests = dict.fromkeys(("devel", "runtime"), f"sha256:{SUM}")
    hashes = dict.fromkeys((*source_page.MADE, "efa-installer"), SUM)
    plan = planned(
        source_page.make_checkout(tmp_path, "registry.example", digests, hashes), source_page.TARGET
    )
    assert {"nccl", "rmm", "boost", "torch"} <= {step.component for step in plan.steps}
