"""A TensorFlow server of the cluster in TF_CONFIG, which serves until it is killed.

Run by the image's Python as ``python tensorflow_server.py``: TensorFlow is the image's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> int:
    """Serve until this process is killed.

    Returns 64, with a line on standard error, if TF_CONFIG does not describe a server. Raises
    ModuleNotFoundError without TensorFlow, and TensorFlow's errors, for example for a taken port.
    """
    # This file's own directory has modules with common names, which TensorFlow must not find.
    del sys.path[0]
    try:
        document = json.loads(os.environ.get("TF_CONFIG", ""))
        cluster, task = document["cluster"], document["task"]
        kind, index = task["type"], task["index"]
    except (ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"trainworks: TF_CONFIG does not describe a server: {error!r}\n")
        return 64
    tensorflow = importlib.import_module("tensorflow")
    # TensorFlow 1 has the same class under another name.
    server = getattr(tensorflow.distribute, "Server", None) or tensorflow.train.Server
    server(tensorflow.train.ClusterSpec(cluster), job_name=kind, task_index=index).join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
