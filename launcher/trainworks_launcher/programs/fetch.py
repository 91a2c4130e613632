"""Fetch the archive of code from S3 into the host's runtime directory.

Run as ``python -I fetch.py ADDRESS ENDPOINT REGION CLI``: with the user's Python and its boto3 if
CLI is "", else with the aws command line at CLI. ENDPOINT and REGION may be "". Credentials come
from the usual places of these two (variables, the task's or the instance's role), never from an
argument.
"""

from __future__ import annotations

import os
import subprocess
import sys

# As in contract/names.py, which this file does not import.
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE
_ARCHIVE = "code.tar.gz"  # names.FETCHED_ARCHIVE
_CONNECT_SECONDS = 10
_ATTEMPTS = 5


def fetch_with_boto3(address: str, endpoint: str, region: str, target: str) -> str:
    """Fetch the archive from S3 with boto3.

    Args:
        address: For example ``s3://bucket/code.tar.gz``.
        endpoint: Address of another S3 service; ``""`` for AWS's.
        region: ``""`` for the default.
        target: Path of the file to write.

    Returns:
        ``""``, or the reason of a failure.
    """
    import boto3  # type: ignore[import-not-found, unused-ignore]
    from botocore.config import Config  # type: ignore[import-not-found, unused-ignore]
    from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-not-found, unused-ignore]

    bucket, _, key = address.partition("://")[2].partition("/")
    config = Config(
        connect_timeout=_CONNECT_SECONDS, retries={"max_attempts": _ATTEMPTS, "mode": "standard"}
    )
    try:
        client = boto3.client(
            "s3", endpoint_url=endpoint or None, region_name=region or None, config=config
        )
        client.download_file(bucket, key, target)
    except (BotoCoreError, ClientError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fetch_with_cli(address: str, endpoint: str, region: str, target: str, program: str) -> str:
    """Fetch the archive from S3 with the aws command line at ``program``.

    The program's standard output goes to the log. The other parameters and the result are those
    of ``fetch_with_boto3``.
    """
    words = [program, "s3", "cp", address, target, "--only-show-errors"]
    words += ["--cli-connect-timeout", str(_CONNECT_SECONDS)]
    if endpoint:
        words += ["--endpoint-url", endpoint]
    if region:
        words += ["--region", region]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    except OSError as error:
        return f"{program}: {error.strerror}"
    if done.returncode == 0:
        return ""
    errors = done.stderr.decode("utf-8", "replace").strip()
    if not errors:
        return f"{program} ended with status {done.returncode}"
    return errors.splitlines()[-1].strip()


def main(arguments: list[str]) -> int:
    """Fetch the archive to the runtime directory; return 0, or 1 with one line on standard error.

    Args:
        arguments: ADDRESS, ENDPOINT, REGION and CLI.
    """
    address, endpoint, region, program = arguments
    target = os.path.join(os.environ.get(_RUNTIME_DIRECTORY, ""), _ARCHIVE)  # noqa: PTH118
    if program:
        reason = fetch_with_cli(address, endpoint, region, target, program)
    else:
        reason = fetch_with_boto3(address, endpoint, region, target)
    if not reason:
        return 0
    place = f" at {endpoint}" if endpoint else ""
    sys.stderr.write(f"trainworks: cannot fetch {address}{place}: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
