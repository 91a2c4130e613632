"""Sign what `tools/release` pushed, and ask cosign and `build.py verify` about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainworks.attestation.verify import TYPES
from trainworks.cli import main


def make_key(prefix: Path) -> Path:
    """Make a pair of keys of cosign; return the private one, beside which the public one lies.

    The password is COSIGN_PASSWORD.
    """
    words = ("cosign", "generate-key-pair", f"--output-key-prefix={prefix}")
    subprocess.run(words, check=True, capture_output=True)
    return prefix.with_suffix(".key")


def sign_released(root: Path, results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `tools/sign-released` on the results of a release."""
    program = (sys.executable, str(root / "tools" / "sign-released"))
    command = (*program, "--results", str(results), *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def verify(command: str, address: str, public: Path, *words: str) -> tuple[int, str, str]:
    """Return the exit status of cosign's `verify` or `verify-attestation`, and both outputs."""
    check = ("--insecure-ignore-tlog", "--key", str(public))
    done = subprocess.run(
        ("cosign", command, *check, *words, address), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def attestations(address: str, public: Path) -> str:
    """Return cosign's output about the attestations that it accepts."""
    outputs = [verify("verify-attestation", address, public, "--type", kind) for kind in TYPES]
    return "".join(output for _, output, _ in outputs)


def judge(folder: Path, address: str, output: str, builder: str) -> int:
    """Return the exit status of `build.py verify` for what cosign printed."""
    proven = folder / "proven.jsonl"
    proven.write_text(output, encoding="utf-8")
    return main(["verify", address, str(proven), "--builder", builder])
