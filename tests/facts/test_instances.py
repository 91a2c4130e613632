"""The instance table against SageMaker's own list: botocore's model of its API."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from trainworks.facts.rows import Facts


def compare(root: Path, checkout: Path) -> tuple[int, str]:
    program = [sys.executable, str(root / "tools" / "instance_types.py"), "--root", str(checkout)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_table_has_sagemakers_types_and_no_others(root: Path) -> None:
    assert compare(root, root) == (0, "")


def test_what_differs_is_named(root: Path, checkout: Path) -> None:
    for file, old, new in (
        ("instances", r'name = "ml.p5.4xlarge"', 'name = "ml.p5.2xlarge"'),
        ("families", r'name = "ml.m5"', 'name = "ml.m6g"'),
        ("families", r'name = "ml.c4"', 'name = "ml.trn1"'),
    ):
        path = checkout / "images" / f"{file}.toml"
        text, changes = re.subn(old, new, path.read_text(encoding="utf-8"))
        assert changes == 1
        path.write_text(text, encoding="utf-8")
    status, output = compare(root, checkout)
    assert status == 1
    for line in (
        'name = "ml.p5.4xlarge"\ngpus = ?\n',
        '\nefa_rdma = ?\nmemory_gib = ?\nsource = "?"\n',
        "# ml.p5.2xlarge: botocore ",
        "# ml.m6g: botocore ",
        'name = "ml.m5.large"',
        "# ml.trn1.32xlarge: its family is in families.toml",
    ):
        assert line in output


def test_every_row_can_be_true(facts: Facts) -> None:
    """RDMA is EFA's; a host has GPUs or Neuron cores.

    All GPUs fit into the host's memory by a wide margin.
    """
    for row in facts.instances:
        assert bool(row.gpus) != bool(row.neuron_cores), row.name
        assert row.efa or not row.efa_rdma, row.name
        assert row.memory_gib >= 16 * max(row.gpus, 1), row.name
    assert {row.name for row in facts.instances if row.architecture != "amd64"} == {
        "ml.p6e-gb200.36xlarge"
    }
