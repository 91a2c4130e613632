"""ECR: its API is moto's server, its data path Debian's registry under ECR's own name.

AWS itself is never asked.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from aws import SECRET, moto_server, refusing
from lock.servers import Server
from push.hostile import Hostile
from push.support import PASSWORD, USER, RegistryServer, Tunnel, docker_configuration
from trainworks.cli import main
from trainworks.registry import ecr

pytestmark = pytest.mark.engine
"""They need the programs that `make engines` installs: oras, and a registry."""

ACCOUNT, REGION = "123456789012", "eu-west-1"
HOST = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    """Give the address of ECR's API."""
    with moto_server("-m", "moto.server") as address:
        yield address


@pytest.fixture
def tunnel(server: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tunnel]:
    """Lead the requests for ECR's host to our registry."""
    mine = Tunnel(server.port)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, mine.address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield mine
    mine.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (HOST, ecr.Registry(account=ACCOUNT, region=REGION)),
        (
            f"{ACCOUNT}.dkr.ecr-fips.us-gov-west-1.amazonaws.com",
            ecr.Registry(account=ACCOUNT, region="us-gov-west-1"),
        ),
        (
            f"{ACCOUNT}.dkr.ecr.cn-north-1.amazonaws.com.cn",
            ecr.Registry(account=ACCOUNT, region="cn-north-1"),
        ),
        (f"{ACCOUNT}.dkr-ecr.us-east-1.on.aws", ecr.Registry(account=ACCOUNT, region="us-east-1")),
        ("public.ecr.aws", None),
        (f"{HOST}.evil.example", None),
    ],
)
def test_hosts(host: str, expected: ecr.Registry | None) -> None:
    assert ecr.parse_host(host) == expected


@pytest.mark.usefixtures("aws", "logged_in")
def test_a_repository_is_made_on_demand_and_aws_gives_the_login(
    api: str,
    server: RegistryServer,
    tunnel: Tunnel,
    hostile: Hostile,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_ECR", api)
    image = hostile.put_image("team/image", b"a layer", tag="1.0-20261121")
    words = [
        "promote",
        f"{hostile.host}/team/image:1.0-20261121",
        f"{HOST}/released/image",
        "--tag",
        "1.0-20261121",
    ]
    assert main([*words, "--moving-tag", "1.0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{HOST}/released/image@{image['digest']}\n"
    for tag in ("1.0-20261121", "1.0"):
        assert f"  {HOST}/released/image:{tag}\n" in captured.err
    assert "created, with scan on push" in captured.err
    assert set(tunnel.requested_hosts) == {f"{HOST}:443"}
    client = boto3.client("ecr", region_name=REGION)
    (repository,) = client.describe_repositories(repositoryNames=["released/image"])["repositories"]
    assert repository["imageScanningConfiguration"] == {"scanOnPush": True}
    assert repository["imageTagMutability"] == "MUTABLE_WITH_EXCLUSION"
    assert repository["imageTagMutabilityExclusionFilters"] == [
        {"filterType": "WILDCARD", "filter": "*.*-20*"}
    ]
    # A rule for images without a tag would remove the attachments of images: they have none.
    with pytest.raises(client.exceptions.LifecyclePolicyNotFoundException):
        client.get_lifecycle_policy(repositoryName="released/image")
    # A repository that is there stays as it is.
    client.put_image_scanning_configuration(
        repositoryName="released/image", imageScanningConfiguration={"scanOnPush": False}
    )
    assert main(words) == 0
    again = capsys.readouterr()
    assert "created" not in again.err
    (kept_repository,) = client.describe_repositories(repositoryNames=["released/image"])[
        "repositories"
    ]
    assert kept_repository["imageScanningConfiguration"] == {"scanOnPush": False}
    token = client.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    client.close()
    for secret in (SECRET, PASSWORD, token, base64.b64decode(token).decode().partition(":")[2]):
        assert secret not in captured.out + captured.err + again.out + again.err + server.log


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (
            "ExpiredTokenException",
            "The security token included in the request is expired",
            "aws sso login",
        ),
        (
            "AccessDeniedException",
            "User is not authorized",
            "the IAM identity needs ecr:DescribeRepositories",
        ),
    ],
)
def test_what_aws_refuses_is_one_clear_error(
    hostile: Hostile,
    plain_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: str,
    message: str,
    hint: str,
) -> None:
    plain_server.serve("/", refusing(code, message))
    monkeypatch.setenv("AWS_ENDPOINT_URL_ECR", plain_server.url)
    hostile.put_image("team/image", b"a layer")
    assert main(["promote", f"{hostile.host}/team/image:1.0", f"{HOST}/released/image"]) == 15
    captured = capsys.readouterr()
    assert (
        f"ECR of {ACCOUNT} in {REGION} refuses DescribeRepositories: {code}: {message}"
        in captured.err
    )
    assert hint in captured.err
    assert SECRET not in captured.err


def test_without_aws_credentials_docker_s_login_is_taken(
    tunnel: Tunnel,
    hostile: Hostile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", raising=False)
    monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", raising=False)
    docker_configuration(tmp_path / "docker", {HOST: (USER, PASSWORD)})
    hostile.put_image("team/image", b"a layer")
    assert main(["promote", f"{hostile.host}/team/image:1.0", f"{HOST}/released/image"]) == 0
    assert "(boto3, in the checkout: .venv/bin/pip install '.[ecr]')" in capsys.readouterr().err
    assert tunnel.requested_hosts
