"""What an index has of a distribution, asked of a real server."""

from __future__ import annotations

from lock.servers import Server
from trainworks.host.downloads import Client
from trainworks.host.index import archives_only
from trainworks.host.pip import PipSettings
from trainworks.host.settings import HostSettings

PAGE = """\
<a href="../../files/Fast_Tool-1.0.tar.gz#sha256=0">Fast_Tool-1.0.tar.gz</a>
<a href="../../files/fast_tool-2.0.tar.gz">fast_tool-2.0.tar.gz</a>
<a href="../../files/fast_tool-2.0-py3-none-any.whl">fast_tool-2.0-py3-none-any.whl</a>
<a href="../../files/fast-tool-1.5.zip">fast-tool-1.5.zip</a>
<a href="../../files/fast_tool-0.9.exe">fast_tool-0.9.exe</a>
"""


def test_releases_without_a_wheel_are_known_from_all_indexes(plain_server: Server) -> None:
    plain_server.serve("/one/fast-tool/", PAGE.encode())
    wheel = b'<a href="fast_tool-1.5-py3-none-any.whl">fast_tool-1.5-py3-none-any.whl</a>'
    plain_server.serve("/two/fast-tool/", wheel)
    one, two, none = (f"{plain_server.url}/{name}" for name in ("one", "two", "none"))
    for more, expected in (((), ["1.0", "1.5"]), ((none, two), ["1.0"])):
        settings = HostSettings(pip=PipSettings(index_url=one, extra_index_urls=more))
        with Client(settings) as client:
            assert archives_only("fast-tool", settings.pip, client) == expected
