"""pip's settings and requirements files, read without pip's modules, beside pip
itself, which is the oracle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainworks_launcher.programs.installing import pip_files
from trainworks_launcher.programs.installing.environment import import_error

ORACLE = """
import json, sys
from pip._internal.network.session import PipSession
from pip._internal.req.req_file import RequirementsFileParser, get_line_parser

rows = []
for each in RequirementsFileParser(PipSession(), get_line_parser(None)).parse(sys.argv[1], False):
    opts, control = each.opts, each.opts.format_control
    hashes = [f"{kind}:{value}" for kind, values in (opts.hashes or {}).items() for value in values]
    rows.append(
        [
            each.lineno,
            (getattr(each, "requirement", "") or "").strip(),
            bool(getattr(each, "is_editable", False)),
            bool(each.constraint),
            sorted(hashes),
            opts.index_url or "",
            opts.extra_index_urls or [],
            opts.find_links or [],
            opts.trusted_hosts or [],
            bool(opts.no_index),
            bool(opts.pre),
            bool(opts.prefer_binary),
            bool(opts.require_hashes),
            sorted(control.no_binary if control else ()),
            sorted(control.only_binary if control else ()),
        ]
    )
print(json.dumps(rows))
"""
SETTINGS = """
import json, sys
from pip._internal.commands import create_command

found = create_command("install").parse_args([])[0]
print(
    json.dumps(
        [
            found.index_url,
            found.extra_index_urls,
            found.find_links,
            found.no_index,
            found.trusted_hosts,
            found.pre,
            found.cert or "",
            found.client_cert or "",
            found.timeout,
            found.retries,
            found.proxy or "",
            sorted(found.format_control.no_binary),
            sorted(found.format_control.only_binary),
            found.constraints,
            found.target_dir or "",
            found.prefix_path or "",
            found.ignore_dependencies,
            found.build_isolation,
        ]
    )
)
"""
FILES = {
    "requirements.txt": (
        """# a comment
plain
pinned==1.0 ; python_version > '3' # why
spaced >= 1 , < 2
extras[a,b]~=1.2
hashed==1 \\
    --hash=sha256:00 \\
    --hash sha512:11
# a comment \\
after

split \\
  # a comment inside
-e ./folder[extra]
--editable=git+https://host.example/x@main#egg=x&subdirectory=y
./wheel-1-py3-none-any.whl
name @ https://host.example/name-1.zip#sha256=00
fragment @ https://host.example/name-1.zip#egg=a
-r more/other.txt
--requirement=more/other.txt
-c limits.txt
-i https://index.example/simple
--extra-index-url=https://one.example/simple
--extra-index-url https://${A_NAME}:${A_TOKEN}@two.example/${not_a_variable}/${NOT_SET}
-f links
--find-links https://links.example/page.html
--trusted-host host.example
--no-binary=:all:
--only-binary a,b
--pre --no-index --prefer-binary
--require-hashes
last \\"""
    ),
    "more/other.txt": "inner\n-r deeper.txt\n",
    "more/deeper.txt": "deep==1\n",
    "limits.txt": "\n\nlimited<2\n-r more/deeper.txt\n",
}


SEVERAL = """
[global]
extra-index-url =
    https://a.example/simple
    https://b.example/simple
[install]
extra-index-url = https://c.example/simple
no-deps = yes
constraint = /a.txt /b.txt
"""


def ask_program(program: str, *words: str, **variables: str) -> list[object]:
    done = subprocess.run(
        (sys.executable, "-I", "-c", program, *words),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[object] = json.loads(done.stdout)
    return answers


def test_lines_are_those_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    variables = {"A_NAME": "me", "A_TOKEN": "word"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rows = []
    for row in pip_files.read_rows(tmp_path / "requirements.txt"):
        options = row.options
        names = [
            sorted(set(",".join(packages).split(",")) - {""})
            for packages in (options.no_binary, options.only_binary)
        ]
        editable = [*options.editable, ""][0] if not row.requirement else ""
        rows.append(
            [
                *(
                    row.number,
                    row.requirement or editable,
                    bool(editable),
                    row.constraint,
                    sorted(options.hash),
                ),
                *(
                    options.index_url or "",
                    options.extra_index_url,
                    options.find_links,
                    options.trusted_host,
                ),
                *(
                    options.no_index,
                    options.pre,
                    options.prefer_binary,
                    options.require_hashes,
                    *names,
                ),
            ]
        )
    expected = ask_program(ORACLE, str(tmp_path / "requirements.txt"), **variables)
    assert len(expected) > 25
    assert rows == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("plain --no-such", "unrecognized arguments: --no-such"),
        ("-r", "argument -r/--requirement: expected one argument"),
        ("plain --hash 'x", "No closing quotation"),
    ],
)
def test_a_line_that_pip_cannot_read_has_a_problem(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "requirements.txt").write_text(f"\n{text}\nplain\n")
    wrong, right = pip_files.read_rows(tmp_path / "requirements.txt")
    assert (wrong.number, wrong.requirement, wrong.problem) == (2, text, reason)
    assert (right.number, right.requirement, right.problem) == (3, "plain", "")


def test_a_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-r requirements.txt")
    with pytest.raises(pip_files.SettingsError, match="includes itself"):
        list(pip_files.read_rows(tmp_path / "requirements.txt"))


@pytest.mark.parametrize(
    ("file", "variables"),
    [
        ("", {}),
        ("[global]\nindex-url = https://a.example/simple\ntimeout = 33\nno-binary = a,b\n", {}),
        (SEVERAL, {}),
        (
            "[global]\nfind-links = /a\n[install]\nfind-links = /b\n",
            {"PIP_FIND_LINKS": "/c /d", "PIP_PRE": "1"},
        ),
        (
            "[list]\nindex-url = https://not.example\n",
            {"PIP_NO_BUILD_ISOLATION": "0", "PIP_DEFAULT_TIMEOUT": "9"},
        ),
        (
            "[global]\nno-index = true\nproxy = http://p.example:1\n",
            {"PIP_NO_INDEX": "false", "PIP_RETRIES": "2"},
        ),
        (
            "",
            {
                "PIP_INDEX_URL": "https://me:it%27s@a.example/simple",
                "PIP_ONLY_BINARY": ":all:",
                "PIP_TARGET": "/t",
            },
        ),
    ],
)
def test_settings_are_those_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, variables: Mapping[str, str]
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(file)
    for name, value in {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **variables}.items():
        monkeypatch.setenv(name, value)
    settings = pip_files.read_settings()
    pip = ask_program(SETTINGS)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in variables:
        monkeypatch.delenv(name)
    default = ask_program(SETTINGS)[0]
    # The launcher has no index where pip has its own default.
    if pip[0] == default:
        pip[0] = ""
    assert [
        *(
            settings.index_url,
            list(settings.extra_index_urls),
            list(settings.find_links),
            settings.no_index,
        ),
        *(list(settings.trusted_hosts), settings.pre, settings.cert, settings.client_cert),
        *(float(settings.timeout or 15), int(settings.retries or 5), settings.proxy),
        *(sorted(settings.no_binary), sorted(settings.only_binary), list(settings.constraints)),
        *(settings.target, settings.prefix, settings.no_deps, settings.build_isolation),
    ] == pip


def test_settings_that_pip_rejects_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text("no section\n")
    with pytest.raises(
        pip_files.SettingsError,
        match="pip cannot read its settings: Configuration file could not be loaded",
    ):
        pip_files.read_settings()
    (tmp_path / "pip.conf").write_text("[global]\npre = perhaps\n")
    with pytest.raises(pip_files.SettingsError, match="pre is 'perhaps', and neither yes nor no"):
        pip_files.read_settings()


def test_an_import_that_a_signal_ended_is_told_by_the_signal() -> None:
    """And not by the warning before it. The statement stands for a module that crashes."""
    crash = "os, sys; sys.stderr.write('UserWarning: old\\n'); os.abort()"
    assert import_error(crash) == f"import ended by signal {int(signal.SIGABRT)}"
    assert import_error("no_such_module") == (
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
