"""Imports one module: that this answers is the result.

Part of what is sent into an image; see ``trainworks.imagetest.probe``.
"""

import importlib


def answer(request):  # type: ignore[no-untyped-def]
    """Import ``module``, and return its name."""
    importlib.import_module(request["module"])
    return {"imported": request["module"]}
