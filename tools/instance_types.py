#!/usr/bin/env python3
"""Compare images/instances.toml and families.toml with the types of SageMaker's
API (botocore), and propose rows.

A missing type is printed as a row to fill in. The API does not say how many GPUs a type has and
whether it has EFA. Take that from the EC2 guides, and name them as `source`. Exit status 1: the
tables and the API differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import botocore
from botocore.loaders import Loader

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from trainworks.facts.load import load  # noqa: E402 - the path has to be set first

ROW = """
[[instance]]
name = "{name}"
gpus = ?
neuron_cores = ?
efa = ?
efa_rdma = ?
source = "?"
"""


def main() -> int:
    """Print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to look at")
    facts = load(parser.parse_args().root)
    types = set(
        Loader().load_service_model("sagemaker", "service-2")["shapes"]["TrainingInstanceType"][
            "enum"
        ]
    )
    families = {row.name for row in facts.families}
    rows = {row.name for row in facts.instances}
    missing = sorted(name for name in types - rows if name.rpartition(".")[0] not in families)
    gone = sorted(rows - types) + sorted(families - {name.rpartition(".")[0] for name in types})
    both = sorted(name for name in rows if name.rpartition(".")[0] in families)
    for name in missing:
        print(ROW.format(name=name))
    for names, why in (
        (gone, f"botocore {botocore.__version__} does not have it: remove it"),
        (both, "its family is in families.toml"),
    ):
        for name in names:
            print(f"# {name}: {why}")
    return int(bool(missing or gone or both))


if __name__ == "__main__":
    sys.exit(main())
