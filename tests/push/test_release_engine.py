"""`tools/release`: one target through all of its steps to a registry, killed in
between and begun again. What it pushed is signed and verified.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from image.support import ROOT, copied_checkout, engine_that_answers
from push.signing import attestations, judge, make_key, sign_released, verify
from push.support import RegistryServer
from trainworks.errors import ProofError
from trainworks.facts.load import load

pytestmark = pytest.mark.engine

STEPS = ["build", "jobs", "scan"]
BUILDER = "https://ci.example/images"
"""The builder that the provenance names."""


@pytest.mark.usefixtures("logged_in")
def test_a_release_that_was_killed_goes_on_where_it_was(
    server: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_that_answers("docker")
    if shutil.which("cosign") is None:
        pytest.skip("NOT TESTED: no cosign (tools/set-up-engine all)")
    root, results = copied_checkout(tmp_path / "root"), tmp_path / "results"
    program = (sys.executable, str(ROOT / "tools" / "release"))
    listed = subprocess.run(
        (*program, "--list", "--only", "pytorch-*-cpu-*"),
        check=True,
        capture_output=True,
        text=True,
    )
    (target,) = json.loads(listed.stdout)
    options = ("--root", str(root), "--results", str(results), "--keep", "--builder", BUILDER)
    command = (*program, "--repository", f"{server.host}/team/pytorch", "--only", target, *options)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as first:
        assert first.stdout is not None
        assert f"{target}: jobs\n" in first.stdout, "it ended before its jobs"
        os.killpg(first.pid, signal.SIGKILL)
    done = json.loads((results / target / "steps.json").read_text(encoding="utf-8"))
    assert list(done["steps"]) == ["build"]
    second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert second.returncode == 0, second.stdout
    after = json.loads((results / target / "steps.json").read_text(encoding="utf-8"))
    assert list(after["steps"]) == [*STEPS, f"push to {server.host}/team/pytorch"]
    assert after["steps"]["build"] == done["steps"]["build"], "the image tests were run again"
    (pushed,) = json.loads((results / target / "push.json").read_text(encoding="utf-8"))["pushed"]
    assert target in pushed["tags"]
    bill = json.loads((results / target / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert pushed["digest"].replace(":", "%3A") in bill["metadata"]["component"]["purl"].replace(
        ":", "%3A"
    )
    (built,) = [row for row in load(root).built if row.target == target]
    assert built.digest == pushed["digest"]
    released = json.loads((results / target / "released.json").read_text(encoding="utf-8"))
    assert released["addresses"] == [pushed["image_uri"]]
    third = subprocess.run(command, check=True, capture_output=True, text=True)
    assert third.stdout.startswith(f"{target}: released on ")
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    sign_and_verify(results, tmp_path, pushed["image_uri"])


def sign_and_verify(results: Path, folder: Path, address: str) -> None:
    """Sign a release with a key, and verify the image and its documents as a user does.

    Another key's signature is not there, and the documents do not count for another digest.
    """
    key, other = make_key(folder / "release"), make_key(folder / "other")
    done = sign_released(ROOT, results, "--key", str(key))
    assert (done.returncode, done.stdout) == (0, f"signed: {address}\n"), done.stderr
    public = key.with_suffix(".pub")
    assert verify("verify", address, public)[0] == 0
    assert verify("verify", address, other.with_suffix(".pub"))[0] != 0
    proven = attestations(address, public)
    assert judge(folder, address, proven, BUILDER) == 0
    changed = f"{address.partition('@')[0]}@sha256:{'0' * 64}"
    assert judge(folder, changed, proven, BUILDER) == ProofError.exit_status
