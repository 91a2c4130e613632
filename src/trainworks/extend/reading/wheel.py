"""A wheel's file: its name, and what its metadata ask for."""

from __future__ import annotations

import io
import zipfile
from email.parser import BytesParser

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from trainworks.extend.requirements import Wheel


def read_wheel(file: str, content: bytes, *, extras: str = "", built: bool = False) -> Wheel:
    """Return a wheel with what its metadata ask for.

    Raises:
        ValueError: It does not have the name or the form of a wheel.
    """
    try:
        parse_wheel_filename(file)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            metadata = BytesParser().parsebytes(archive.read(name), headersonly=True)
    except StopIteration:
        raise ValueError(f"{file} is not a wheel: it has no METADATA") from None
    except (InvalidWheelFilename, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{file} is not a wheel: {error}") from None
    requires = tuple(str(each) for each in metadata.get_all("Requires-Dist", ()))
    return Wheel(file=file, content=content, requires=requires, extras=extras, built=built)
