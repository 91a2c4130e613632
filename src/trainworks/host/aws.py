"""Asks services of AWS, by boto3, which is optional (``INSTALL``).

Failures become our errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainworks.errors import TrainworksError

INSTALL = ".venv/bin/pip install '.[ecr]'"
"""The command that installs boto3, in the checkout, for hints.

It names the folder. An index may have a package of another owner under the builder's name.
"""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service of AWS in a region.

    Attributes:
        name: The name in boto3: ``ecr``.
        region: The region; ``None``: that of AWS's own configuration.
        place: The service in messages.
        refuse: Makes the error of a message and a hint.
    """

    name: str
    region: str | None
    place: str
    refuse: Callable[[str, str], TrainworksError]


def call(service: Service, operation: str, *, missing: str = "", **arguments: Any) -> Any:
    """Call an operation of a service, and return boto3's response.

    ``None`` if AWS answers with the error ``missing``.

    Args:
        service: The service.
        operation: The operation in boto3: ``describe_repositories``.
        missing: The code of an error that is an answer; ``""``: none is.
        arguments: The arguments of the operation.

    Raises:
        TrainworksError: AWS refuses, or cannot be asked; as ``service.refuse`` makes it.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError, NoRegionError, ParamValidationError

    place, refuse = service.place, service.refuse
    # The name in AWS's interface: ``DescribeRepositories``.
    action = "".join(word.title() for word in operation.split("_"))
    try:
        client = boto3.client(service.name, region_name=service.region)
        return getattr(client, operation)(**arguments)
    except ClientError as error:
        code = str(error.response["Error"]["Code"])
        if missing and code == missing:
            return None
        words = str(error.response["Error"].get("Message", ""))
        hint = (
            f"the IAM identity needs {service.name}:{action};"
            " `aws sts get-caller-identity` says who it is"
        )
        if "expired" in f"{code} {words}".lower():
            hint = (
                "AWS's session has ended: log in again (`aws sso login`,"
                " or new keys), then repeat the command"
            )
        raise refuse(f"{place} refuses {action}: {code}: {words}", hint) from error
    except ParamValidationError as error:
        hint = f"in the checkout: {INSTALL} --upgrade"
        raise refuse(f"this boto3 is too old for {action}", hint) from error
    except NoRegionError as error:
        raise refuse(
            f"{place}: AWS's region is not known",
            "set AWS_REGION, or a region in AWS's configuration",
        ) from error
    except BotoCoreError as error:
        hint = "the same command continues once AWS can be reached with credentials"
        raise refuse(f"{place} cannot be asked for {action}: {error}", hint) from error
