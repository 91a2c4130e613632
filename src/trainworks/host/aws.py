"""Asks services of AWS, by boto3, which is optional (``pip install 'trainworks[ecr]'``).

Failures become our errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainworks.errors import TrainworksError

INSTALL = "pip install 'trainworks[ecr]'"


def call(
    service: str,
    operation: str,
    *,
    region: str | None,
    place: str,
    refuse: Callable[[str, str], TrainworksError],
    missing: str = "",
    hints: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Any:
    """Return what an operation answers, ``None`` where that is the error ``missing``.

    Args:
        service: As boto3 names it: ``ecr``.
        operation: As boto3 names it: ``describe_repositories``.
        region: Default: the region of AWS's own configuration.
        refuse: Makes the error of a message and a hint.
        missing: The code of an error that is an answer.
        hints: What to do about other errors, by their codes; default: what they
            mostly come from, a missing permission.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError, NoRegionError, ParamValidationError

    action = "".join(word.title() for word in operation.split("_"))
    try:
        client = boto3.client(service, region_name=region)
        return getattr(client, operation)(**arguments)
    except ClientError as error:
        code = str(error.response["Error"]["Code"])
        if missing and code == missing:
            return None
        words = str(error.response["Error"].get("Message", ""))
        needed = (
            f"the IAM identity needs {service}:{action};"
            " `aws sts get-caller-identity` says who it is"
        )
        hint = (hints or {}).get(code, needed)
        if "expired" in f"{code} {words}".lower():
            hint = (
                "AWS's session has ended: log in again (`aws sso login`,"
                " or new keys), then repeat the command"
            )
        raise refuse(f"{place} refuses {action}: {code}: {words}", hint) from error
    except ParamValidationError as error:
        raise refuse(f"this boto3 is too old for {action}", f"{INSTALL} --upgrade") from error
    except NoRegionError as error:
        raise refuse(
            f"{place}: AWS's region is not known",
            "set AWS_REGION, or a region in AWS's configuration",
        ) from error
    except BotoCoreError as error:
        hint = "the same command goes on once AWS can be reached with credentials"
        raise refuse(f"{place} cannot be asked for {action}: {error}", hint) from error
