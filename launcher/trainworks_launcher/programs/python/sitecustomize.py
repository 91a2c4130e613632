"""Hooks of the launcher in every Python of a job, without a change of the script: this file is on
PYTHONPATH.

TRAINWORKS_PYTHON_HOOKS lists the active hooks:

- ``stacks``: the process writes its stacks when the launcher asks, where there is no py-spy.
- ``exit``: the interpreter ends only when gloo's threads are idle. Such a thread drops the last
  collective's tensors after the collective has ended, and needs the interpreter for that. Without
  the interpreter, the process is aborted after the last line of its script ("terminate called
  without an active exception", pytorch issue 190489).
- ``end``: a line in the file ``ends`` of the job's runtime directory tells which exception ended
  the process, if one did, and the argument of ``sys.exit``. Each exception that ends a thread gets
  a line, too. ``supervise/outcome/records.py`` reads the file.
- ``leave``: one more line as soon as the program is left, before the wait for other threads and
  before any function at exit. A rank closes its connections there, and its starter may end the rank
  before its own end.
- ``world``: a process with another RANK and WORLD_SIZE than its rank in the plan was started by
  another starter, in the script: the first such process of a host prints a warning.
- ``ray``: an actor of Ray Train asks the dashboard every second whether its controller lives, and
  warns where there is none (Ray 2.60 has no setting for it): only its errors are logged.

Python imports the first ``sitecustomize`` on the path, so this file imports the next one.
"""

import os
import sys

TYPE_CHECKING = False  # no start of Python waits for typing
if TYPE_CHECKING:
    from typing import Any

_HOOKS = "TRAINWORKS_PYTHON_HOOKS"  # names.PYTHON_HOOKS_VARIABLE; this file imports nothing of ours
_LIMIT_SECONDS = 2.0
"""Limit of the wait for gloo's threads at the end."""

_LOOK_SECONDS = 0.01
"""Seconds between two looks at these threads."""

_SIGNAL = 50
"""The signal at which a process writes its stacks. As signals.SIGNAL, which this file does not
import.
"""

_SIGTERM = 15
"""As signal.SIGTERM: no start of Python waits for that module."""
_MOST_THREADS = 64
"""Limit of records for exceptions of threads in one process."""

_MOST_TEXT = 4096
"""Characters of a text given to ``sys.exit``, and of an exception's first, brief record."""

_OF_SIGTERM = ', "of_sigterm": true'

_GLOO_THREAD = "pt_gloo_runloop"


def _listen() -> None:
    """Let faulthandler write the stacks to a file in memory when _SIGNAL comes.

    The file stays open for as long as the process runs. Raises OSError or AttributeError where the
    kernel or Python has no such files.
    """
    import faulthandler

    # The same name as in hang/signals.py, which this file does not import.
    descriptor = os.memfd_create("trainworks-stacks")
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True)


def _wait_at_exit() -> None:
    """Wait for gloo's threads when the interpreter ends."""
    import atexit

    # The function that is registered first is called last.
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    """Wait, at most two seconds, until gloo's threads sleep and have not run between two samples.

    They may take the GIL meanwhile. Returns at once in a process without torch.distributed.
    """
    if "torch.distributed" not in sys.modules:
        return
    import select
    import time

    deadline = time.monotonic() + _LIMIT_SECONDS
    before = None
    while time.monotonic() < deadline:
        threads = _gloo_threads()
        if not threads:
            return
        select.select((), (), (), _LOOK_SECONDS)
        now = [_activity(thread) for thread in threads]
        if now == before and all(state == "S" for state, _ in now):
            return
        before = now


def _gloo_threads() -> "list[str]":
    """Return the ids of gloo's threads, in order.

    In a job on CPUs torch gives them no name: then these are all threads with the main thread's
    name that Python does not know. ``[]`` if CUDA is used: NCCL's threads are left alone.
    """
    names = {
        thread: _read(thread, "comm").strip()
        for thread in sorted(os.listdir("/proc/self/task"))  # noqa: PTH208
    }
    main = str(os.getpid())
    named = [thread for thread, name in names.items() if name == _GLOO_THREAD]
    if named or any(name.startswith("pt_") for thread, name in names.items() if thread != main):
        return named
    cuda = sys.modules.get("torch.cuda")
    if "RANK" not in os.environ or getattr(cuda, "_initialized", False):
        return []
    import threading

    pythons = {str(thread.native_id) for thread in threading.enumerate()}
    return [
        thread for thread, name in names.items() if name == names[main] and thread not in pythons
    ]


def _activity(thread: str) -> "tuple[str, tuple[str, ...]]":
    """Return a thread's state and its numbers of context switches. Source: proc(5), status.

    For example ``("S", ("12", "3"))``. A thread that has ended is like one that sleeps.
    """
    fields = dict(line.partition(":")[::2] for line in _read(thread, "status").splitlines())
    switches = tuple(value for name, value in fields.items() if name.endswith("switches"))
    return fields.get("State", "S").strip()[:1], switches


def _read(thread: str, name: str) -> str:
    """Return a file of a thread in proc(5); ``""`` if the thread has ended."""
    try:
        with open(f"/proc/self/task/{thread}/{name}", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            return opened.read()
    except OSError:
        return ""


def _note_the_end() -> None:
    """Note the end of this process in the file ``ends``: its exception, or its exit.

    Replaces the hooks for exceptions of the program and of threads, unless the program has its
    own, and ``sys.exit``. None of the functions below raises an error into the script.
    """
    import _thread
    import atexit
    import time

    # CPython sets this for an exception that ends the program, and for no other, also where the
    # program has replaced sys.excepthook.
    last = "last_exc" if sys.version_info >= (3, 12) else "last_value"
    file = os.environ["TRAINWORKS_RUNTIME_DIRECTORY"] + "/ends"  # names.RUNTIME_DIRECTORY_VARIABLE
    began, clock = time.monotonic(), time.monotonic
    noted = []
    compiled: list[Any] = []
    has_peers = "leave" in os.environ.get(_HOOKS, "").split()
    threads_noted: list[int] = []
    exits = _watch_exits()

    # Appends a line in one write, because other processes write to the file, too.
    def write(fields: str) -> None:
        opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fields = f'{{"pid": {os.getpid()}, "began": {began}, "at": {clock()}{fields}}}\n'
        os.write(opened, fields.encode())
        os.close(opened)

    # Notes an exception. thread: the thread that it ends; more: further fields of JSON.
    def note(error: "BaseException", thread: str = "", more: str = "") -> None:
        library = os.path.dirname(os.__file__)  # noqa: PTH120
        sys.path.insert(0, library)  # the user may have a module with the name of one of Python's
        try:
            noted.append(os.getpid())
            if type(error) is KeyboardInterrupt:
                # The import may call eval(), after which Python ends with 1, not 130.
                write(', "message": "KeyboardInterrupt"')
                return
            if not thread and _is_of_sigterm(_frames_of(error)):
                more += _OF_SIGTERM
            if has_peers and not thread:
                # The peers have missed this process already, and its starter may end the process
                # before more is noted.
                brief = _quoted(f"{_name_of(type(error))}: {error}"[:_MOST_TEXT])
                write(f', "message": {brief}, "brief": true{more}')
            if not compiled:
                namespace: dict[str, Any] = {}
                path = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/described.py"  # noqa: PTH100, PTH120
                with open(path, encoding="utf-8") as opened:  # noqa: PTH123
                    exec(compile(opened.read(), path, "exec"), namespace)  # noqa: S102
                compiled.append(namespace["describe_exception"])
            write(compiled[0](error, thread) + more)
        except BaseException:  # noqa: BLE001  (never in the way of the script)
            pass
        finally:
            sys.path.remove(library)

    def note_an_end(more: str = "") -> None:
        """Note an end without an exception: the argument of ``sys.exit``, or the program's end."""
        try:
            error = getattr(sys, last, None)
            if os.getpid() in noted:
                return
            if exits and exits[-1][0] == os.getpid():
                _, code, of_sigterm = exits[-1]
                more += _OF_SIGTERM if of_sigterm else ""
                if isinstance(code, str):
                    more += f', "exit": 1, "said": {_quoted(code[:_MOST_TEXT])}'
                else:
                    status = code & 0xFF if isinstance(code, int) else int(code is not None)
                    more += f', "exit": {status}'
            # The hook has noted every exception that ended the program. pytest, IPython and code
            # set the variable for exceptions that they handle. So the variable counts only where
            # the program has replaced this hook.
            elif isinstance(error, BaseException) and sys.excepthook is not excepthook:
                note(error, more=', "guessed": true')
                return
            write(more)
        except BaseException:  # noqa: BLE001
            pass

    def at_leaving() -> None:
        # A forked child of multiprocessing gets here, too.
        if os.getpid() == started:
            note_an_end(', "left": true')

    def excepthook(kind: "type[BaseException]", error: "BaseException", trace: "Any") -> None:
        if error is getattr(sys, last, None):
            # At once: the process may be killed before its end.
            note(error)
        shown(kind, error, trace)

    def of_thread(arguments: "_thread._ExceptHookArgs") -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            threads_noted.append(os.getpid())
            # A thread that pushes metrics may fail in each step.
            if len(threads_noted) > _MOST_THREADS:
                shown_of_thread(arguments)
                return
            # The process goes on: its own end is noted later all the same.
            noted_before = len(noted)
            note(arguments.exc_value, getattr(arguments.thread, "name", "") or "?")
            del noted[noted_before:]
        shown_of_thread(arguments)

    shown, shown_of_thread = sys.excepthook, _thread._excepthook  # noqa: SLF001
    if shown is sys.__excepthook__:
        sys.excepthook = sys.__excepthook__ = excepthook
    threading: Any = sys.modules.get("threading")
    if threading is None:
        _thread._excepthook = of_thread  # noqa: SLF001  (threading takes its own from there)
    elif threading.excepthook is threading.__excepthook__:
        threading.excepthook = threading.__excepthook__ = of_thread
    atexit.register(note_an_end)
    if has_peers:
        import threading as waited_for  # every rank imports this sooner or later

        started = os.getpid()
        register = getattr(waited_for, "_register_atexit", None)  # Python 3.9
        if register is not None:
            register(at_leaving)


def _name_of(kind: type) -> str:
    """Return the name of a type as Python prints it before a message: ``socket.timeout``."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _quoted(text: str) -> str:
    """Return a text as JSON.

    The json module takes time, and the process may have none left.
    """
    pieces = []
    for character in text:
        number = ord(character)
        # JSON writes a character above the first 65,536 as a surrogate pair: 0xD7C0 is 0xD800 less
        # the 0x10000 >> 10 that the pair leaves out.
        if number > 0xFFFF:
            pieces.append(f"\\u{0xD7C0 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}")
        elif character in '"\\' or not 31 < number < 127:
            pieces.append(f"\\u{number:04x}")
        else:
            pieces.append(character)
    return '"' + "".join(pieces) + '"'


def _frames_of(error: BaseException) -> "list[Any]":
    """Return the frames of an exception's traceback, outermost first."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _is_of_sigterm(frames: "list[Any]") -> bool:
    """Return whether one of these frames is the program's handler of SIGTERM."""
    import _signal  # type: ignore[import-not-found]

    handler: Any = _signal.getsignal(_SIGTERM)
    handler = getattr(handler, "func", handler)  # functools.partial
    code = getattr(handler, "__code__", None)  # a method has that of its function
    return code is not None and any(frame.f_code is code for frame in frames)


def _watch_exits() -> "list[tuple[int, object, bool]]":
    """Replace ``sys.exit``, and return a list for its last call.

    When that call has ended the program, the list gets (process id, argument, whether a handler of
    SIGTERM called it).

    Python calls no hook for SystemExit. But Python drops the exception before anything else when
    it has left the program: then no frame is left on the main thread. An exception that the program
    catches is dropped below one of its frames.
    """
    import _thread

    exits: list[tuple[int, object, bool]] = []
    main = _thread.get_ident()
    original = sys.exit

    # Lives in the exception, so that it is dropped with it.
    class Dropped:
        __slots__ = ("code", "of_sigterm")

        def __init__(self, code: object, frame: "Any") -> None:
            self.code = code
            frames = []
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
            self.of_sigterm = _is_of_sigterm(frames)

        def __del__(self) -> None:
            if _thread.get_ident() != main:
                return
            try:
                sys._getframe(1)  # noqa: SLF001
            except ValueError:  # no frame is left
                exits.append((os.getpid(), self.code, self.of_sigterm))

        def __reduce__(self) -> "tuple[Any, ...]":
            # An exception that is sent to another process has None in its place.
            return type(None), ()

    def leave(*arguments: object) -> None:
        try:
            original(*arguments)  # type: ignore[arg-type]
        except SystemExit as error:
            error.__dict__["_trainworks_dropped"] = Dropped(error.code, sys._getframe(1))  # noqa: SLF001
            raise

    leave.__module__, leave.__name__, leave.__qualname__, leave.__doc__ = (
        "sys",
        "exit",
        "exit",
        original.__doc__,
    )
    sys.exit = leave  # type: ignore[assignment]
    return exits


def _log_errors_only() -> None:
    """Silence the warnings of Ray Train's actor that asks the dashboard."""
    import logging

    logger = logging.getLogger(
        "ray.train.v2._internal.execution.controller.placement_group_cleaner"
    )
    logger.setLevel(logging.ERROR)


def _compare_the_world() -> None:
    """Print a warning if this process has another rank than the plan, once on each host.

    Raises FileExistsError if another process of the host has printed it, and KeyError outside of
    a rank.
    """
    planned = os.environ["TRAINWORKS_RANK"]  # names.PLACE_VARIABLE
    pairs = []
    # Every starter of torch sets LOCAL_RANK. RANK alone may be a scheduler's.
    if "LOCAL_RANK" in os.environ:
        pairs.append((os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")))
    pairs.append(
        (os.environ.get("OMPI_COMM_WORLD_RANK", ""), os.environ.get("OMPI_COMM_WORLD_SIZE", ""))
    )
    others = [pair for pair in pairs if all(pair) and "{} of {}".format(*pair) != planned]
    if not others:
        return
    rank, world = others[0]
    file = os.environ["TRAINWORKS_RUNTIME_DIRECTORY"] + "/other-world"
    # Only one process of a host can make the file.
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    sys.stderr.write(
        f"trainworks: warning: this process is rank {rank} of WORLD_SIZE={world}, and the job has"
        f" planned it as rank {planned}: the program has a starter of its own (torchrun, accelerate"
        " launch, ...), so each of its worlds trains alone; let the program be the script itself,"
        " or start it with train --mode none\n"
    )


def _import_the_next() -> None:
    """Import the next ``sitecustomize`` on the path, which this file hides.

    Raises the errors of that file, as Python would without this one.
    """
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    search_path = sys.path[:]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]  # noqa: PTH100
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this
    finally:
        sys.path[:] = search_path


for _name, _hook in (
    ("stacks", _listen),
    ("exit", _wait_at_exit),
    ("end", _note_the_end),
    ("ray", _log_errors_only),
    ("world", _compare_the_world),
):
    if _name in os.environ.get(_HOOKS, "").split():
        try:  # noqa: SIM105  (contextlib takes time, and this is part of every start of Python)
            _hook()
        except (OSError, AttributeError, ValueError, ImportError, RuntimeError, KeyError):
            pass
_import_the_next()
