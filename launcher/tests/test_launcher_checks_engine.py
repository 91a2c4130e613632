"""``train check bandwidth`` on two hosts, by a real mpirun; a stand-in for nccl-tests' program.

Marked ``engine``.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launcher_network import PREFIX, Host, engine_manifest, job_on, need, network_of

from trainworks_launcher.contract.json_values import Json

pytestmark = pytest.mark.engine

STAND_IN = f"""#!{sys.executable}
# What all_reduce_perf 2.19.6 prints and writes:
# nccl-tests, src/util.cu (writeResultFooter) and src/common.cu.
import argparse, json, os, sys

parser = argparse.ArgumentParser()
for name in ("minbytes", "maxbytes", "check", "output_file"):
    parser.add_argument(f"--{{name}}", required=True)
asked = parser.parse_args()
rank, what = int(os.environ["OMPI_COMM_WORLD_RANK"]), os.environ["STAND_IN"]
for _ in range(2000):  # NCCL_DEBUG=INFO: more than a pipe holds
    print(f"algo:{{rank}} [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0")
sys.stdout.flush()
if what == "wrong":
    print("# Out of bounds values : 3 FAILED", flush=True)
    sys.exit(1)
if rank == 0:
    print("# Out of bounds values : 0 OK")
    print(f"# Avg bus bandwidth    : {{float(what):g}} ")
    time = {{"time": 51234.5, "alg_bw": 20.625, "bus_bw": float(what), "nwrong": 0.0}}
    size = {{"size": 1 << 30, "count": 1 << 28, "type": "float", "redop": "sum", "root": "    -1"}}
    result = {{**size, "out_of_place": time, "in_place": time}}
    document = {{
        "version": 3,
        "env": [f"{{name}}={{value}}" for name, value in os.environ.items()],
        "nccl_version": 23007,
        "results": [{{**result, "actual_iterations": 20, "experiment_name": ""}}],
        "out_of_bounds": {{"count": 0, "okay": "true"}},
        "average_bus_bandwidth": {{"bandwidth": float(what), "okay": "unchecked"}},
        "errors": [],
    }}
    with open(asked.output_file, "x") as file:
        json.dump(document, file)
"""


def measure(tmp_path: Path, behaviour: str) -> tuple[list[int], tuple[Host, ...]]:
    """Start the command on two hosts; their statuses, and the hosts."""
    need("mpirun")
    stand_in = tmp_path / "bin/all_reduce_perf"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN, encoding="utf-8")
    stand_in.chmod(0o755)
    image = engine_manifest(tmp_path)
    document = json.loads(image.read_text(encoding="utf-8"))
    document["instances"] = {
        "ml.x": {"gpus": 0, "neuron_cores": 0, "efa": False, "network_gigabits": 400}
    }
    image.write_text(json.dumps(document), encoding="utf-8")
    instance: dict[str, Json] = {"current_instance_type": "ml.x"}
    variables = {
        "PATH": f"{stand_in.parent}:{PREFIX}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "STAND_IN": behaviour,
    }
    with network_of(2) as network:
        started = job_on(
            network,
            tmp_path,
            "",
            {},
            manifest=image,
            variables=variables,
            arguments=("check", "bandwidth"),
            config=lambda _: instance,
        )
        with (
            started as hosts,
            ThreadPoolExecutor(len(hosts)) as readers,
        ):
            # Both print more than a pipe holds.
            return list(readers.map(Host.wait, hosts)), hosts


@pytest.mark.parametrize(("figure", "warned"), [("41.25", False), ("3.5", True)])
def test_the_figure_stands_beside_what_the_network_carries(
    tmp_path: Path, figure: str, warned: bool
) -> None:
    statuses, (leader, worker) = measure(tmp_path, figure)
    assert statuses == [0, 0], leader.text
    sentence = f"all-reduce of 2 ranks on 2 host(s): {float(figure):.2f} GB/s bus bandwidth"
    assert f"trainworks: {sentence}; the network of ml.x carries 50 GB/s\n" in leader.text
    assert "bus bandwidth" not in worker.text
    assert ("warning: that is less than half of it" in leader.text) is warned
    assert re.search(r"\[algo-1 rank 0\] # Avg bus bandwidth    : ", leader.text)
    assert worker.text.count("NCCL INFO") == 2000


def test_a_wrong_sum_fails(tmp_path: Path) -> None:
    statuses, (leader, worker) = measure(tmp_path, "wrong")
    assert statuses == [1, 1]
    assert "all_reduce_perf" in leader.failure
    assert leader.failure == worker.failure
