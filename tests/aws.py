"""AWS as tests have AWS: moto's servers on loopback, and answers that refuse.

AWS itself is never asked.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lock.servers import Answer, Request
from trainworks_testing.ports import free_port

MOTO = Path(__file__).resolve().parents[1] / ".cache/peers/s3/bin/python"

SECRET = "s3cret-of-the-test-0815"
"""The secret access key, which has to be in no output."""


@contextlib.contextmanager
def moto_server(*program: str) -> Iterator[str]:
    """Give the address of moto's server for the time of the block; skips where there is no moto.

    Args:
        program: The source that moto's Python runs.
    """
    if not MOTO.exists():
        pytest.skip("NOT TESTED: no moto here (`make peers`)")
    port = free_port()
    words = (str(MOTO), *program, "-H", "127.0.0.1", "-p", str(port))
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if b"Running on" in line:
                    break
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def refusing(code: str, message: str) -> Answer:
    """Answer as a service of AWS does that refuses."""

    def answer(request: Request) -> None:
        body = json.dumps({"__type": code, "message": message}).encode()
        request.send_response(400)
        request.send_header("Content-Type", "application/x-amz-json-1.1")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer
