"""Thirty-nine ends as the tools of training jobs print them: real processes
that end so, under the real launcher.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_launcher_cause import IMPORTS, assert_cause, run

DIES = "raise ValueError('loss is nan')\n"


def dies(after: str = "", before: str = "", death: str = DIES) -> str:
    """Return a script that dies, with its libraries' output to the standard error before and after
    that.
    """
    return (
        f"{IMPORTS}os.write(2, {before.encode()!r})\n"
        f"atexit.register(os.write, 2, {after.encode()!r})\n"
        f"{death}"
    )


def raises(name: str, text: str) -> str:
    """A script that dies of an exception of a library."""
    module, _, kind = name.rpartition(".")
    return f"raise type({kind!r}, (Exception,), {{'__module__': {module!r}}})({text!r})"


def lines(*texts: str, count: int = 1) -> str:
    return "".join(f"{text.format(n=number)}\n" for number in range(count) for text in texts)


HANDLED = "try: open('/no/such/cache')\nexcept OSError: traceback.print_exc()\n"
IN_A_CHILD = (
    f"subprocess.run((sys.executable, '-c', {DIES!r}), env={{**os.environ, 'RANK':"
    " '1'})\nos.write(2, b\"[2026-11-26 10:00:00,124] [ERROR] [launch.py:325:sigkill_handler]"
    " ['/opt/python', 'train.py', \"\n    b\"'--local_rank=1'] exits with return code ="
    ' 1\\n")\nsys.exit(1)'
)
BAR = "\r 33%|###2      | 1/3 [00:00<00:01,  1.9it/s]"
CUDA = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call,"
    " so the stacktrace below might be incorrect.\n"
)
ABORTS = (
    "terminate called after throwing an instance of 'c10::Error'\n  what():  "
    + CUDA
    + "frame #0: c10::Error::Error"
)
ABSL = (
    "F1126 10:00:00.1 1234 rendezvous.cc:123] Check failed: status.ok() INTERNAL: no peer\n"
    "*** Check failure stack"
)
MPI_ABORT = lines(
    "-" * 74,
    "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD",
    "  Errorcode: 1",
    "-" * 74,
)
NAN, NONE = "ValueError: loss is nan", ""
THREAD = (
    "t = threading.Thread(target=open, args=('/no/such/x',)); t.start(); t.join()\n"
    "sys.exit('configuration error: lr must be positive')"
)
ARGPARSE = (
    "import argparse\n"
    "p = argparse.ArgumentParser()\n"
    "p.add_argument('--lr', required=True)\n"
    "p.parse_args()"
)
IGNORED = (
    "class Iterator:\n    def __del__(self): assert False, 'can only test a child process'\n"
    "kept = [Iterator() for _ in range(4)]\n"
)
RAY = '\x1b[36mray::f()\x1b[39m (pid=12)\n  File "train.py", line 2, in f\nValueError: bad shard 7'

ENDS = {
    "plain": (DIES, NAN),
    "wandb new": (
        dies(
            lines("wandb: ", "wandb: View run at: https://x/runs/x", "wandb: Find logs at: wandb/x")
        ),
        NAN,
    ),
    "wandb summary": (
        dies(lines("wandb: Waiting for W&B process to finish... (failed 1).", "wandb: loss 0.1")),
        NAN,
    ),
    "comet": (dies(lines("COMET INFO: ---", "COMET INFO:   Metrics {n}", count=9)), NAN),
    "comet warnings": (
        dies("COMET WARNING: you will need to call `experiment.end()`\nCOMET INFO: Uploading\n"),
        NAN,
    ),
    "clearml": (
        dies(
            "2026-11-26 10:00:00,100 - clearml.Task -"
            " WARNING - ### TASK STOPPED - USER ABORTED ###\n"
        ),
        NAN,
    ),
    "glog": (
        dies(lines("I1126 10:00:0{n}.1  1234 client.cc:{n}] shutting down channel {n}", count=9)),
        NAN,
    ),
    "tensorflow": (
        dies(lines("2026-11-26 10:00:0{n}.1: W op.cc:108] Error occurred: CANCELLED", count=3)),
        NAN,
    ),
    "jax": (
        dies(lines("I0000 00:00:17.1 1234 service.cc:145] XLA service destroyed {n}", count=3)),
        NAN,
    ),
    "absl fatal": (dies(before=ABSL, death="os.abort()"), "killed by SIGABRT"),
    "torch destroy warning": (
        dies("[rank0]:[W1126 10:00:00.1] Warning: destroy_process_group() was not called\n"),
        NAN,
    ),
    "semaphores": (
        dies(
            "resource_tracker.py:224: UserWarning: 6 leaked semaphores\n"
            "  warnings.warn('resource')\n"
        ),
        NAN,
    ),
    "lightning bar": (
        dies(before="Epoch 3:  50%|#####     | 5/10 [00:01<00:01,  4.5it/s, v_num=0]"),
        NAN,
    ),
    "hf bar": (dies(f"{BAR}\n", BAR), NAN),
    "two bars": (dies("\rDownloading: 10%|# | 1/10\rDownloading: 20%|## | 2/10\r"), NAN),
    "handled then exit text": (
        IMPORTS + HANDLED + "sys.exit('no token budget left')",
        "no token budget left",
    ),
    "handled, info, exit text": (
        IMPORTS
        + HANDLED
        + "logging.warning('going on')\nsys.exit('error: the validation set is empty')",
        "the validation set is empty",
    ),
    "exception in thread, main ok": (IMPORTS + THREAD, "lr must be positive"),
    "argparse": (ARGPARSE, "the following arguments are required"),
    "assert cuda": (
        IMPORTS + f"atexit.register(os.abort)\nos.write(2, {ABORTS.encode()!r})\nraise"
        f" RuntimeError({CUDA!r})",
        "illegal memory access",
    ),
    "keyboard": ("raise KeyboardInterrupt", "SIGINT"),
    "deepspeed": (IMPORTS + IN_A_CHILD, NAN),
    "ray": (raises("ray.exceptions.RayTaskError(ValueError)", RAY), "bad shard 7"),
    "xgboost": (
        raises(
            "xgboost.core.XGBoostError",
            "[10:00:00] data.cc:507: Check failed: Label contains NaN\nStack trace:\n [bt]",
        ),
        "Label contains NaN",
    ),
    "pytest stdout": ("print('==== 1 failed in 0.06s ====')\nraise SystemExit(1)", "exit status 1"),
    "assertion no text": ("assert False", "AssertionError"),
    "multi-line msg": (
        raises(
            "pydantic_core.ValidationError",
            "2 validation errors for Config\nlr\n  Input should be a valid number",
        ),
        "2 validation errors for Config",
    ),
    "jsonschema": (
        raises(
            "jsonschema.ValidationError",
            "'x' is not of type 'number'\n\nFailed validating 'type':\n    {}",
        ),
        "'x' is not of type 'number'",
    ),
    "exception in except": (
        (
            "try: raise ValueError('bad config')\n"
            "except ValueError: raise RuntimeError('cannot start')"
        ),
        "RuntimeError: cannot start",
    ),
    "bus": ("import os, signal\nos.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS"),
    "mpi abort": (dies(MPI_ABORT), NAN),
    "horovod": (
        dies(
            "[2026-11-26 10:00:00.1: E operations.cc:697] [1]: Horovod background loop uncaught\n"
        ),
        NAN,
    ),
    "sentencepiece": (
        "raise OSError('Not found: \"x\": No such file or directory Error #2')",
        "Not found",
    ),
    "onnx warn": (
        IMPORTS
        + HANDLED.replace("traceback.print_exc()", "warnings.warn(traceback.format_exc())")
        + "sys.exit(3)",
        "exit status 3",
    ),
    "vllm after": (
        dies(
            lines("(EngineCore_0 pid=77) INFO 11-26 10:00:0{n} [core.py:10] shutting down", count=3)
        ),
        NAN,
    ),
    "dataloader": (IMPORTS + IGNORED + DIES, NAN),
    "grpc": (
        dies(
            lines("E1126 10:00:0{n}.1  {n}7 server.cc:1045] UNKNOWN: No address added {n}", count=4)
        ),
        NAN,
    ),
    "s3 retry logs": (dies(lines("WARNING:botocore.credentials:refresh failed {n}", count=3)), NAN),
    "tensorboard": (dies("2026-11-26 10:00:00.1: I external/local_xla/xla/util.cc:1] a\n"), NAN),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_cause_is_what_ended_the_process(tmp_path: Path, name: str) -> None:
    assert len(ENDS) == 39
    script, words = ENDS[name]
    assert_cause(run(tmp_path, script), words)
