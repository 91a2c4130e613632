"""Amazon ECR's own parts: logins, and repositories that are created on demand.

boto3 is optional; ``aws.INSTALL`` installs it. Without boto3 a credential helper or
``docker login`` gives the login, and the repositories must exist.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from trainworks.errors import RegistryError
from trainworks.host import aws

HOST = re.compile(
    r"(?P<account>\d{12})\.dkr[.-]ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?:amazonaws\.com(?:\.cn)?|on\.aws)"
)
"""A registry of ECR: one account in one region."""

IMMUTABLE_TAGS = "*.*-20*"
"""ECR's wildcard for tags that never move: those of a version with a date (``2.4-20261121``), and
others of this form.

The wildcard has a dot before the date because of cosign, which changes its own tags, such as
``sha256-20c7....att``.
"""


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The account and region of a registry."""

    account: str
    region: str


def parse_host(host: str) -> Registry | None:
    """Return the account and region of an ECR host; ``None`` for another host."""
    match = HOST.fullmatch(host)
    if match is None:
        return None
    return Registry(account=match["account"], region=match["region"])


def is_immutable_tag(tag: str) -> bool:
    """Return whether a repository that ``ensure_repository`` created keeps a tag from moving."""
    return fnmatchcase(tag, IMMUTABLE_TAGS)


def has_credentials() -> bool:
    """Return whether boto3 is installed and finds AWS credentials."""
    if find_spec("boto3") is None:
        return False
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.Session().get_credentials() is not None
    except BotoCoreError:
        # A broken configuration of AWS is as good as none.
        return False


def read_login(registry: Registry) -> tuple[str, str]:
    """Ask ECR for a user and a password, which it accepts for 12 hours.

    Raises:
        RegistryError: AWS refuses.
    """
    response = _call(registry, "get_authorization_token", registryIds=[registry.account])
    token = response["authorizationData"][0]["authorizationToken"]
    user, _, password = base64.b64decode(token).decode().partition(":")
    return user, password


def ensure_repository(registry: Registry, name: str) -> bool:
    """Create a repository if it does not exist; return whether it was created.

    A new repository is scanned at each push. Tags that match ``IMMUTABLE_TAGS`` never move. It has
    no lifecycle policy: attachments have no tag, so a rule for images without a tag would remove
    the proofs of images that are in use. An existing repository is not changed.

    Raises:
        RegistryError: AWS refuses, or boto3 does not know immutable tags with exclusions.
    """
    repositories = _call(
        registry,
        "describe_repositories",
        missing="RepositoryNotFoundException",
        registryId=registry.account,
        repositoryNames=[name],
    )
    if repositories is not None:
        return False
    creation = _call(
        registry,
        "create_repository",
        missing="RepositoryAlreadyExistsException",
        registryId=registry.account,
        repositoryName=name,
        imageTagMutability="MUTABLE_WITH_EXCLUSION",
        imageTagMutabilityExclusionFilters=[{"filterType": "WILDCARD", "filter": IMMUTABLE_TAGS}],
        imageScanningConfiguration={"scanOnPush": True},
    )
    # ``None``: another push created the repository in the meantime.
    return creation is not None


def _call(registry: Registry, operation: str, *, missing: str = "", **arguments: Any) -> Any:
    """Call an operation of ECR, and return its response as boto3 does.

    Args:
        registry: The registry that the call is about.
        operation: The method of boto3's client: ``describe_repositories``.
        missing: The code of an error for which ``None`` is returned.
        arguments: The arguments of the method.

    Raises:
        RegistryError: AWS refuses.
    """
    service = aws.Service(
        name="ecr",
        region=registry.region,
        place=f"ECR of {registry.account} in {registry.region}",
        refuse=lambda message, hint: RegistryError(message, hint=hint),
    )
    return aws.call(service, operation, missing=missing, **arguments)
