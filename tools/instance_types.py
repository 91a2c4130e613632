#!/usr/bin/env python3
"""Compare images/instances.toml and families.toml with the types of SageMaker's
API (botocore), and propose rows.

    tools/instance_types.py

A missing type is printed as a row to fill in: write a value for each `?`. The API does not say how
many GPUs a type has, its memory, and whether it has EFA. Take that from the EC2 guides, and name
them as `source`. The head of images/instances.toml says what each column means. A type without GPUs
and without Neuron cores gets a row of its family in images/families.toml instead. Exit status 1:
the tables and the API differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from tool_start import exit_status_of, use_environment

use_environment()

import botocore  # noqa: E402 - imported by the right Python
from botocore.loaders import Loader  # noqa: E402

from trainworks.facts.load import load  # noqa: E402
from trainworks.facts.rows import Instance  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

NEEDED = ("memory_gib",)
"""The columns with a default that each row has, too: tests/facts/test_instances.py wants them."""


def row_to_fill_in(name: str) -> str:
    """Return the row of a type, as text for images/instances.toml: a `?` for each value.

    The columns that most rows do without are below it, as comments with their defaults.
    """
    lines = ["", "[[instance]]", f'name = "{name}"']
    others = []
    for column in fields(Instance):
        if column.name in ("name", "source"):
            continue
        if column.default is MISSING or column.name in NEEDED:
            lines.append(f"{column.name} = ?")
        else:
            others.append(f"# {column.name} = {json.dumps(column.default)}")
    return "\n".join([*lines, 'source = "?"', *others])


def main() -> int:
    """Print what differs; return 1 if anything does, else 0.

    Raises:
        FactsError: The rows cannot be read.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        print(row_to_fill_in(name))
    for names, why in (
        (gone, f"botocore {botocore.__version__} does not have it: remove it"),
        (both, "its family is in families.toml"),
    ):
        for name in names:
            print(f"# {name}: {why}")
    return int(bool(missing or gone or both))


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
