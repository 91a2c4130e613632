"""Find the login for a registry: from AWS, docker's configuration, or netrc.

Never from a command line.
"""

from __future__ import annotations

import base64
import warnings
from urllib.parse import urlsplit, urlunsplit

from requests.utils import get_netrc_auth

from trainworks.errors import RegistryError
from trainworks.registry import ecr
from trainworks.registry.names import DEFAULT_HOST


def find_login(host: str) -> dict[str, str]:
    """Return this machine's login for a registry as an entry of docker's ``auths``.

    ``{}`` if there is none.

    For ECR it comes from AWS, if boto3 finds AWS credentials; ``docker login`` stores one that
    expires after 12 hours. Otherwise it comes from docker's configuration (``auths``,
    ``credHelpers``, ``credsStore`` of ``$DOCKER_CONFIG/config.json`` or ``~/.docker/config.json``),
    then from netrc.

    Raises:
        RegistryError: A credential helper fails, or AWS refuses the login.
    """
    registry = ecr.parse_host(host)
    if registry is not None and ecr.has_credentials():
        return _encode_login(*ecr.read_login(registry))
    docker_login = _read_docker_login(host)
    # The configuration has these keys in lower case; credential helpers answer with capitals.
    token = docker_login.get("identitytoken") or docker_login.get("IdentityToken")
    if token:
        return {**_encode_login("<token>", ""), "identitytoken": token}
    user = docker_login.get("username") or docker_login.get("Username")
    password = docker_login.get("password") or docker_login.get("Password")
    if not user or not password:
        user, password = get_netrc_auth(urlunsplit(("https", host, "", "", ""))) or ("", "")
    if not user or not password:
        return {}
    return _encode_login(user, password)


def config_key(host: str) -> str:
    """Return the name under which docker, oras and skopeo look for a registry's login.

    It is the host, but for Docker Hub: the address of its old index.
    """
    from docker.auth import INDEX_URL

    return str(INDEX_URL) if host == DEFAULT_HOST else host


def api_host(host: str) -> str:
    """Return the host that answers for a registry; it differs for Docker Hub only."""
    if host == DEFAULT_HOST:
        return urlsplit(config_key(host)).netloc
    return host


def _encode_login(user: str, password: str) -> dict[str, str]:
    """Return a login as an entry of docker's ``auths``: ``{"auth": BASE64 of USER:PASSWORD}``."""
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def _read_docker_login(host: str) -> dict[str, str]:
    """Read a registry's login from docker's configuration, which may run a credential helper.

    Returns:
        The login with docker's keys, such as ``username``; ``{}`` without one.

    Raises:
        RegistryError: The credential helper fails.
    """
    from docker.auth import load_config
    from docker.errors import DockerException

    try:
        with warnings.catch_warnings():
            # A missing helper warns too; the error below reports it.
            warnings.simplefilter("ignore")
            return load_config().resolve_authconfig(host) or {}
    except DockerException as error:
        raise RegistryError(
            f"docker's credential helper for {host} failed ({error})",
            hint=f"install or configure the helper, or run `docker login {host}`",
        ) from error
