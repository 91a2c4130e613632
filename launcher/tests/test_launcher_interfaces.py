"""Test which interface a host of several takes: real network namespaces with an interface, a host
name and /etc/hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_support import LAUNCHER

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None,
    reason="NOT TESTED: needs root, unshare and ip",
)
HOST = """
set -e
mount --bind "$1" /etc/hosts
mount -t sysfs sysfs /sys  # the interfaces of this namespace
hostname box
ip link set lo up
ip link add wire0 type veth peer name wire1
ip address add 10.9.0.1/24 dev wire0
ip link set wire0 up
ip link set wire1 up
shift
exec "$@"
"""
ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from trainworks_launcher.environment.environment import read_environment
made = read_environment({"PATH": "/usr/bin:/bin", "SAGEMAKER_BASE_DIR": sys.argv[2]})
print(json.dumps([made.devices.reaching, made.devices.own_address]))
"""
OWN, LOOPBACK, DEAD, UNKNOWN = "10.9.0.1 box\n", "127.0.1.1 box\n", "10.9.0.77 box\n", ""
PEERS = "10.9.0.1 algo-1\n10.9.0.2 algo-2\n"


@pytest.mark.parametrize(
    ("own", "interface", "hosts", "expected_interfaces"),
    [
        (OWN, "", 2, ["", "10.9.0.1"]),  # gloo finds it by the host's own name
        (LOOPBACK, "", 2, ["wire0", "127.0.1.1"]),
        (DEAD, "", 2, ["wire0", "10.9.0.77"]),
        (UNKNOWN, "", 2, ["wire0", ""]),
        (UNKNOWN, "wire0", 2, ["", ""]),
        (UNKNOWN, "eth7", 2, ["wire0", ""]),
        (UNKNOWN, "", 1, ["", ""]),
    ],
)
def test_the_interface_is_chosen_only_where_a_hosts_own_name_leads_elsewhere(
    own: str, interface: str, hosts: int, expected_interfaces: list[str], tmp_path: Path
) -> None:
    (tmp_path / "input/config").mkdir(parents=True)
    config = {
        "hosts": ["algo-1", "algo-2"][:hosts],
        "current_host": "algo-1",
        "network_interface_name": interface,
    }
    (tmp_path / "input/config/resourceconfig.json").write_text(json.dumps(config), encoding="utf-8")
    names = tmp_path / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{own}{PEERS}", encoding="utf-8")
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", HOST, "sh", str(names)]
    words += [sys.executable, "-IS", "-c", ASK, str(LAUNCHER), str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == expected_interfaces
