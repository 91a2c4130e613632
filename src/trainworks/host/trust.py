"""This machine's CA bundle and proxies."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
"""Variables that name a CA bundle, the most specific to package downloads first."""

PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
"""Proxy variables that Docker and buildah know as predefined arguments, outside
of history and cache keys.
"""


def find_ca_bundle(environment: Mapping[str, str], pip_certificate: str = "") -> Path | None:
    """Return the file of the CA bundle that this machine's clients use; ``None`` without one.

    Args:
        environment: The process's environment.
        pip_certificate: pip's own ``cert`` setting, which wins over everything but ``PIP_CERT``.
    """
    files = [environment.get("PIP_CERT", ""), pip_certificate]
    files += [environment.get(name, "") for name in CA_VARIABLES]
    # A Python that the distribution did not build may have other defaults than the system's
    # programs.
    defaults = ssl.get_default_verify_paths()
    files += [defaults.cafile or "", defaults.openssl_cafile, "/etc/ssl/certs/ca-certificates.crt"]
    for file in files:
        if file and Path(file).is_file():
            return Path(file)
    return None


def find_proxy_arguments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy variables that are set as build arguments: name to value.

    Names keep their case: ``http_proxy`` and ``HTTP_PROXY`` are two variables.
    """
    arguments = {}
    for name in sorted(environment):
        value = environment[name].strip()
        if name.lower() in PROXY_VARIABLES and value:
            arguments[name] = value
    return arguments
