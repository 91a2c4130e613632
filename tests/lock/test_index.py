"""Test an index's answers about a distribution, asked of a real server."""

from __future__ import annotations

from lock.servers import Server
from trainworks.host.downloads import Client
from trainworks.host.index import find_newest_release, find_versions_without_wheels
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
            assert find_versions_without_wheels("fast-tool", settings.pip, client) == expected


RELEASES = """\
<a href="t-1.0-py3-none-any.whl">t-1.0</a>
<a href="t-2.0-py3-none-any.whl" data-requires-python="&gt;=3.8">t-2.0</a>
<a href="t-3.0.tar.gz" data-requires-python="&gt;=3.12">t-3.0</a>
<a href="t-2.5-py3-none-any.whl" data-yanked="broken">t-2.5</a>
<a href="t-4.0rc1-py3-none-any.whl">t-4.0rc1</a>
<a href="t-9.9-py3-none-any.whl" data-requires-python="nonsense">t-9.9</a>
<a href="other.exe">other.exe</a>
"""


def test_the_newest_release_is_one_for_the_python_that_asks(plain_server: Server) -> None:
    plain_server.serve("/one/t/", RELEASES.encode())
    plain_server.serve("/one/early/", b'<a href="early-1.0b2-py3-none-any.whl">early-1.0b2</a>')
    settings = HostSettings(pip=PipSettings(index_url=f"{plain_server.url}/one"))
    with Client(settings) as client:

        def newest(name: str, python: str) -> str:
            return str(find_newest_release(name, python, settings.pip, "", client))

        assert [newest("t", python) for python in ("3.7", "3.11", "3.12")] == ["1.0", "2.0", "3.0"]
        assert newest("early", "3.11") == "1.0b2"
        assert newest("absent", "3.11") == "None"
