"""What `build.py outdated` says of apt's answer; `tests/image/test_outdated.py` asks a real one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from trainworks.assemble.outdated import CHANGE, days_since
from trainworks.plan.model import IMAGE_TIME

SIMULATED = """\
Inst libssl3 [3.0.11-1~deb12u1] (3.0.11-1~deb12u2 Debian:12.4/oldstable, Debian-Security:12/oldstable-security [amd64])
Inst base-files [12.4+deb12u4] (12.4+deb12u12 Debian:12.12/oldstable [amd64]) []
Inst libnew (1.0 Debian-Security:12/oldstable-security [all])
Remv libold [2.0]
Conf libssl3 (3.0.11-1~deb12u2 Debian:12.4/oldstable, Debian-Security:12/oldstable-security [amd64])
"""


def test_a_simulated_upgrade_names_packages_versions_and_suites() -> None:
    rows = [(row["name"], row["installed"], row["update"]) for row in CHANGE.finditer(SIMULATED)]
    assert rows == [
        ("libssl3", "3.0.11-1~deb12u1", "3.0.11-1~deb12u2"),
        ("base-files", "12.4+deb12u4", "12.4+deb12u12"),
        ("libnew", None, "1.0"),
    ]
    assert ["-security" in row["suites"] for row in CHANGE.finditer(SIMULATED)] == [True, False, True]


def test_the_days_since_a_build_are_those_of_its_creation_time() -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1, hours=2)
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}.123456789Z") == 1
    assert days_since(f"{yesterday:%Y-%m-%dT%H:%M:%S}Z") == 1
    assert days_since("") is None
    constant = datetime.fromtimestamp(IMAGE_TIME, UTC)
    assert days_since(f"{constant:%Y-%m-%dT%H:%M:%S}Z") is None
