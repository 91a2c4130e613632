"""Find the login for a registry: from AWS, docker's configuration, or netrc; never from a command line."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from urllib.parse import urlunsplit

from requests.utils import get_netrc_auth

from trainworks.errors import RegistryError
from trainworks.registry import ecr


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A user, a password or token, and where they come from, for messages."""

    user: str
    password: str = field(repr=False)
    origin: str


def credentials_for(host: str) -> Credentials | None:
    """Return this machine's login for a registry, read anew at each call; ``None`` if there is none.

    For ECR it comes from AWS, if boto3 finds AWS credentials; ``docker login`` stores one that expires after 12 hours.
    Otherwise it comes from docker's configuration (``auths``, ``credHelpers``, ``credsStore`` of
    ``$DOCKER_CONFIG/config.json`` or ``~/.docker/config.json``), then from netrc.

    Raises:
        RegistryError: A credential helper fails, or AWS refuses the login.
    """
    registry = ecr.parse_host(host)
    if registry is not None and ecr.available():
        user, password = ecr.login(registry)
        return Credentials(user=user, password=password, origin="AWS")
    return _from_docker(host) or _from_netrc(host)


def _from_docker(host: str) -> Credentials | None:
    from docker.auth import load_config
    from docker.errors import DockerException

    try:
        with warnings.catch_warnings():
            # A missing helper warns too; the error below reports it.
            warnings.simplefilter("ignore")
            found = load_config().resolve_authconfig(host) or {}
    except DockerException as error:
        raise RegistryError(
            f"docker's credential helper for {host} failed ({error})",
            hint=f"install or configure the helper, or run `docker login {host}`",
        ) from error
    user, password = found.get("username") or found.get("Username"), found.get("password") or found.get("Password")
    if not user or not password:
        return None
    return Credentials(user=user, password=password, origin="docker's configuration")


def _from_netrc(host: str) -> Credentials | None:
    found = get_netrc_auth(urlunsplit(("https", host, "", "", "")))
    return Credentials(user=found[0], password=found[1], origin="netrc") if found else None
