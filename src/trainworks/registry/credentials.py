"""Who we are to a registry: a login of docker's configuration, of AWS, or of netrc; never on a command line."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from urllib.parse import urlunsplit

from requests.utils import get_netrc_auth

from trainworks.errors import RegistryError
from trainworks.registry import ecr


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A user and a password or token, and where they came from, for messages."""

    user: str
    password: str = field(repr=False)
    origin: str


def credentials_for(host: str) -> Credentials | None:
    """Return this machine's login at a registry, asked for anew at each call; ``None`` where there is none.

    ECR's comes from AWS itself where boto3 finds AWS credentials: what ``docker login`` kept is void after 12 hours.
    Else docker's configuration is asked (``auths``, ``credHelpers``, ``credsStore`` of ``$DOCKER_CONFIG/config.json``
    or ``~/.docker/config.json``), then netrc.

    Raises:
        RegistryError: A credential helper fails, or AWS refuses to give a login.
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
            # Of a helper that is not there: the error below says it.
            warnings.simplefilter("ignore")
            found = load_config().resolve_authconfig(host) or {}
    except DockerException as error:
        raise RegistryError(
            f"docker's configuration has a credential helper for {host}, and it fails: {error}",
            hint=f"install or configure the helper, or `docker login {host}`",
        ) from error
    user, password = found.get("username") or found.get("Username"), found.get("password") or found.get("Password")
    if not user or not password:
        return None
    return Credentials(user=user, password=password, origin="docker's configuration")


def _from_netrc(host: str) -> Credentials | None:
    found = get_netrc_auth(urlunsplit(("https", host, "", "", "")))
    return Credentials(user=found[0], password=found[1], origin="netrc") if found else None
