"""Asks a registry which image a tag means, by the protocol that all of them speak (OCI distribution)."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from urllib.parse import urlencode, urlunsplit

from trainworks.errors import LockError
from trainworks.host.downloads import Client, UnreachableError

DEFAULT_REGISTRY = "registry-1.docker.io"
"""Where names without a host are, as every engine has it."""

MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""What a tag may point at; an index of several platforms before a single image, as engines ask for it."""

CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def image_digest(reference: str, client: Client) -> str:
    """Return the digest, ``sha256:...``, of the image that ``[HOST/]NAME[:TAG]`` is now; nothing is pulled.

    Raises:
        UnreachableError: The registry does not answer, or has no such image for us.
        LockError: What it sent is not what it says it is.
    """
    host, name, tag = split_reference(reference)
    address = _address(host, f"/v2/{name}/manifests/{tag}")
    headers = {"Accept": ", ".join(MANIFESTS)}
    response = client.get(address, headers)
    challenge = response.headers.get("WWW-Authenticate", "")
    if response.status_code == 401 and challenge.lower().startswith("bearer "):
        headers["Authorization"] = f"Bearer {_token(challenge, name, client)}"
        response = client.get(address, headers)
    if response.status_code != 200:
        raise UnreachableError(f"{address} answers HTTP {response.status_code}")
    digest = f"sha256:{hashlib.sha256(response.content).hexdigest()}"
    said = response.headers.get("Docker-Content-Digest", digest)
    if said != digest:
        raise LockError(f"{address} says that it sends {said}, and sent {digest}")
    return digest


def _token(challenge: str, name: str, client: Client) -> str:
    """Return a token for reading one repository, from where the registry says; a password comes from netrc."""
    said = dict(CHALLENGE.findall(challenge))
    query = {key: said[key] for key in ("service", "scope") if key in said}
    query.setdefault("scope", f"repository:{name}:pull")
    response = client.get(f"{said.get('realm', '')}?{urlencode(query)}")
    if response.status_code != 200:
        raise UnreachableError(f"{said.get('realm', '')} gives no token for {name}: HTTP {response.status_code}")
    content = response.json()
    return str(content.get("token") or content.get("access_token") or "")


def split_reference(reference: str) -> tuple[str, str, str]:
    """Return host, name and tag of an image reference: ``debian`` is (the default registry, library/debian, latest)."""
    path, _, tag = reference.rpartition(":") if ":" in reference.rpartition("/")[2] else (reference, "", "latest")
    host, slash, name = path.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return host, name, tag
    return DEFAULT_REGISTRY, path if slash else f"library/{path}", tag


def _address(host: str, path: str) -> str:
    """Return an address: a registry on this machine is asked without TLS, as engines do."""
    machine = host.rpartition(":")[0] if ":" in host else host
    try:
        local = ipaddress.ip_address(machine).is_loopback
    except ValueError:
        local = machine == "localhost"
    return urlunsplit(("http" if local else "https", host, path, "", ""))
