"""Copies between two registries on a terminal: how far they are, what was there, and a Ctrl-C in the middle."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

from cli.terminal import Terminal
from lock.servers import Request, Server
from push.support import ROOT, RegistryServer
from trainworks.registry.client import (
    IMAGE_CONFIGURATION,
    IMAGE_LAYER,
    IMAGE_MANIFEST,
    Registries,
    canonical,
    digest_of,
)

CONFIGURATION = canonical({"rootfs": {"type": "layers"}})
SMALL, LARGE = os.urandom(3_000_000), os.urandom(8_000_000)
HALF = 5_000_000


def serve_image(server: Server, go_on: threading.Event) -> None:
    """Serve an image whose large layer stops in its middle until it may go on."""

    def answers(kind: str, content: bytes) -> Callable[[Request], None]:
        def answer(request: Request) -> None:
            request.send_response(200)
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content[:HALF])
            if len(content) > HALF:
                go_on.wait(60)
                request.wfile.write(content[HALF:])

        return answer

    layers = [{"mediaType": IMAGE_LAYER, "digest": digest_of(each), "size": len(each)} for each in (SMALL, LARGE)]
    config = {"mediaType": IMAGE_CONFIGURATION, "digest": digest_of(CONFIGURATION), "size": len(CONFIGURATION)}
    manifest = canonical({"schemaVersion": 2, "mediaType": IMAGE_MANIFEST, "config": config, "layers": layers})
    for reference in ("1.0", digest_of(manifest)):
        server.serve(f"/v2/team/image/manifests/{reference}", answers(IMAGE_MANIFEST, manifest))
    for content in (CONFIGURATION, SMALL, LARGE):
        server.serve(f"/v2/team/image/blobs/{digest_of(content)}", answers("application/octet-stream", content))


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize("columns", [40, 80])
def test_a_copy_goes_on_where_another_one_ended(
    server: RegistryServer, plain_server: Server, registries: Registries, columns: int
) -> None:
    go_on = threading.Event()
    serve_image(plain_server, go_on)
    registries.repository(f"{server.host}/released").put_bytes(SMALL)
    source = f"{plain_server.url.removeprefix('http://')}/team/image:1.0"
    command = (sys.executable, str(ROOT / "build.py"), "promote", source, f"{server.host}/released")
    with Terminal(command, columns=columns) as mine:
        mine.read(lambda now: len(now.shown) > 1 and "5 MB of 8 MB" in now.shown[-1])
        whole, layer = mine.shown[-2:]
        assert whole.startswith("copying  ")
        assert "8 MB of 11 MB" in whole
        assert layer.startswith("blob 2/3  ")
        go_on.set()
        assert mine.finish() == 0
        text = mine.text.replace("\n", "")
        assert f"  resumed at 3 MB, which {server.host}/released has already" in text
        assert "copying" not in text
        assert f"is there already: {server.host}/released" in text
        assert not mine.cursor_is_hidden()


@pytest.mark.usefixtures("logged_in")
def test_ctrl_c_in_the_middle_of_a_copy(server: RegistryServer, plain_server: Server) -> None:
    serve_image(plain_server, threading.Event())
    source = f"{plain_server.url.removeprefix('http://')}/team/image:1.0"
    command = (sys.executable, str(ROOT / "build.py"), "promote", source, f"{server.host}/released")
    with Terminal(command, echo=True) as mine:
        mine.read(lambda now: any("5 MB of 8 MB" in line for line in now.shown))
        mine.type("\x03")
        assert mine.finish() == 130
        assert mine.shown[-1] == "interrupted: everything that was started has been stopped"
        assert "copying" not in mine.text
        assert not mine.cursor_is_hidden()
