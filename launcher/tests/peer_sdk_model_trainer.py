"""Run by the SDK's own Python: prints the two files that ModelTrainer's classes
make of some jobs, as JSON.
"""

from __future__ import annotations

import json
import sys

from sagemaker.train.configs import SourceCode  # type: ignore[import-not-found]
from sagemaker.train.distributed import MPI, SMP, Torchrun  # type: ignore[import-not-found]

JOBS = {
    "plain": (SourceCode(source_dir="code", entry_script="train.py"), None),
    "command": (
        SourceCode(source_dir="code", command="python train.py", args=["--epochs", 3]),
        None,
    ),
    "torchrun": (
        SourceCode(source_dir="code.tar.gz", entry_script="train.py"),
        Torchrun(process_count_per_node=2),
    ),
    "smp": (
        SourceCode(source_dir="code", entry_script="train.py"),
        Torchrun(smp=SMP(tensor_parallel_degree=2)),
    ),
    "mpi": (
        SourceCode(source_dir="code", entry_script="train.py", requirements="needs.txt"),
        MPI(mpi_additional_options=["-x", "A=two words"]),
    ),
}

files_by_name = {
    name: {
        "source": source.model_dump(),
        "distributed": distributed.model_dump() if distributed else {},
    }
    for name, (source, distributed) in JOBS.items()
}
json.dump(files_by_name, sys.stdout)
