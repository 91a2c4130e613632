"""Programs that are linked with CUDA by name, as for NVIDIA's and AWS's images,
in two containers of a job.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image.jobs import run_on_hosts
from image.support import BuiltByCommand, given_image

pytestmark = pytest.mark.engine

NVCC_IMAGE = "TRAINWORKS_TEST_NVCC_IMAGE"
"""Variable: an image of Docker that has nvcc, such as one of ``build.py --cuda
cu130 --with nvcc``.
"""

PROGRAM = """
#include <cstdio>
#if __has_include(<crt/host_defines.h>)
#include <cublas_v2.h>
#include <cuda_runtime.h>
#else  // CUDA 12 has it in the wheel of nvcc, which is not in the image
#define MAJOR_VERSION 0
#define cublasHandle_t void *
#define cublasCreate cublasCreate_v2
extern "C" {
int cudaGetDeviceCount(int *), cublasGetProperty(int, int *), cublasCreate(void **);
const char *cudaGetErrorName(int);
}
#endif
#ifdef __CUDACC__
__global__ void twice(float *values) { values[threadIdx.x] *= 2; }
#endif
int main() {
    int devices = 0, cublas = 0;
    cublasGetProperty(MAJOR_VERSION, &cublas);
    cublasHandle_t handle;
    const char *error = cudaGetErrorName(cudaGetDeviceCount(&devices));
    int created = (int) cublasCreate(&handle);
    std::printf("%s: cublas %d, %s, cublasCreate %d\\n", WHO, cublas, error, created);
    return devices;
}
"""

SCRIPT = """#!/bin/sh
set -eu
cp program.cu /tmp/ && cd /tmp
g++ -x c++ -DWHO='"g++"' -I/usr/local/cuda/include program.cu \\
    -L/usr/local/cuda/lib64 -lcudart -lcublas -o plain
./plain
if [ -e /usr/local/cuda/bin/nvcc ]; then
    nvcc -arch=sm_80 -DWHO='"nvcc"' program.cu -lcudart -lcublas -o kernel
    ./kernel
fi
"""


def run(reference: str, network: Any, folder: Path) -> str:
    """Compile and run the program on two hosts of a job."""
    hosts = ("algo-1", "algo-2")
    folders = {}
    for host in hosts:
        folders[host] = folder / host
        config = folders[host] / "input/config"
        for new_folder in (config, folders[host] / "code", folders[host] / "output"):
            new_folder.mkdir(parents=True)
        (folders[host] / "code/program.cu").write_text(PROGRAM, encoding="utf-8")
        (folders[host] / "code/run.sh").write_text(SCRIPT, encoding="utf-8")
        (config / "hyperparameters.json").write_text(
            json.dumps({"sagemaker_program": "run.sh"}), encoding="utf-8"
        )
        resource_config = {"current_host": host, "hosts": hosts}
        (config / "resourceconfig.json").write_text(json.dumps(resource_config), encoding="utf-8")
    return run_on_hosts(reference, network, folders)


def expected_line(who: str, cublas: int) -> str:
    """Return the line of a program on a machine without a GPU's driver: cuBLAS is there, and cannot
    be initialized.
    """
    return f"{who}: cublas {cublas}, cudaErrorInsufficientDriver, cublasCreate 1\n"


def test_a_program_links_with_cuda_by_name(
    cuda_image: BuiltByCommand, network: Any, tmp_path: Path
) -> None:
    assert run(cuda_image.reference, network, tmp_path).count(expected_line("g++", 12)) == 2


def test_nvcc_compiles_and_links_with_cuda_by_name(network: Any, tmp_path: Path) -> None:
    image = given_image(NVCC_IMAGE)
    if image is None:
        pytest.skip(
            f"NOT TESTED: {NVCC_IMAGE} names no image with nvcc (build.py --cuda cu130 --with nvcc)"
        )
    result = run(image.reference, network, tmp_path)
    assert [result.count(expected_line(who, 13)) for who in ("g++", "nvcc")] == [2, 2], result
