"""Lays out a folder as the platform mounts it at /opt/ml, for the digits example.

python examples/digits/prepare.py FOLDER --mode mpi --processes 2
python examples/digits/prepare.py FOLDER --host algo-1 --hosts algo-1,algo-2
"""

import argparse
import csv
import json
import shutil
from pathlib import Path

MODES = {
    "torch_distributed": {"sagemaker_torch_distributed_enabled": "true"},
    "mpi": {"sagemaker_mpi_enabled": "true"},
}
"""What the SageMaker SDK sends for each `distribution`."""


def write_digits(folder: Path) -> None:
    """Write scikit-learn's bundled digits as `digits.csv`: 64 pixels, then the digit, one image a line."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "digits.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [*map(int, image), int(label)] for image, label in zip(digits.data, digits.target, strict=True)
        )


def prepare(folder: Path, *, mode: str, processes: int, host: str, hosts: tuple[str, ...], epochs: int = 5) -> None:
    """Write code, data and configuration below `folder`; anything the example left there before is replaced."""
    for name in ("code", "input/config", "input/data/training", "model", "output"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("train.py"), folder / "code" / "train.py")
    write_digits(folder / "input" / "data" / "training")
    hyperparameters = {
        "sagemaker_program": "train.py",
        "sagemaker_mpi_num_of_processes_per_host": str(processes),
        "epochs": str(epochs),
        **MODES[mode],
    }
    for name, content in (
        ("hyperparameters", hyperparameters),
        ("resourceconfig", {"current_host": host, "hosts": list(hosts), "network_interface_name": "eth0"}),
        ("inputdataconfig", {"training": {"TrainingInputMode": "File"}}),
    ):
        (folder / "input" / "config" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
