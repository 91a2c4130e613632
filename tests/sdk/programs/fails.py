"""A training script that fails on the last host, with a status and a message of its own."""

import json
import os
import sys
import time

if os.environ["SM_CURRENT_HOST"] == json.loads(os.environ["SM_HOSTS"])[-1]:
    print("cannot read /no/such/data", file=sys.stderr)
    sys.exit(42)
time.sleep(300)
