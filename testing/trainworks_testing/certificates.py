"""A certificate authority of the tests' own, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A certificate authority: ``bundle`` is to be trusted, ``server`` is 127.0.0.1's."""

    bundle: Path
    server: Path
    key: Path


def make_authority(folder: Path, *also: str) -> Authority:
    """Make a CA and a certificate for 127.0.0.1, and for hosts of these names too."""
    openssl = shutil.which("openssl")
    assert openssl, "openssl is not installed"

    def run(*words: str) -> None:
        subprocess.run((openssl, *words), cwd=folder, check=True, capture_output=True)

    names = ",".join(
        ("subjectAltName=IP:127.0.0.1", "DNS:localhost", *(f"DNS:{name}" for name in also))
    )
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run(
        "req",
        "-x509",
        *curve,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-days",
        "2",
        "-subj",
        "/CN=the tests' own CA",
    )
    run("req", *curve, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text(names + "\n", encoding="utf-8")
    signing = (
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "names",
    )
    run("x509", "-req", "-in", "server.csr", *signing, "-out", "server.pem")
    return Authority(
        bundle=folder / "ca.pem", server=folder / "server.pem", key=folder / "server.key"
    )
