"""What the launcher adds to every Python of a job, without a change of the
script: it is on PYTHONPATH.

TRAINWORKS_PYTHON_HOOKS says what:

- ``stacks``: the process writes its stacks when the launcher asks, where there is no py-spy.
- ``exit``: the interpreter ends only when gloo's threads are idle. Such a thread drops the last
  collective's tensors after the collective has ended, and needs the interpreter for that. If that
  has gone, the process is aborted after the last line of its script ("terminate called without an
  active exception", pytorch issue 190489).
- ``end``: a line in the file ``ends`` of the job's runtime directory says which exception ended the
  process, or that none did, and what ``sys.exit`` was told; and one for each exception that ended a
  thread. ``supervise/outcome/records.py`` reads it.
- ``leave``: one more line as soon as the program is left, before other threads are waited for and
  before any function at exit. A rank closes its connections there, and its starter may end it
  before it has ended itself.
- ``world``: a process whose RANK and WORLD_SIZE are not those of its rank in the plan was started
  by another starter, in the script: the first one of a host says it.
- ``ray``: an actor of Ray Train asks the dashboard every second whether its controller lives, and
  warns where there is none (Ray 2.60 has no setting for it): only its errors are logged.

Python imports the first ``sitecustomize`` that it finds, so the next one on the
path is imported here.
"""

import os
import sys

TYPE_CHECKING = False  # no start of Python waits for typing
if TYPE_CHECKING:
    from typing import Any

_HOOKS = "TRAINWORKS_PYTHON_HOOKS"  # names.PYTHON_HOOKS_VARIABLE; this file imports nothing of ours
_LIMIT_SECONDS = 2.0
_LOOK_SECONDS = 0.01
_MOST_THREADS = 64
"""Exceptions of threads that are noted of one process."""

_MOST_TEXT = 4096
"""Characters of a text that ``sys.exit`` was told, and of an exception's first, brief record."""

_OF_SIGTERM = ', "of_sigterm": true'

_GLOO_THREAD = "pt_gloo_runloop"


def _listen() -> None:
    import faulthandler

    # hang/signals.py has the same name and number; this file imports nothing of ours
    descriptor = os.memfd_create("trainworks-stacks")
    faulthandler.register(50, file=descriptor, all_threads=True)


def _wait_at_exit() -> None:
    import atexit

    atexit.register(_wait_for_gloo)  # the first to be registered is the last to be called


def _wait_for_gloo() -> None:
    """Wait, bounded, until gloo's threads sleep and have not run between two looks.

    They may take the GIL meanwhile.
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
    """Return the thread ids, in order.

    Those without a name in a job on CPUs, where torch gives gloo's none.
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
    """Return a thread's state and how often it was switched; source: proc(5), status."""
    fields = dict(line.partition(":")[::2] for line in _read(thread, "status").splitlines())
    return fields.get("State", "S").strip()[:1], tuple(
        fields[name] for name in fields if name.endswith("switches")
    )


def _read(thread: str, name: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/{name}", encoding="ascii", errors="replace") as opened:  # noqa: PTH123
            return opened.read()
    except OSError:
        return ""  # the thread has ended


def _note_the_end() -> None:
    import _thread
    import atexit
    import time

    # CPython sets it for an exception that ends the program, and for no other;
    # whoever has replaced sys.excepthook.
    last = "last_exc" if sys.version_info >= (3, 12) else "last_value"
    file = os.environ["TRAINWORKS_RUNTIME_DIRECTORY"] + "/ends"  # names.RUNTIME_DIRECTORY_VARIABLE
    began, clock = time.monotonic(), time.monotonic
    noted = []
    compiled: list[Any] = []
    has_peers = "leave" in os.environ.get(_HOOKS, "").split()
    threads_noted: list[int] = []
    told_to_exit = _watch_exits()

    def write(fields: str) -> None:
        opened = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(
            opened,
            f'{{"pid": {os.getpid()}, "began": {began}, "at": {clock()}{fields}}}\n'.encode(),
        )
        os.close(opened)

    def note(error: "BaseException", thread: str = "", more: str = "") -> None:
        library = os.path.dirname(os.__file__)  # noqa: PTH120
        sys.path.insert(0, library)  # a module of the user's may have the name of one of Python's
        try:
            noted.append(os.getpid())
            if (
                type(error) is KeyboardInterrupt
            ):  # what is imported may eval(), after which Python ends with 1, not 130
                write(', "message": "KeyboardInterrupt"')
                return
            if not thread and _is_of_sigterm(_frames_of(error)):
                more += _OF_SIGTERM
            if (
                has_peers and not thread
            ):  # they have missed it already, and its starter may end it before more is noted
                write(
                    f', "message": {_quoted(f"{type(error).__name__}: {error}"[:_MOST_TEXT])},'
                    f' "brief": true{more}'
                )
            if not compiled:
                found: dict[str, Any] = {}
                path = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/described.py"  # noqa: PTH100, PTH120
                with open(path, encoding="utf-8") as opened:  # noqa: PTH123
                    exec(compile(opened.read(), path, "exec"), found)  # noqa: S102
                compiled.append(found["described"])
            write(compiled[0](error, thread) + more)
        except BaseException:  # noqa: BLE001  (never in the way of the script)
            pass
        finally:
            sys.path.remove(library)

    def note_an_end(more: str = "") -> None:
        """No exception has come to the hook: note what ``sys.exit`` was told,
        or that the program came to its end.
        """
        try:
            error = getattr(sys, last, None)
            if os.getpid() in noted:
                return
            if told_to_exit and told_to_exit[-1][0] == os.getpid():
                _, code, of_sigterm = told_to_exit[-1]
                more += _OF_SIGTERM if of_sigterm else ""
                if isinstance(code, str):
                    more += f', "exit": 1, "said": {_quoted(code[:_MOST_TEXT])}'
                else:
                    status = code & 0xFF if isinstance(code, int) else int(code is not None)
                    more += f', "exit": {status}'
            # The hook has seen every exception that ended the program. pytest, IPython and code set
            # the variable for those that they handle; it counts only where the program has put
            # another hook in the place of this one.
            elif isinstance(error, BaseException) and sys.excepthook is not excepthook:
                note(error, more=', "guessed": true')
                return
            write(more)
        except BaseException:  # noqa: BLE001
            pass

    def at_leaving() -> None:
        if os.getpid() == started:  # a forked child of multiprocessing comes here too
            note_an_end(', "left": true')

    def excepthook(kind: "type[BaseException]", error: "BaseException", trace: "Any") -> None:
        if error is getattr(sys, last, None):
            note(error)  # now: who is dying may be killed before it ends
        shown(kind, error, trace)

    def of_thread(given: "_thread._ExceptHookArgs") -> None:
        if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
            threads_noted.append(os.getpid())
            if len(threads_noted) > _MOST_THREADS:  # a pusher of metrics may fail in each step
                shown_of_thread(given)
                return
            threads = len(noted)
            note(given.exc_value, getattr(given.thread, "name", "") or "?")
            del noted[threads:]
        shown_of_thread(given)

    shown, shown_of_thread = sys.excepthook, _thread._excepthook  # noqa: SLF001
    if shown is sys.__excepthook__:
        sys.excepthook = sys.__excepthook__ = excepthook
    threading: Any = sys.modules.get("threading")
    if threading is None:
        _thread._excepthook = of_thread  # noqa: SLF001  (it takes its own from there)
    elif threading.excepthook is threading.__excepthook__:
        threading.excepthook = threading.__excepthook__ = of_thread
    atexit.register(note_an_end)
    if has_peers:
        import threading as waited_for  # every rank imports it sooner or later

        started = os.getpid()
        register = getattr(waited_for, "_register_atexit", None)  # Python 3.9
        if register is not None:
            register(at_leaving)


def _quoted(text: str) -> str:
    """Return a text as JSON has it.

    The module for that takes time, and the process may have none left.
    """
    found = []
    for character in text:
        number = ord(character)
        if number > 0xFFFF:
            found.append(f"\\u{0xD7C0 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}")
        elif character in '"\\' or not 31 < number < 127:
            found.append(f"\\u{number:04x}")
        else:
            found.append(character)
    return '"' + "".join(found) + '"'


def _frames_of(error: BaseException) -> "list[Any]":
    """Return the frames that an exception has left."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found


def _is_of_sigterm(frames: "list[Any]") -> bool:
    """Return whether one of these frames is that of the program's handler of SIGTERM."""
    import _signal  # type: ignore[import-not-found]

    handler: Any = _signal.getsignal(15)
    handler = getattr(handler, "func", handler)  # functools.partial
    code = getattr(handler, "__code__", None)  # a method has that of its function
    return code is not None and any(frame.f_code is code for frame in frames)


def _watch_exits() -> "list[tuple[int, object, bool]]":
    """Return a list that will have what ``sys.exit`` was told, and whether by a handler of SIGTERM,
    once that has ended the program.

    Python calls no hook for SystemExit. But it drops the exception before anything else when that
    has left the program: then no frame is left on the main thread. An exception that the program
    catches is dropped below one of its frames.
    """
    import _thread

    found: list[tuple[int, object, bool]] = []
    main = _thread.get_ident()
    original = sys.exit

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
                found.append((os.getpid(), self.code, self.of_sigterm))

        def __reduce__(self) -> "tuple[Any, ...]":
            # Who sends the exception to another process sends None in its place.
            return type(None), ()

    def leave(*given: object) -> None:
        try:
            original(*given)  # type: ignore[arg-type]
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
    return found


def _log_errors_only() -> None:
    import logging

    logger = logging.getLogger(
        "ray.train.v2._internal.execution.controller.placement_group_cleaner"
    )
    logger.setLevel(logging.ERROR)


def _compare_the_world() -> None:
    planned = os.environ["TRAINWORKS_RANK"]  # names.PLACE_VARIABLE
    found = []
    if "LOCAL_RANK" in os.environ:  # as every starter of torch sets it
        found.append((os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")))
    found.append(
        (os.environ.get("OMPI_COMM_WORLD_RANK", ""), os.environ.get("OMPI_COMM_WORLD_SIZE", ""))
    )
    others = [pair for pair in found if all(pair) and "{} of {}".format(*pair) != planned]
    if not others:
        return
    rank, world = others[0]
    file = os.environ["TRAINWORKS_RUNTIME_DIRECTORY"] + "/other-world"
    # Once on each host.
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    sys.stderr.write(
        f"trainworks: warning: this process is rank {rank} of WORLD_SIZE={world}, and the job has"
        f" planned it as rank {planned}: the program has a starter of its own (torchrun, accelerate"
        " launch, ...), so each of its worlds trains alone; let the program be the script itself,"
        " or start it with train --mode none\n"
    )


def _import_the_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    kept = sys.path[:]
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
        sys.path[:] = kept


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
