"""Says which Python runs, and which torch and NCCL it finds.

Sent into an image; see ``trainworks.imagetest.probe``. An older Python than the others need
answers for its version.
"""

import ctypes
import importlib
import sys
import traceback


def answer(request):  # type: ignore[no-untyped-def]
    """Return the version, and with ``torch`` in the request what ``import torch`` gives."""
    found = {
        "version": list(sys.version_info[:2]),
        "torch": "",
        "cuda": "",
        "nccl": False,
        "error": "",
    }
    if not request.get("torch"):
        return found
    try:
        torch = importlib.import_module("torch")

        found.update(torch=str(torch.__version__), cuda=str(torch.version.cuda or ""))
    except ImportError as error:
        if getattr(error, "name", "") != "torch":
            found["error"] = traceback.format_exc()
    except Exception:  # noqa: BLE001  (whatever it is, it is the answer)
        found["error"] = traceback.format_exc()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(ctypes.c_int()))
        found["nccl"] = True
    except (OSError, AttributeError):
        pass
    return found
