"""Runs torchrun with a Python beside each rank that has imported already, and takes over when the rank starts again.

Run as ``PYTHON standby.py MODULES SECONDS TORCHRUN [ARGUMENT...]``: the user's Python; modules with commas between; how
long after a rank's start its standby imports; torchrun and its words.

When torchrun has started a rank, a second process with the same command line and environment is started, a child of
torchrun too. Its Python stops in ``sitecustomize``, before the script's first line (``stand_by``). When torchrun is to
start the rank again, that process gets the new environment, reports to the launcher as ``rank.py`` does, and goes on
into the script. So it is a child like any other: its process id, signals and exit status are its own. Where none is
ready, torchrun starts the rank as it always does.

A standby ends with torchrun: the other end of its socket is closed then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from typing import IO, TYPE_CHECKING, Any, Callable, Collection, Mapping, NamedTuple, Sequence

if TYPE_CHECKING:
    from subprocess import Popen

_CHANNEL = "TRAINWORKS_STANDBY_CHANNEL"  # names.STANDBY_CHANNEL_VARIABLE; this file imports nothing of ours
_RUNTIME_DIRECTORY = "TRAINWORKS_RUNTIME_DIRECTORY"  # names.RUNTIME_DIRECTORY_VARIABLE
_PROGRAMS = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
_RANK = os.path.join(_PROGRAMS, "rank.py")  # noqa: PTH118
_SEND_SECONDS = 10.0
_END_SECONDS = 2.0
_LENGTH_BYTES = 8
_FIRST_LINE = 256
_OF_TORCHRUN = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_")
"""Beginnings of variables that torchrun sets for each start of a rank: nothing reads them while it is imported."""

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Blocked during the imports: a thread that is started then inherits that. The main thread alone gets such a signal,
and a script may block it and wait for it in a thread of its own, as if it had imported afterwards."""


# ------------------------------------------------------------------------------------------------- beside the ranks
class _Waiting(NamedTuple):
    """A standby. words: its command line. lasting: its environment, without what torchrun sets for each start."""

    process: Popen[bytes]
    channel: socket.socket
    words: Sequence[str]
    lasting: Mapping[str, str]


class Standbys:
    """Those of one host, by local rank."""

    def __init__(self, modules: str, seconds: float) -> None:
        """None is started yet. modules: with commas between. seconds: from a start until the import."""
        self._told = f"{seconds:g} {modules}"
        self._waiting: dict[str, _Waiting] = {}
        self._refused = False

    def start(self, plainly: Callable[[], Popen[bytes]], args: Sequence[str], env: Mapping[str, str]) -> Popen[bytes]:
        """Return the process of a rank: a standby, or one that is started ``plainly``; and start its next standby."""
        words, env = _program(args), {**os.environ, **env}
        if words is None:
            if not self._refused:
                _log(f"no rank has a standby Python: {sys.executable} does not run its script or module")
            self._refused = True
            return plainly()
        place = env.get("LOCAL_RANK", "0")
        waiting = self._waiting.pop(place, None)
        if waiting is None:
            process = plainly()
        else:
            try:
                process = _take(waiting, words, env)
            except (OSError, ValueError) as error:
                _end((waiting,))
                _log(f"local rank {place} starts without its standby Python: {error}")
                process = plainly()
        if int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")):
            try:
                self._waiting[place] = self._begin(process.pid, words, env)
            except (OSError, ValueError) as error:
                _log(f"local rank {place} has no standby Python: {error}")
        return process

    def _begin(self, rank: int, words: Sequence[str], env: Mapping[str, str]) -> _Waiting:
        """Start a standby in the way in which the process of the rank was started. Raises OSError if that fails."""
        from subprocess import Popen

        own = os.getpgid(rank) == rank  # an older torch leaves ranks in torchrun's own session
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            told = {**env, _CHANNEL: f"{number} {self._told}"}
            try:
                process = Popen(tuple(words), env=told, pass_fds=(number,), start_new_session=own)
            except OSError:
                ours.close()
                raise
        return _Waiting(process, ours, words, _lasting(env))

    def end(self) -> None:
        """End all: no rank starts any more."""
        _end(self._waiting.values())


def _take(waiting: _Waiting, words: Sequence[str], env: Mapping[str, str]) -> Popen[bytes]:
    """Let a standby go on as the rank; its process. Raises OSError if it cannot, ValueError if it must not."""
    if words != waiting.words or _lasting(env) != waiting.lasting:
        raise ValueError("its command line or environment has changed")
    channel = waiting.channel
    channel.setblocking(False)
    try:
        ready = channel.recv(1)
    except BlockingIOError:
        raise ValueError("it has not imported yet") from None
    if not ready or waiting.process.poll() is not None:
        raise ValueError("it has ended")
    channel.settimeout(_SEND_SECONDS)
    message = json.dumps(dict(env)).encode()
    channel.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    channel.close()
    return waiting.process


def _end(those: Collection[_Waiting]) -> None:
    """End standbys, and wait, bounded: one may hang in the kernel."""
    from subprocess import TimeoutExpired

    for waiting in those:
        waiting.channel.close()
        waiting.process.kill()
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(TimeoutExpired):
        for waiting in those:
            waiting.process.wait(max(0.0, deadline - time.monotonic()))


def _lasting(env: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_OF_TORCHRUN)}


def _program(args: Sequence[str]) -> tuple[str, ...] | None:
    """Return how a rank's own program starts: without ``PYTHON -I rank.py --``, with what torchrun put in front of it.

    None if that program is not a script or a module of this Python: it would not wait.
    """
    if _RANK not in args:
        return None
    place = tuple(args).index(_RANK)
    before, program = tuple(args[: place - 2]), tuple(args[place + 2 :])
    starts = len(program) > 1 and program[0] == sys.executable and (program[1] == "-m" or program[1][:1] != "-")
    return (*before, *program) if starts and args[place - 1 : place + 2 : 2] == ("-I", "--") else None


def main(arguments: list[str]) -> None:
    """Be torchrun, with standbys where that can be."""
    modules, seconds, *words = arguments
    if sys.path and os.path.abspath(sys.path[0]) == _PROGRAMS:  # noqa: PTH100
        sys.path[0] = os.path.dirname(words[0])  # noqa: PTH120
    why = _why_not(words[0])
    if why:
        _log(f"there is no standby Python: {why}")
        os.execv(words[0], words)
    standbys = Standbys(modules, float(seconds))
    try:
        _watch_starts(standbys)
        sys.argv = words
        import runpy

        runpy.run_path(words[0], run_name="__main__")
    finally:
        standbys.end()


def _why_not(torchrun: str) -> str:
    """Return why ranks have no standby here; "" if they can have one."""
    if not getattr(sys, "trainworks_standby", False):
        return "Python does not read the launcher's sitecustomize"
    with open(torchrun, "rb") as opened:  # noqa: PTH123
        first = os.fsdecode(opened.readline(_FIRST_LINE)).strip()
    python, own = first[2:].strip(), sys.executable
    if first[:2] != "#!" or not os.path.exists(python):  # noqa: PTH110
        return f"{torchrun} is not a script of {own}"
    places = {(os.path.realpath(path), os.path.realpath(os.path.dirname(path))) for path in (python, own)}  # noqa: PTH120
    return "" if len(places) == 1 else f"torchrun runs with {python}, and the script with {own}"


def _watch_starts(standbys: Standbys) -> None:
    """Have torchrun start its ranks by way of the standbys."""
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    handler = getattr(api, "SubprocessHandler", None)
    plainly = getattr(handler, "_popen", None)
    if handler is None or plainly is None:
        _log("there is no standby Python: this torch starts ranks in another way than those known")
        return

    def start(self: Any, args: Sequence[str], env: Mapping[str, str]) -> Popen[bytes]:
        return standbys.start(lambda: plainly(self, args, env), args, env)

    handler._popen = start  # noqa: SLF001


def _log(line: str) -> None:
    sys.stderr.write(f"trainworks: {line}\n")
    sys.stderr.flush()


# --------------------------------------------------------------------------------------------------- in the standby
def stand_by(told: str) -> None:
    """Import, wait for the rank that this process takes over, and become it; ends the process if there is none.

    told: descriptor of the channel, seconds until the import, modules.
    """
    number, seconds, modules = told.split(" ", 2)
    channel = socket.socket(fileno=int(number))
    channel.set_inheritable(False)
    out = (os.dup(1), os.dup(2))
    printed = tuple(os.memfd_create("trainworks-standby") for _ in out)
    for descriptor, held in enumerate(printed, 1):
        os.dup2(held, descriptor)  # what the imports print belongs to the rank
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    adjusted = _first_to_be_killed()
    if select.select((channel,), (), (), float(seconds))[0]:
        os._exit(0)
    began = time.monotonic()
    try:
        imported = ", ".join(filter(_import, modules.split(",")))
    except BaseException as error:  # noqa: BLE001
        os.write(out[1], f"trainworks: a standby Python cannot import {modules}: {error!r}\n".encode())
        os._exit(1)
    seconds_taken = time.monotonic() - began
    try:
        channel.sendall(b"1")
    except OSError:
        os._exit(0)
    if os.environ.get("LOCAL_RANK") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        line = f"a Python that stands by has imported {imported or 'nothing'} in {seconds_taken:.1f} s{_memory()}"
        os.write(out[1], f"trainworks: {line}; each rank has one\n".encode())
    environment = _wait(channel)
    if adjusted is not None:
        _write_score(adjusted)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, former in enumerate(out, 1):
        os.dup2(former, descriptor)
        os.close(former)
    _report()
    for descriptor, held in enumerate(printed, 1):
        os.lseek(held, 0, os.SEEK_SET)
        with open(held, "rb") as opened:  # noqa: PTH123
            _write_all(descriptor, opened.read())
    signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def _import(module: str) -> bool:
    """Import a module; whether it is there. Raises what the module raises."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return False
    return True


def _wait(channel: socket.socket) -> dict[str, str]:
    """Return the environment of the rank that this process takes over; ends the process if there is none."""
    with channel, channel.makefile("rb") as incoming:
        size = _read(incoming, _LENGTH_BYTES)
        found: dict[str, str] = json.loads(_read(incoming, int.from_bytes(size, "big")))
    return found


def _read(incoming: IO[bytes], count: int) -> bytes:
    data = incoming.read(count)
    if len(data) < count:
        os._exit(0)  # torchrun has ended, or starts the rank without this process
    return data


def _report() -> None:
    """Do what rank.py does before it becomes the program."""
    spec = spec_from_file_location("trainworks_rank", _RANK)
    assert spec is not None
    assert spec.loader is not None
    rank: Any = module_from_spec(spec)
    spec.loader.exec_module(rank)
    path, modules = sys.path[:], set(sys.modules)
    directory = os.environ.get(_RUNTIME_DIRECTORY, "")
    if directory:
        rank.attach(directory)
    os.environ.update(rank.restarted())
    sys.path[:] = path
    for name in set(sys.modules) - modules:  # the script's Python has none of our modules
        if name.partition(".")[0] == "trainworks_launcher":
            del sys.modules[name]


def _first_to_be_killed() -> str | None:
    """Ask the kernel to take this process first where memory runs out; what its score was, None if it does not say."""
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as opened:  # noqa: PTH123
            before = opened.read()
    except OSError:
        return None
    return before if _write_score("1000") else None


def _write_score(score: str) -> bool:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as opened:  # noqa: PTH123
            opened.write(score)
    except OSError:
        return False
    return True


def _memory() -> str:
    """Return what this process takes of memory that no other has, in words; "" where the kernel does not say."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as opened:  # noqa: PTH123
            (kilobytes,) = (line.split()[1] for line in opened if line.startswith("Anonymous:"))
    except (OSError, ValueError):
        return ""
    return f" and takes {int(kilobytes) * 1024 / 1e6:.0f} MB"


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(sys.argv[1:])
