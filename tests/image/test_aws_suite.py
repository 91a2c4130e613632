"""AWS's own sanity suite for its training images, unchanged and at a recorded
commit, on these images.

The suite is not in this repository: ``TRAINWORKS_TEST_AWS_SUITE`` names a git directory of
aws/deep-learning-containers.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

from image.support import ROOT, BuiltByCommand
from trainworks.engine.protocol import Job, Mount

pytestmark = pytest.mark.engine

SUITE = "TRAINWORKS_TEST_AWS_SUITE"
EXPECTED = tomllib.loads((Path(__file__).parent / "aws-suite.toml").read_text(encoding="utf-8"))

RUN = """
import importlib.util, io, json, unittest

spec = importlib.util.spec_from_file_location(
    "suite", "/suite/test/sanity/scripts/test_sanity_training.py"
)
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
done = unittest.TextTestRunner(stream=io.StringIO()).run(
    unittest.defaultTestLoader.loadTestsFromModule(suite)
)
failed = {test.id().partition(".")[2]: said for test, said in (*done.failures, *done.errors)}
print(json.dumps({"failed": failed, "run": done.testsRun}))
"""

UNIT = """
import json, sys
sys.path.append("/site")  # after what the image has
import pytest
class Seen:
    run, failed = 0, {}
    def pytest_runtest_logreport(self, report):
        self.run += report.when == "call"
        if report.failed:
            self.failed[report.nodeid.rpartition("unit/")[2]] = report.longreprtext
seen = Seen()
options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "/suite"]
pytest.main([*options, "/suite/test/pytorch/unit"], [seen])
print()
print(json.dumps({"failed": seen.failed, "run": seen.run}))
"""


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the suite."""
    source = Path(os.environ.get(SUITE) or ROOT / ".cache" / "peers" / "deep-learning-containers")
    if not source.is_dir():
        pytest.skip(f"NOT TESTED: {SUITE} names no git directory of {EXPECTED['source']}")
    folder = tmp_path_factory.mktemp("suite")
    words = (
        "git",
        "--git-dir",
        str(source),
        "archive",
        "--output",
        str(folder / "suite.tar"),
        EXPECTED["commit"],
    )
    subprocess.run((*words, "test/sanity/scripts", "test/pytorch"), check=True)
    with tarfile.open(folder / "suite.tar") as archive:
        archive.extractall(folder, filter="data")
    return folder


def failures(image: BuiltByCommand, suite: Path, device: str) -> dict[str, str]:
    """Return the tests of the suite that fail in an image, each with its message."""
    variables = {
        "EXPECTED_FRAMEWORK": "pytorch_runtime",
        "EXPECTED_DEVICE": device,
        "EXPECTED_CUSTOMER": "sagemaker",
    }
    words = ("env", *(f"{name}={value}" for name, value in variables.items()), "python3", "-c", RUN)
    done = image.engine.run(
        image.reference,
        Job(command=words, mounts=(Mount(source=suite, target="/suite"),), timeout=600),
    )
    assert done.status == 0, done.output
    document = json.loads(done.output.splitlines()[-1])
    assert document["run"] == 44
    failed: dict[str, str] = document["failed"]
    return failed


def test_the_cpu_image(docker_image: BuiltByCommand, suite: Path) -> None:
    failed = failures(docker_image, suite, "cpu")
    assert failed.keys() == EXPECTED["any"].keys(), failed


def test_the_cuda_image(cuda_image: BuiltByCommand, suite: Path) -> None:
    failed = failures(cuda_image, suite, "gpu")
    expected = EXPECTED["any"] | EXPECTED["cuda"]
    if cuda_image.reference.endswith("-tcp"):
        expected |= EXPECTED["tcp"]
    assert failed.keys() == expected.keys(), failed


def test_units_of_the_cuda_image(cuda_image: BuiltByCommand, suite: Path) -> None:
    if cuda_image.reference.endswith("-tcp"):
        pytest.skip("NOT TESTED: the image was built without NCCL's plugin and what belongs to it")
    site = Path(pytest.__file__).parent.parent
    done = cuda_image.engine.run(
        cuda_image.reference,
        Job(
            command=("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "python3", "-c", UNIT),
            mounts=(Mount(source=suite, target="/suite"), Mount(source=site, target="/site")),
            timeout=600,
        ),
    )
    document = json.loads(done.output.splitlines()[-1])
    assert document["run"] == 46
    has_deepspeed = (
        cuda_image.engine.run(
            cuda_image.reference, Job(command=("sh", "-c", "command -v deepspeed"))
        ).status
        == 0
    )
    expected = EXPECTED["unit"] | ({} if has_deepspeed else EXPECTED["unit-without-deepspeed"])
    assert document["failed"].keys() == expected.keys(), document
