#!/usr/bin/env python3
"""Print the digests of inputs that this checkout gives to images, as JSON: name to digests.

    tools/image_inputs.py NAME:TAG...

An image has such a digest as its label `trainworks.inputs`. There may be two: one for a base image
that is pulled, one for the same base where no registry gives it. Names that no target has are left
out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tool_start import exit_status_of, use_environment

use_environment()

from trainworks.errors import TrainworksError  # noqa: E402 - imported by the right Python
from trainworks.facts.load import load  # noqa: E402
from trainworks.facts.rows import Facts  # noqa: E402
from trainworks.plan.resolve import make_plan, remove_pulled_bases  # noqa: E402
from trainworks.plan.variants import image_named, request_of  # noqa: E402
from trainworks.render.dockerfile import render  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def digests_of(name: str, facts: Facts) -> list[str]:
    """Return the digests of an image's inputs.

    Empty for names of no target, and for targets that cannot be planned or rendered.
    """
    target = image_named(name, facts)
    if target is None:
        return []
    request = request_of(target.row, target.variant, facts)
    if request is None:
        return []
    digests = []
    for possible_facts in (facts, remove_pulled_bases(facts)):
        try:
            digests.append(render(make_plan(request, possible_facts), possible_facts).digest)
        except TrainworksError:
            continue
    return list(dict.fromkeys(digests))


def main(names: Sequence[str]) -> int:
    """Print the digests of these images; return the exit status. Raises FactsError."""
    facts = load(ROOT)
    digests_by_name = {}
    for name in names:
        digests = digests_of(name, facts)
        if digests:
            digests_by_name[name] = digests
    print(json.dumps(digests_by_name))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status_of(lambda: main(sys.argv[1:])))
