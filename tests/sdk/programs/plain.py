"""A training script that every host runs on its own.

The leader's part takes longer than the worker's.

The hosts of a local job share one model directory, so the leader can see that
the worker's script is done.
"""

import json
import os
import sys
import time
from pathlib import Path

host, hosts = os.environ["SM_CURRENT_HOST"], json.loads(os.environ["SM_HOSTS"])
model = Path(os.environ["SM_MODEL_DIR"])
here = {"host": host, "arguments": sys.argv[1:], "shared_memory": os.statvfs("/dev/shm").f_blocks}
print(f"plain script on {host}: grüße, 日本")
if host == hosts[0]:
    deadline = time.monotonic() + 60
    while not all(Path(model, f"{other}.done").exists() for other in hosts[1:]):
        if time.monotonic() > deadline:
            sys.exit("the other hosts never came")
        time.sleep(0.05)
    # This is the work that the worker's end must not cut off: Compose ends a
    # job with its first container.
    time.sleep(3)
    Path(model, "model.json").write_text(json.dumps([here]), encoding="utf-8")
else:
    Path(model, f"{host}.done").touch()
