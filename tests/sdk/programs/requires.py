"""A training script that uses the packages of its requirements.txt."""

import importlib.metadata
import os
from pathlib import Path

import iniconfig

version = importlib.metadata.version("iniconfig")
print(f"{iniconfig.__name__} {version} is here")
Path(os.environ["SM_MODEL_DIR"], f"{os.environ['SM_CURRENT_HOST']}.txt").write_text(
    version, encoding="utf-8"
)
