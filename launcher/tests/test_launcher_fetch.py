"""Test the things that a host brings in before the start: code from S3, a project, requirements
from private indexes. Real pip, real S3 server, real clients; and no secret in an argument of any
process or in the log.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import io
import json
import os
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launcher_pip import pip_variables, project_files, wheel
from launcher_support import REPOSITORY, TIME_OUT, Launcher, write_inputs, write_manifest

from trainworks_launcher.contract.json_values import Json
from trainworks_launcher.job.staging import Repository, parse_repository
from trainworks_testing.certificates import Authority, make_authority
from trainworks_testing.ports import free_port

PEER = REPOSITORY / ".cache/peers/s3/bin"
USER, TOKEN = "aws", "t0ken-of-the-index-4711"
KEY_ID, SECRET = "AKIDOFTHETEST", "s3cret-of-the-test-0815"
ARN = "arn:aws:codeartifact:eu-west-1:123456789012:repository/shared/wheels"


class Index(http.server.ThreadingHTTPServer):
    """A package index with one wheel, for those who know the token.

    And the two calls of CodeArtifact that lead there.

    Every process that asks the index is looked at: ``seen`` has every command line of the machine,
    while pip was asking, with the token.
    """

    daemon_threads = True

    def __init__(self, authority: Authority | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scheme = "https" if authority else "http"
        if authority:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(authority.server, authority.key)
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.file, self.content = wheel("greeting", "WORDS = 'installed from the private index'\n")
        self.seen: list[bytes] = []
        self.served: list[str] = []
        self.calls: list[str] = []

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_arguments: object) -> None:
        """Say nothing of a client that does not trust us."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def answer(self, status: int, body: bytes, kind: str = "text/html", **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        assert self.path.startswith("/v1/authorization-token?")
        self.server.calls.append(self.path)
        self.answer(
            200,
            json.dumps({"authorizationToken": TOKEN, "expiration": 2e9}).encode(),
            "application/json",
        )

    def do_HEAD(self) -> None:
        self.answer(405, b"")  # as some indexes do; it is asked without credentials

    def do_GET(self) -> None:
        server = self.server
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes()
                if TOKEN.encode() in words:
                    server.seen.append(words)
        if self.path.startswith("/v1/repository/endpoint?"):
            server.calls.append(self.path)
            body = {"repositoryEndpoint": f"{server.address}/pypi/wheels/"}
            self.answer(200, json.dumps(body).encode(), "application/json")
            return
        expected = base64.b64encode(f"{USER}:{TOKEN}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {expected}":
            self.answer(401, b"who are you?", WWW_Authenticate='Basic realm="index"')
            return
        # The whole address where a client asks the index as a proxy.
        server.served.append(self.path)
        if self.path.endswith("/simple/greeting/"):
            digest = hashlib.sha256(server.content).hexdigest()
            self.answer(
                200, f'<a href="/file/{server.file}#sha256={digest}">{server.file}</a>'.encode()
            )
        elif self.path.endswith(f"/file/{server.file}"):
            self.answer(200, server.content, "application/octet-stream")
        else:
            self.answer(404, b"no such package")


@contextlib.contextmanager
def serving(server: Index) -> Iterator[Index]:
    """Serve until the end."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def index() -> Iterator[Index]:
    with serving(Index()) as server:
        yield server


def run(
    base: Path,
    files: Mapping[str, str],
    variables: Mapping[str, str],
    python: str = "",
    **hyperparameters: Json,
) -> Launcher:
    """A job with these files of code, to its end."""
    write_inputs(base, "", hyperparameters, {})
    for name, text in files.items():
        (base / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (base / "code" / name).write_text(text, encoding="utf-8")
    return finish(base, variables, {"python": python or sys.executable})


def finish(base: Path, variables: Mapping[str, str], programs: Mapping[str, str]) -> Launcher:
    manifest = write_manifest(base / "image.json", programs)
    with Launcher(
        base, variables={"TRAINWORKS_IMAGE_MANIFEST": str(manifest), **variables}
    ) as launcher:
        launcher.status = launcher.wait()
    return launcher


USES_GREETING = {
    "train.py": "import greeting; print('GOT', greeting.WORDS)",
    "requirements.txt": "greeting\n",
}


# --- requirements ---------------------------------------------------------------------------------
def test_a_private_index_through_netrc(tmp_path: Path, index: Index) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine 127.0.0.1 login {USER} password {TOKEN}\n", encoding="utf-8")
    launcher = run(
        tmp_path, USES_GREETING, pip_variables(tmp_path, PIP_INDEX_URL=f"{index.address}/simple/")
    )
    assert launcher.status == 0, launcher.text
    assert "GOT installed from the private index" in launcher.text
    assert set(index.served) == {"/simple/greeting/", f"/file/{index.file}"}
    assert TOKEN not in launcher.text
    assert index.seen == []


@pytest.mark.parametrize(
    ("variables", "file"),
    [
        ({"PIP_INDEX_URL": "{own}/simple/"}, ""),
        ({"PIP_EXTRA_INDEX_URL": "{own}/simple/", "PIP_INDEX_URL": "{nothing}/simple/"}, ""),
        ({}, "[global]\nindex-url = {own}/simple/\n"),
        ({}, "[global]\nindex-url = {closed}/simple/\n[install]\nindex-url = {own}/simple/\n"),
        ({"PIP_INDEX_URL": "{own}/simple/"}, "[global]\nindex-url = {closed}/simple/\n"),
        ({"PIP_FIND_LINKS": "{own}/simple/greeting/", "PIP_NO_INDEX": "1"}, ""),
        ({"PIP_FIND_LINKS": "{folder}", "PIP_NO_INDEX": "1"}, ""),
        ({"PIP_INDEX_URL": "{own}/simple/", "PIP_CERT": "{ca}", "PIP_TIMEOUT": "2.5"}, "tls"),
        ({"PIP_INDEX_URL": "{own}/simple/", "PIP_CERT": "", "REQUESTS_CA_BUNDLE": "{ca}"}, "tls"),
        ({"PIP_INDEX_URL": "{own}/simple/", "PIP_TRUSTED_HOST": "127.0.0.1"}, "tls"),
        ({"PIP_INDEX_URL": "http://{login}@index.example/simple/", "PIP_PROXY": "{proxy}"}, ""),
        ({"PIP_INDEX_URL": "http://{login}@index.example/simple/", "HTTP_PROXY": "{proxy}"}, ""),
    ],
)
def test_what_pip_would_use_is_used(
    tmp_path: Path, variables: Mapping[str, str], file: str
) -> None:
    """Every way in which people tell pip about their index.

    The password is in no argument of any process.
    """
    authority = make_authority(tmp_path) if file == "tls" else None
    with serving(Index(authority)) as index:
        (tmp_path / "wheels").mkdir()
        (tmp_path / "wheels" / index.file).write_bytes(index.content)
        values = {
            "login": f"{USER}:{TOKEN}",
            "own": index.address.replace("://", f"://{USER}:{TOKEN}@"),
            "nothing": f"{index.address.replace('://', f'://{USER}:{TOKEN}@')}/nothing",
            "closed": f"http://127.0.0.1:{free_port()}",
            "proxy": index.address,
            "folder": str(tmp_path / "wheels"),
            "ca": str(tmp_path / "ca.pem"),
        }
        values_given = {name: value.format_map(values) for name, value in variables.items()}
        if file not in ("", "tls"):
            (tmp_path / "pip.conf").write_text(file.format_map(values), encoding="utf-8")
            values_given["PIP_CONFIG_FILE"] = str(tmp_path / "pip.conf")
        launcher = run(tmp_path, USES_GREETING, {**pip_variables(tmp_path), **values_given})
        assert launcher.status == 0, launcher.text
        assert "GOT installed from the private index" in launcher.text
        assert TOKEN not in launcher.text
        assert index.seen == []


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PIP_INDEX_URL": "http://127.0.0.1:{closed}/simple/"}, "Connection refused"),
        ({"PIP_INDEX_URL": "http://index.invalid/simple/"}, "failed to lookup address information"),
        ({"PIP_INDEX_URL": "{address}/simple/"}, "invalid peer certificate: UnknownIssuer"),
        ({"PIP_INDEX_URL": "{address}/simple/", "PIP_TRUSTED_HOST": "127.0.0.1"}, "401"),
    ],
)
def test_an_index_that_cannot_be_reached_is_the_reason(
    tmp_path: Path, variables: Mapping[str, str], reason: str
) -> None:
    """Name the index in the first line: a host without a network, or behind a proxy that shows its
    own certificate.
    """
    with serving(Index(make_authority(tmp_path))) as index:
        values = {"closed": free_port(), "address": index.address}
        pip_values = {name: value.format_map(values) for name, value in variables.items()}
        launcher = run(tmp_path, USES_GREETING, pip_variables(tmp_path, **pip_values))
    assert launcher.status == 65
    first = launcher.failure.splitlines()[0]
    assert pip_values["PIP_INDEX_URL"].partition("/simple")[0] in first
    assert reason in first
    host = pip_values["PIP_INDEX_URL"].partition("//")[2].partition("/")[0]
    assert first.startswith(f"the package index {host} cannot be reached: ") is (reason != "401")


def test_an_index_of_the_file_that_does_not_answer_is_left_out(
    tmp_path: Path, index: Index
) -> None:
    """Leave the index out as pip does; an index of pip's settings is not, which may be the private
    one.
    """
    own = index.address.replace("://", f"://{USER}:{TOKEN}@")
    files = {
        **USES_GREETING,
        "requirements.txt": f"--extra-index-url http://127.0.0.1:{free_port()}/simple\ngreeting\n",
    }
    launcher = run(tmp_path, files, pip_variables(tmp_path, PIP_INDEX_URL=f"{own}/simple/"))
    assert launcher.status == 0, launcher.text
    assert "/simple does not answer: it is left out, as pip does" in launcher.text


def test_two_files_of_pip_that_say_the_same(tmp_path: Path, index: Index) -> None:
    """Prefer the user's own file to the machine's, with any names of the two."""
    own = index.address.replace("://", f"://{USER}:{TOKEN}@")
    for name, address in (
        (".config/pip", f"{own}/simple/"),
        ("zone/pip", f"http://127.0.0.1:{free_port()}/simple/"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "pip.conf").write_text(
            f"[global]\nindex-url = {address}\n", encoding="utf-8"
        )
    variables = pip_variables(tmp_path, HOME=str(tmp_path), XDG_CONFIG_DIRS=str(tmp_path / "zone"))
    del variables["PIP_CONFIG_FILE"]
    launcher = run(tmp_path, USES_GREETING, variables)
    assert launcher.status == 0, launcher.text


def test_a_failed_installation_begins_with_uvs_reason(tmp_path: Path, index: Index) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine 127.0.0.1 login {USER} password {TOKEN}\n", encoding="utf-8")
    files = {"train.py": "", "requirements.txt": "no-such-package-of-ours\n"}
    launcher = run(
        tmp_path, files, pip_variables(tmp_path, PIP_INDEX_URL=f"{index.address}/simple/")
    )
    assert launcher.status == 65
    reason, place = launcher.failure.splitlines()[:2]
    assert "no-such-package-of-ours was not found in the package registry" in reason
    assert (
        place
        == f"installing requirements.txt on host {os.uname().nodename} (mode none): exit status 1"
    )
    assert TOKEN not in launcher.text + launcher.failure


def test_a_project_is_installed_and_runs_as_a_module_of_itself(tmp_path: Path) -> None:
    files = {
        **project_files(),
        "package/sibling.py": "WORDS = 'imported by its package'\n",
        "package/train.py": (
            "from . import sibling\nimport importlib.metadata\n"
            "print('GOT', sibling.WORDS, importlib.metadata.version('project'))\n"
        ),
    }
    launcher = run(
        tmp_path,
        files,
        pip_variables(tmp_path, PIP_NO_INDEX="1"),
        sagemaker_program="package/train.py",
    )
    assert launcher.status == 0, launcher.text
    assert "trainworks: installing the project (pyproject.toml)" in launcher.text
    assert "GOT imported by its package 1.0" in launcher.text


@pytest.mark.engine
def test_a_project_of_setuptools(tmp_path: Path) -> None:
    python = peer("python")
    files = {
        "setup.py": (
            "from setuptools import setup\nsetup(name='old', version='2.0', packages=['old'])\n"
        ),
        "old/__init__.py": "",
        "old/train.py": (
            "import importlib.metadata as m; print('GOT', m.version('old'), __package__)\n"
        ),
    }
    variables = pip_variables(tmp_path, PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0")
    launcher = run(tmp_path, files, variables, python, sagemaker_program="old.train")
    assert launcher.status == 0, launcher.text
    assert "GOT 2.0 old" in launcher.text


# --- CodeArtifact ---------------------------------------------------------------------------------
def test_the_arn_of_a_repository() -> None:
    assert parse_repository(ARN) == Repository("eu-west-1", "123456789012", "shared", "wheels")
    assert parse_repository(ARN.replace("arn:aws:", "arn:aws-cn:")).domain == "shared"


@pytest.mark.parametrize(
    "arn",
    [
        "",
        "shared/wheels",
        ARN.replace("codeartifact", "s3"),
        ARN.replace("123456789012", "12"),
        f"{ARN} ",
        ARN[:-7],
    ],
)
def test_what_is_no_arn_of_a_repository(arn: str) -> None:
    with pytest.raises(ValueError, match="is not the ARN of a CodeArtifact repository"):
        parse_repository(arn)


def test_a_wrong_arn_is_refused_at_the_start(tmp_path: Path) -> None:
    launcher = run(
        tmp_path, USES_GREETING, pip_variables(tmp_path, CA_REPOSITORY_ARN="shared/wheels")
    )
    assert launcher.status == 64
    assert (
        "its form is arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/REPOSITORY"
        in launcher.failure
    )


def test_a_netrc_that_is_there_already_stays(tmp_path: Path) -> None:
    """The error of the file is told, and the file of another program is not removed."""
    aws = tmp_path / "aws"
    aws.write_text(f"#!/bin/sh\necho {TOKEN}\n", encoding="utf-8")
    aws.chmod(0o755)
    (tmp_path / "netrc").write_text("of another program", encoding="utf-8")
    program = REPOSITORY / "launcher/trainworks_launcher/programs/codeartifact.py"
    words = ("eu-west-1", "123456789012", "shared", "wheels", str(aws), "--", "true")
    variables = {**os.environ, "TRAINWORKS_RUNTIME_DIRECTORY": str(tmp_path)}
    done = subprocess.run(
        (sys.executable, str(program), *words),
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FileExistsError" in done.stderr
    assert (tmp_path / "netrc").read_text(encoding="utf-8") == "of another program"


def peer(name: str) -> str:
    path = PEER / name
    if not path.exists():
        pytest.skip(f"no {path.relative_to(REPOSITORY)}; make it with: tools/set-up-peers s3")
    return str(path)


AWS = {
    "AWS_ACCESS_KEY_ID": KEY_ID,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "eu-west-1",
}
PLAIN_PYTHON = "/usr/bin/python3"
"""Programs without boto3, so that only the aws command line is left."""


def programs_with(client: str) -> dict[str, str]:
    """The programs of an image that has boto3, or only the aws command line."""
    if client == "boto3":
        return {"python": peer("python")}
    if (
        subprocess.run(
            (PLAIN_PYTHON, "-c", "import boto3"), capture_output=True, check=False
        ).returncode
        == 0
    ):
        pytest.skip(f"{PLAIN_PYTHON} has boto3")
    return {"python": PLAIN_PYTHON, "aws": peer("aws")}


@pytest.mark.engine
@pytest.mark.parametrize("client", ["boto3", "aws"])
def test_codeartifact_gives_a_token_that_nobody_sees(
    tmp_path: Path, index: Index, client: str
) -> None:
    """The real clients and the real pip.

    CodeArtifact itself is a service of this test, for moto has none.
    """
    programs = programs_with(client)
    (tmp_path / ".netrc").write_text(
        "machine other.example login me password unrelated\n", encoding="utf-8"
    )
    variables = pip_variables(
        tmp_path,
        CA_REPOSITORY_ARN=ARN,
        AWS_ENDPOINT_URL_CODEARTIFACT=index.address,
        PIP_BREAK_SYSTEM_PACKAGES="1",
        **AWS,
    )
    script = (
        "import greeting, os, pathlib; print('GOT', greeting.WORDS, os.environ.get('NETRC'))\n"
        "print(sorted(os.listdir(os.environ['TRAINWORKS_RUNTIME_DIRECTORY'])))\n"
    )
    write_inputs(tmp_path, script, {}, {})
    (tmp_path / "code/requirements.txt").write_text("greeting\n", encoding="utf-8")
    launcher = finish(tmp_path, variables, programs)
    assert launcher.status == 0, launcher.text
    assert f"trainworks: pip installs from {index.address}/pypi/wheels/simple/" in launcher.text
    assert "GOT installed from the private index None" in launcher.text
    assert "'netrc'" not in launcher.text
    assert len(index.calls) == 2
    assert all(
        "domain=shared" in call and "domain-owner=123456789012" in call for call in index.calls
    )
    assert TOKEN not in launcher.text
    assert index.seen == []


@pytest.mark.engine
@pytest.mark.parametrize("client", ["boto3", "aws"])
def test_codeartifact_that_refuses_is_the_reason(tmp_path: Path, client: str) -> None:
    programs = programs_with(client)
    closed = f"http://127.0.0.1:{free_port()}"
    variables = pip_variables(
        tmp_path, CA_REPOSITORY_ARN=ARN, AWS_ENDPOINT_URL_CODEARTIFACT=closed, **AWS
    )
    write_inputs(tmp_path, "", {}, {})
    (tmp_path / "code/requirements.txt").write_text("greeting\n", encoding="utf-8")
    launcher = finish(tmp_path, {**variables, "AWS_MAX_ATTEMPTS": "1"}, programs)
    assert launcher.status == 65
    start = "CodeArtifact gives no access to shared/wheels of account 123456789012 in eu-west-1: "
    assert launcher.failure.startswith(start)
    assert "Could not connect to the endpoint URL" in launcher.failure


# --- S3 -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """A real S3 server with a bucket; its address."""
    port = free_port()
    words = (peer("moto_server"), "-H", "127.0.0.1", "-p", str(port))
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if b"Running on" in line:
                    break
            address = f"http://127.0.0.1:{port}"
            in_store(address, "client.create_bucket(Bucket='bucket')")
            yield address
        finally:
            process.kill()


def in_store(address: str, program: str) -> None:
    """Do something with the S3 server."""
    start = (
        "import boto3, sys\n"
        f"client = boto3.client('s3', endpoint_url={address!r}, region_name='us-east-1')\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/", **AWS, "NO_PROXY": "127.0.0.1"}
    subprocess.run(
        (peer("python"), "-c", start + program), env=environment, check=True, timeout=TIME_OUT
    )


def upload(address: str, place: Path, key: str, files: Mapping[str, str]) -> str:
    """Put an archive of files into the bucket; its S3 address."""
    packed = place / "upload.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    in_store(address, f"client.upload_file({str(packed)!r}, 'bucket', {key!r})")
    return f"s3://bucket/{key}"


def job_from(address: str, base: Path, location: str, client: str, **more: str) -> Launcher:
    """A job whose code is at ``location``, to its end.

    No process may show the secret in a command line meanwhile.
    """
    programs = programs_with(client)
    write_inputs(
        base, "print('baked in')", {"sagemaker_submit_directory": location, "epochs": "3"}, {}
    )
    seen: list[bytes] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.extend(words for words in [path.read_bytes()] if SECRET.encode() in words)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        launcher = finish(
            base, pip_variables(base, **{"S3_ENDPOINT_URL": address, **AWS, **more}), programs
        )
    finally:
        over.set()
        watcher.join()
    assert seen == []
    assert SECRET not in launcher.text + launcher.failure
    return launcher


@pytest.mark.engine
@pytest.mark.parametrize("client", ["boto3", "aws"])
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"])
def test_code_from_s3_wins_over_what_the_image_has(
    tmp_path: Path, store: str, client: str, variable: str
) -> None:
    files = {
        "train.py": "import helper, sys; print(helper.WORDS, sys.argv[1:])",
        "helper.py": "WORDS = 'GOT S3'",
    }
    location = upload(store, tmp_path, "job/sourcedir.tar.gz", files)
    launcher = job_from("", tmp_path, location, client, **{variable: store})
    assert launcher.status == 0, launcher.text
    assert "GOT S3 ['--epochs', '3']" in launcher.text
    assert "baked in" not in launcher.text
    directory = tmp_path / "code"
    assert (
        f"the code of {location} is laid over 1 file(s) that are in {directory} already, and wins"
        in launcher.text
    )


@pytest.mark.engine
def test_what_is_fetched_is_planned_again(tmp_path: Path, store: str, index: Index) -> None:
    """Install the requirements and look for the entry point of the code once it is there."""
    (tmp_path / "good").mkdir()
    (tmp_path / "good/.netrc").write_text(
        f"machine 127.0.0.1 login {USER} password {TOKEN}\n", encoding="utf-8"
    )
    location = upload(store, tmp_path, "with-requirements.tar.gz", USES_GREETING)
    launcher = job_from(
        store, tmp_path / "good", location, "boto3", PIP_INDEX_URL=f"{index.address}/simple/"
    )
    assert launcher.status == 0, launcher.text
    assert "GOT installed from the private index" in launcher.text
    (tmp_path / "bad").mkdir()
    location = upload(store, tmp_path, "without.tar.gz", {"main.py": "", "tran.py": ""})
    write_inputs(tmp_path / "bad", "", {}, {})
    launcher = job_from(store, tmp_path / "bad", location, "boto3", SAGEMAKER_PROGRAM="trian.py")
    assert launcher.status == 64
    assert "file not found: 'trian.py' in " in launcher.failure
    assert "did you mean 'tran.py'?" in launcher.failure


@pytest.mark.engine
@pytest.mark.parametrize(("program", "status"), [("train.py", 0), ("absent.py", 64)])
def test_every_host_fetches_for_itself(
    tmp_path: Path, store: str, program: str, status: int
) -> None:
    location = upload(
        store,
        tmp_path,
        "two.tar.gz",
        {"train.py": "import os; print('GOT', os.environ['SM_CURRENT_HOST'])"},
    )
    hosts = ["127.0.0.1", "127.0.0.2"]
    manifest = write_manifest(tmp_path / "image.json", programs_with("boto3"))
    shared = {
        "TRAINWORKS_CONTROL_PORT": str(free_port()),
        "TRAINWORKS_IMAGE_MANIFEST": str(manifest),
    }
    shared |= {
        "S3_ENDPOINT_URL": store,
        "NO_PROXY": "127.0.0.1",
        "SAGEMAKER_PROGRAM": program,
        **AWS,
    }
    launchers = []
    with contextlib.ExitStack() as stack:
        for host in hosts:
            config: dict[str, Json] = {
                "hosts": list(hosts),
                "current_host": host,
                "network_interface_name": "lo",
            }
            write_inputs(tmp_path / host, "", {"sagemaker_submit_directory": location}, config)
            (tmp_path / host / "code/train.py").unlink()
            launchers.append(stack.enter_context(Launcher(tmp_path / host, variables=shared)))
        assert [launcher.wait() for launcher in launchers] == [status, status], (
            launchers[0].text + launchers[1].text
        )
    for host, launcher in zip(hosts, launchers, strict=True):
        assert (f"GOT {host}" in launcher.text) is (status == 0)
        assert launcher.failure == launchers[0].failure
        assert ("file not found: 'absent.py'" in launcher.failure) is (status == 64)


@pytest.mark.engine
@pytest.mark.parametrize("client", ["boto3", "aws"])
@pytest.mark.parametrize(
    ("location", "words"),
    [("s3://bucket/absent.tar.gz", "404"), ("s3://no-such-bucket/code.tar.gz", "404")],
)
def test_what_is_not_there_is_the_reason(
    tmp_path: Path, store: str, client: str, location: str, words: str
) -> None:
    launcher = job_from(store, tmp_path, location, client)
    assert launcher.status == 65
    first = launcher.failure.splitlines()[0]
    assert first.startswith(f"cannot fetch {location} at {store}: ")
    assert words in first
    assert "baked in" not in launcher.text


@pytest.mark.engine
@pytest.mark.parametrize("client", ["boto3", "aws"])
def test_no_credentials_are_the_reason(tmp_path: Path, store: str, client: str) -> None:
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    launcher = job_from(store, tmp_path, "s3://bucket/job/sourcedir.tar.gz", client, **nobody)
    assert launcher.status == 65
    assert "credentials" in launcher.failure.splitlines()[0]


@pytest.mark.engine
def test_a_malicious_archive_from_s3_changes_nothing(tmp_path: Path, store: str) -> None:
    location = upload(store, tmp_path, "evil.tar.gz", {"train.py": "", "../outside.py": ""})
    launcher = job_from(store, tmp_path, location, "boto3")
    assert launcher.status == 65
    assert (
        launcher.failure.splitlines()[0]
        == "cannot unpack code.tar.gz: member '../outside.py': its path leaves the directory"
    )
    assert (tmp_path / "code/train.py").read_text(encoding="utf-8") == "print('baked in')"
