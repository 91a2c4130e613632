"""A TensorFlow server of the cluster that TF_CONFIG describes; serves until it is ended.

A program of its own, run by the image's Python as ``python
tensorflow_server.py``: TensorFlow is the image's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> int:
    """Serve; returns only if TF_CONFIG is not one of a cluster."""
    del sys.path[0]  # this file's own directory, whose names TensorFlow must not find
    try:
        document = json.loads(os.environ.get("TF_CONFIG", ""))
        cluster, task = document["cluster"], document["task"]
        kind, index = task["type"], task["index"]
    except (ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"trainworks: TF_CONFIG does not describe a server: {error!r}\n")
        return 64
    tensorflow = importlib.import_module("tensorflow")
    # The first line of TensorFlow has the same class under another name.
    server = getattr(tensorflow.distribute, "Server", None) or tensorflow.train.Server
    server(tensorflow.train.ClusterSpec(cluster), job_name=kind, task_index=index).join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
