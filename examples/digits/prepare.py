"""Lays out a folder as the platform mounts it at /opt/ml, for the digits example.

python examples/digits/prepare.py FOLDER --mode mpi --processes 2
python examples/digits/prepare.py FOLDER --mode smp
python examples/digits/prepare.py FOLDER --host algo-1 --hosts algo-1,algo-2 --processes 1
"""

import argparse
import csv
import json
import shutil
from pathlib import Path

TORCHRUN = {"sagemaker_torch_distributed_enabled": "true"}
MPI = {"sagemaker_mpi_enabled": "true"}
SMDDP = {"sagemaker_distributed_dataparallel_enabled": "true"}
PARTITIONS = {"mp_parameters": '{"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": true}'}

MODES = {
    "torch_distributed": ("train.py", TORCHRUN),
    "mpi": ("train.py", MPI),
    "smddp": ("train_smddp.py", SMDDP),
    "smddp-torchrun": ("train_smddp.py", {**TORCHRUN, **SMDDP}),
    "smp": ("train_smp.py", {**MPI, **PARTITIONS}),
}
"""The script, and what the SageMaker SDK sends for its `distribution`."""


def write_digits(folder: Path) -> None:
    """Write scikit-learn's bundled digits as `digits.csv`: 64 pixels, then the
    digit, one image a line.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "digits.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [*map(int, image), int(label)]
            for image, label in zip(digits.data, digits.target, strict=True)
        )


def prepare(
    folder: Path, *, mode: str, processes: int, host: str, hosts: tuple[str, ...], epochs: int = 5
) -> None:
    """Write code, data and configuration below `folder`.

    Anything the example left there before is replaced.
    """
    for name in ("code", "input/config", "input/data/training", "model", "output"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    script, switches = MODES[mode]
    for name in (script, "read_digits.py"):
        shutil.copyfile(Path(__file__).with_name(name), folder / "code" / name)
    write_digits(folder / "input" / "data" / "training")
    hyperparameters = {
        "sagemaker_program": script,
        "sagemaker_mpi_num_of_processes_per_host": str(processes),
        "epochs": str(epochs),
        **switches,
    }
    for name, content in (
        ("hyperparameters", hyperparameters),
        (
            "resourceconfig",
            {"current_host": host, "hosts": list(hosts), "network_interface_name": "eth0"},
        ),
        ("inputdataconfig", {"training": {"TrainingInputMode": "File"}}),
    ):
        (folder / "input" / "config" / f"{name}.json").write_text(
            json.dumps(content), encoding="utf-8"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=tuple(MODES), default="torch_distributed")
    parser.add_argument("--processes", type=int, default=2, help="on each host")
    parser.add_argument("--host", default="algo-1", help="the host that will see this folder")
    parser.add_argument("--hosts", default="algo-1", help="all hosts of the job, with commas")
    options = parser.parse_args()
    prepare(
        options.folder,
        mode=options.mode,
        processes=options.processes,
        host=options.host,
        hosts=tuple(options.hosts.split(",")),
    )
    print(options.folder)


if __name__ == "__main__":
    main()
