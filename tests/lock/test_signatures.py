"""OpenPGP signatures, with keys that GnuPG makes for the test."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainworks.errors import LockError
from trainworks.host.signatures import check_signature

pytestmark = pytest.mark.skipif(
    shutil.which("gpg") is None,
    reason="gpg is not installed: no signature is made or checked (apt-get install gpg)",
)


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """A vendor that signs."""

    home: Path
    key: Path
    fingerprint: str

    def sign(self, file: Path, *options: str) -> Path:
        signature = file.with_name(f"{file.name}.{self.home.name}.sig")
        gpg(self.home, *options, "--yes", "--output", str(signature), "--detach-sign", str(file))
        end_agent(self.home)
        return signature


def gpg(home: Path, *words: str) -> str:
    command = (
        "gpg",
        "--homedir",
        str(home),
        "--batch",
        "--no-tty",
        "--pinentry-mode",
        "loopback",
        *words,
    )
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )
    return done.stdout


def end_agent(home: Path) -> None:
    """End the agent that every use of a secret key starts for its home, and wait: the next use
    would meet it dying.
    """
    command = ("gpg-connect-agent", "--homedir", str(home), "--no-autostart", "GETINFO pid", "/bye")
    output = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    agents = [os.pidfd_open(int(line[2:])) for line in output.splitlines() if line.startswith("D ")]
    subprocess.run(
        ("gpgconf", "--homedir", str(home), "--kill", "all"), check=True, capture_output=True
    )
    for agent in agents:
        select.select([agent], [], [])
        os.close(agent)


def make_vendor(
    folder: Path, name: str, *, expires: str = "never", options: tuple[str, ...] = ()
) -> Vendor:
    home = folder / name
    home.mkdir(mode=0o700)
    try:
        person = f"{name} <{name}@example.org>"
        gpg(
            home,
            *options,
            "--passphrase",
            "",
            "--quick-generate-key",
            person,
            "ed25519",
            "sign",
            expires,
        )
        listing = gpg(home, "--with-colons", "--list-keys")
        fingerprint = next(
            line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr")
        )
        key = folder / f"{name}.key"
        gpg(home, "--armor", "--output", str(key), "--export", fingerprint)
    finally:
        end_agent(home)
    return Vendor(home=home, key=key, fingerprint=fingerprint)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Short names: the path of the agent's socket has at most 108 bytes.
    return tmp_path_factory.mktemp("gpg")


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "installer.tar.gz"
    path.write_bytes(b"installer")
    return path


def test_a_good_signature(folder: Path, file: Path) -> None:
    vendor = make_vendor(folder, "vendor")
    check_signature(file, vendor.sign(file), vendor.key, vendor.fingerprint)


def test_a_file_that_was_changed(folder: Path, file: Path) -> None:
    vendor = make_vendor(folder, "vendor")
    signature = vendor.sign(file)
    file.write_bytes(b"Installer")
    with pytest.raises(
        LockError, match="the signature is not valid: the file or its signature was changed"
    ):
        check_signature(file, signature, vendor.key, vendor.fingerprint)


def test_a_key_with_another_fingerprint(folder: Path, file: Path) -> None:
    vendor, other = make_vendor(folder, "vendor"), make_vendor(folder, "other")
    expected = f"the key has fingerprint {other.fingerprint}, expected {vendor.fingerprint}"
    with pytest.raises(LockError, match=expected):
        check_signature(file, other.sign(file), other.key, vendor.fingerprint)


def test_a_signature_by_somebody_else(folder: Path, file: Path) -> None:
    """Count only the row's own key, also where the file of keys has both."""
    vendor, other = make_vendor(folder, "vendor"), make_vendor(folder, "other")
    with pytest.raises(LockError, match=r"the signature is not valid: .*No public key"):
        check_signature(file, other.sign(file), vendor.key, vendor.fingerprint)
    both = folder / "both.key"
    both.write_bytes(vendor.key.read_bytes() + other.key.read_bytes())
    with pytest.raises(LockError, match="the signature is not valid"):
        check_signature(file, other.sign(file), both, vendor.fingerprint)
    check_signature(file, vendor.sign(file), both, vendor.fingerprint)


def test_a_key_that_has_expired(folder: Path, file: Path) -> None:
    then = ("--faked-system-time", "20200102T000000")
    vendor = make_vendor(folder, "vendor", expires="2d", options=then)
    # Signed while the key was good; today it is not.
    signature = vendor.sign(file, *then)
    with pytest.raises(LockError, match="the signature is not valid: the key has expired"):
        check_signature(file, signature, vendor.key, vendor.fingerprint)


@pytest.mark.parametrize("content", [b"", b"<html>404</html>\n"])
def test_what_is_no_key_and_no_signature(folder: Path, file: Path, content: bytes) -> None:
    vendor = make_vendor(folder, "vendor")
    rubbish = folder / "rubbish"
    rubbish.write_bytes(content)
    with pytest.raises(LockError, match="rubbish is not an OpenPGP key"):
        check_signature(file, vendor.sign(file), rubbish, vendor.fingerprint)
    with pytest.raises(LockError, match="the signature is not valid"):
        check_signature(file, rubbish, vendor.key, vendor.fingerprint)


def test_without_the_program(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing")
    with pytest.raises(
        LockError, match=r"GnuPG is not installed\nhint: install it with `apt-get install gpg`"
    ):
        check_signature(file, file, file, "0" * 40)
