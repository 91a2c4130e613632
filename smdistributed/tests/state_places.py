"""Programs drawn at random that keep state: where it lives, how large it is,
when it is first written, by whom.

A program is the text of a module, as a user writes it: smp finds the state that it watches in the
code of the modules, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_STEPS = (1, 7, 40)
"""In which step a program writes its state for the first time."""

SIZES = (1, 300, 5000)
"""How many items a container has when the model is made."""

WRITERS = ("root before", "root after", "body", "hook")
READERS = ("root before", "root after", "body")


@dataclass(frozen=True)
class Place:
    """The place where a number lives.

    Attributes:
        made: The expression of the object that the root and the remote module hold, or empty.
        read: The expression that reads it. `self.held` is the object that both hold.
        write: The statement that writes VALUE.
        prelude: Statements of the module, before its classes.
        sizes: Possible values of SIZE: how many items a container has when the model is made.
        stays: Whether the object is a buffer or an iterator: a write stays on its rank, so one on
            another rank than its owner's is refused.
    """

    made: str
    read: str
    write: str
    prelude: str = ""
    sizes: tuple[int, ...] = (1,)
    stays: bool = False


OWN = (
    "class Own:\n    def __init__(self):\n        self.v = 0.0\n        self.items = [0.0] * SIZE\n"
)
CLASS = "class Own:\n    v = 0.0\n    items = [0.0] * SIZE\n"
TENSOR = "class Own:\n    def __init__(self):\n        self.t = torch.zeros(()).double()\n"
NESTED = '{"a": [{"b": {"c": [{"d": {"e": [{"v": 0.0}]}}]}}]}'
DEEP = 'self.held["a"][0]["b"]["c"][0]["d"]["e"][0]["v"]'

VARIABLE = 'import contextvars\nVARIABLE = contextvars.ContextVar("VARIABLE", default=0.0)\n'
LOCAL = "import threading\nLOCAL = threading.local()\nLOCAL.v = 0.0\n"
INSTALLED = "import argparse\n"
OTHER_INSTALLED = "import optparse\n"

PLACES: dict[str, Place] = {
    "list, appended": Place(
        "[0.0] * SIZE", "self.held[-1]", "self.held.append(VALUE)", sizes=SIZES
    ),
    "list, replaced": Place("[0.0] * SIZE", "self.held[0]", "self.held[0] = VALUE", sizes=SIZES),
    "dictionary": Place(
        "dict.fromkeys(range(SIZE), 0.0)", "self.held[0]", "self.held[0] = VALUE", sizes=SIZES
    ),
    "new key": Place(
        "dict.fromkeys(range(SIZE), 0.0)",
        'self.held.get("v", 0.0)',
        'self.held["v"] = VALUE',
        "",
        SIZES,
    ),
    "deep": Place(NESTED, DEEP, f"{DEEP} = VALUE"),
    "many containers": Place(
        "[[0.0] for _ in range(SIZE)]", "self.held[-1][0]", "self.held[-1][0] = VALUE", "", SIZES
    ),
    "own object": Place("Own()", "self.held.v", "self.held.v = VALUE", OWN),
    "list of an own object": Place(
        "Own()", "self.held.items[-1]", "self.held.items.append(VALUE)", OWN, SIZES
    ),
    "namespace": Place(
        "argparse.Namespace(v=0.0)", "self.held.v", "self.held.v = VALUE", "import argparse\n"
    ),
    "simple namespace": Place(
        "types.SimpleNamespace(v=0.0)", "self.held.v", "self.held.v = VALUE", "import types\n"
    ),
    "counter": Place(
        "collections.Counter()", 'self.held["v"]', 'self.held["v"] = VALUE', "import collections\n"
    ),
    "deque": Place(
        "collections.deque([0.0] * SIZE)",
        "self.held[-1]",
        "self.held.append(VALUE)",
        "import collections\n",
        SIZES,
    ),
    "class attribute": Place("None", "Own.v", "Own.v = VALUE", CLASS),
    "list of a class": Place("None", "Own.items[-1]", "Own.items.append(VALUE)", CLASS, SIZES),
    "object of a class": Place(
        "None",
        "Own.inner.v",
        "Own.inner.v = VALUE",
        "import types\nclass Own:\n    inner = types.SimpleNamespace(v=0.0)\n",
    ),
    "global number": Place("None", "NUMBER", "NUMBER = VALUE", "NUMBER = 0.0\n"),
    "global list": Place(
        "None", "ITEMS[-1]", "ITEMS.append(VALUE)", "ITEMS = [0.0] * SIZE\n", SIZES
    ),
    "global dictionary": Place("None", 'TABLE["v"]', 'TABLE["v"] = VALUE', 'TABLE = {"v": 0.0}\n'),
    "global object": Place("None", "STATE.v", "STATE.v = VALUE", f"{OWN}STATE = Own()\n"),
    "attribute of the remote module": Place("None", "BODY.v", "BODY.v = VALUE"),
    "attribute of the root": Place("None", "ROOT.v", "ROOT.v = VALUE"),
    "context variable": Place("None", "VARIABLE.get()", "VARIABLE.set(VALUE)", VARIABLE),
    "thread-local": Place("None", "LOCAL.v", "LOCAL.v = VALUE", LOCAL),
    "list of an installed object": Place(
        "argparse.Namespace(items=[0.0] * SIZE)",
        "self.held.items[-1]",
        "self.held.items.append(VALUE)",
        INSTALLED,
        SIZES,
    ),
    "dictionary of an installed object": Place(
        'optparse.Values({"table": {"v": 0.0}})',
        'self.held.table["v"]',
        'self.held.table["v"] = VALUE',
        OTHER_INSTALLED,
    ),
    "object of an installed object": Place(
        "argparse.Namespace(inner=argparse.Namespace(v=0.0))",
        "self.held.inner.v",
        "self.held.inner.v = VALUE",
        INSTALLED,
    ),
    "global deque": Place(
        "None",
        "QUEUE[-1]",
        "QUEUE.append(VALUE)",
        "import collections\nQUEUE = collections.deque([0.0] * SIZE)\n",
        SIZES,
    ),
    "global tensor": Place(
        "None",
        "float(TENSOR)",
        "TENSOR.fill_(VALUE)",
        "TENSOR = torch.zeros((), dtype=torch.float64)\n",
    ),
    "array": Place("numpy.zeros(1)", "self.held[0]", "self.held[0] = VALUE", "import numpy\n"),
    "tensor": Place("torch.zeros(()).double()", "float(self.held)", "self.held.fill_(VALUE)"),
    "tensor of an own object": Place(
        "Own()", "float(self.held.t)", "self.held.t.fill_(VALUE)", TENSOR
    ),
    "tensor of an installed object": Place(
        "argparse.Namespace(t=torch.zeros(()).double())",
        "float(self.held.t)",
        "self.held.t.fill_(VALUE)",
        INSTALLED,
    ),
    "buffer of the remote module": Place(
        "None", "float(BODY.buffer)", "BODY.buffer.fill_(VALUE)", stays=True
    ),
    "buffer of the root": Place(
        "None", "float(ROOT.buffer)", "ROOT.buffer.fill_(VALUE)", stays=True
    ),
}

COUNTED = "class Own:\n    n = 0\n    def __init__(self):\n        self.n = 0\n"

# Whole numbers that are only counted up.
PLACES |= {
    "count in a dictionary": Place('{"n": 0}', 'self.held["n"]', 'self.held["n"] += 1'),
    "count under a new key": Place(
        "{}", 'self.held.get("n", 0)', 'self.held["n"] = self.held.get("n", 0) + 1'
    ),
    "count in a list": Place("[0] * SIZE", "self.held[0]", "self.held[0] += 1", sizes=SIZES),
    "count in an own object": Place("Own()", "self.held.n", "self.held.n += 1", COUNTED),
    "count in a class": Place("None", "Own.n", "Own.n += 1", COUNTED),
    "count in the remote module": Place("None", "BODY.n", "BODY.n += 1"),
    "count in the root": Place("None", "ROOT.n", "ROOT.n += 1"),
    "count in an array": Place(
        "numpy.zeros(2, int)", "int(self.held[1])", "self.held[1] += 1", "import numpy\n"
    ),
}

CELL = """\
def shared():
    v = 0.0

    def get():
        return v

    def put(value):
        nonlocal v
        v = value

    return get, put
"""
CELLS = """\
def shared():
    items = [0.0] * SIZE

    def get():
        return items[-1]

    def put(value):
        items.append(value)

    return get, put
"""
CELL_ARRAY = """\
import numpy
def shared():
    values = numpy.zeros(1)

    def get():
        return float(values[0])

    def put(value):
        values[0] = value

    return get, put
"""
GLOBAL_PAIR = "GET, PUT = shared()\n"
OF_FUNCTION = "def state():\n    pass\nstate.v = 0.0\n"
DEFAULTS = """\
def state(value=None, items=[0.0] * SIZE):
    if value is not None:
        items.append(value)
    return items[-1]
"""
PARTIAL = """\
import functools
def kept(items, value=None):
    if value is not None:
        items.append(value)
    return items[-1]
STATE = functools.partial(kept, [0.0] * SIZE)
"""
METHODS = """\
class Own:
    def __init__(self):
        self.v = 0.0
    def get(self):
        return self.v
    def put(self, value):
        self.v = value
OWN = Own()
GET, PUT = OWN.get, OWN.put
del OWN
"""
DECORATOR = """\
import functools
def kept(function):
    v = 0.0

    @functools.wraps(function)
    def with_state(value=None):
        nonlocal v
        if value is not None:
            v = function(value)
        return v

    return with_state

@kept
def state(value):
    return value
"""
METER = """\
class Meter:
    total = 0.0
    def get(self):
        return Meter.total
    def put(self, value):
        Meter.total = value
"""
LOCAL_CLASS = """\
def shared():
    v = 0.0

    class Box:
        def get(self):
            return v

        def put(self, value):
            nonlocal v
            v = value

    return Box()

BOX = shared()
"""
GENERATOR = """\
def numbers():
    v = 0.0
    while True:
        value = yield v
        v = v if value is None else value

STATE = numbers()
next(STATE)
"""
SLOTS = "class Own:\n    __slots__ = ('v',)\n    def __init__(self):\n        self.v = 0.0\n"
ENUM = "import enum\nclass Own(enum.Enum):\n    A = 1\nOwn.A.v = 0.0\n"
ARRAY_SIZES = (1, 10_000, 100_000)

# Variables that functions have: those of outer functions, attributes, defaults, arguments.
PLACES |= {
    "closure number": Place("None", "GET()", "PUT(VALUE)", CELL + GLOBAL_PAIR),
    "closure list": Place("None", "GET()", "PUT(VALUE)", CELLS + GLOBAL_PAIR, SIZES),
    "closure array": Place("None", "GET()", "PUT(VALUE)", CELL_ARRAY + GLOBAL_PAIR),
    "held closure number": Place("shared()", "self.held[0]()", "self.held[1](VALUE)", CELL),
    "held closure list": Place("shared()", "self.held[0]()", "self.held[1](VALUE)", CELLS, SIZES),
    "attribute of a function": Place("None", "state.v", "state.v = VALUE", OF_FUNCTION),
    "default of a function": Place("None", "state()", "state(VALUE)", DEFAULTS, SIZES),
    "argument of a partial": Place("None", "STATE()", "STATE(VALUE)", PARTIAL, SIZES),
    "variable of a decorator": Place("None", "state()", "state(VALUE)", DECORATOR),
    "class attribute of a held object": Place(
        "Meter()", "self.held.get()", "self.held.put(VALUE)", METER
    ),
    "class attribute of a global object": Place(
        "None", "OWN.get()", "OWN.put(VALUE)", f"{METER}OWN = Meter()\n"
    ),
    "closure of a local class": Place("None", "BOX.get()", "BOX.put(VALUE)", LOCAL_CLASS),
    "generator": Place("None", "STATE.send(None)", "STATE.send(VALUE)", GENERATOR, stays=True),
    "slots": Place("Own()", "self.held.v", "self.held.v = VALUE", SLOTS),
    "member of an enumeration": Place("None", "Own.A.v", "Own.A.v = VALUE", ENUM),
    "chain of dictionaries": Place(
        'collections.ChainMap({"v": 0.0})',
        'self.held["v"]',
        'self.held["v"] = VALUE',
        "import collections\n",
    ),
    "object of bound methods": Place("None", "GET()", "PUT(VALUE)", METHODS),
}

# Large arrays and other buffers.
PLACES |= {
    "large array": Place(
        "numpy.zeros(SIZE)", "self.held[-1]", "self.held[-1] = VALUE", "import numpy\n", ARRAY_SIZES
    ),
    "large global array": Place(
        "None",
        "ARRAY[-1]",
        "ARRAY[-1] = VALUE",
        "import numpy\nARRAY = numpy.zeros(SIZE)\n",
        ARRAY_SIZES,
    ),
    "large tensor": Place(
        "torch.zeros(SIZE).double()",
        "float(self.held[-1])",
        "self.held[-1] = VALUE",
        sizes=ARRAY_SIZES,
    ),
    "large tensor by its data": Place(
        "torch.zeros(SIZE).double()",
        "float(self.held[-1])",
        "self.held.data[-1] = VALUE",
        sizes=ARRAY_SIZES,
    ),
    "array of a subclass": Place(
        "numpy.zeros(SIZE).view(numpy.recarray)",
        "float(self.held[-1])",
        "self.held[-1] = VALUE",
        "import numpy\n",
        ARRAY_SIZES,
    ),
    "masked array": Place(
        "numpy.ma.zeros(SIZE)",
        "float(self.held[-1])",
        "self.held[-1] = VALUE",
        "import numpy\n",
        ARRAY_SIZES,
    ),
    "array of objects": Place(
        "numpy.array([0.0] * SIZE, dtype=object)",
        "self.held[-1]",
        "self.held[-1] = VALUE",
        "import numpy\n",
        ARRAY_SIZES,
    ),
    "array of the standard library": Place(
        'array.array("d", [0.0] * SIZE)',
        "self.held[-1]",
        "self.held[-1] = VALUE",
        "import array\n",
        ARRAY_SIZES,
    ),
    "deep in an installed object": Place(
        "argparse.Namespace(a=[[[[[[[[[[[[0.0]]]]]]]]]]]])",
        "self.held.a" + "[0]" * 12,
        "self.held.a" + "[0]" * 12 + " = VALUE",
        INSTALLED,
    ),
    "module outside of the model": Place(
        "(nn.Identity(),)", 'getattr(self.held[0], "v", 0.0)', "self.held[0].v = VALUE"
    ),
}

TEXT = """\
import torch
from torch import nn
{prelude}

class Body(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.linear, self.held, self.v, self.n = nn.Linear(4, 4), held, 0.0, 0
        self.register_buffer("buffer", torch.zeros(()))

    def forward(self, h, step):{scope}
        gain = 0.0
{body}
        return torch.tanh(self.linear(h)) * (1 + gain)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        held = {made}
        self.first, self.body, self.last = nn.Linear(4, 4), Body(held), nn.Linear(4, 4)
        self.held, self.v, self.n, self.step = held, 0.0, 0, 0
        self.register_buffer("buffer", torch.zeros(())){hook}

    def note(self, module, args, out):{scope}
        step, h = args[1], out
{noted}

    def forward(self, x, step):{scope}
        gain = 0.0
        h = self.first(x)
{before}
        h = self.body(h, step)
{after}
        return self.last(h * (1 + gain))
"""


@dataclass(frozen=True)
class Program:
    """A program of a module, a place, a writer and a reader.

    Attributes:
        place: Where its state lives: a key of PLACES.
        writer: Who writes the object.
        reader: Who reads the object.
        first: In which step the first write is, from 1.
        size: How many items its container has.
    """

    place: str
    writer: str
    reader: str
    first: int
    size: int

    def text(self) -> str:
        """Return the program."""
        place = PLACES[self.place]

        def at(where: str, indent: str = "        ") -> str:
            """Return the statements of one place in the program."""
            local = place
            body = "self" if where == "body" else "self.body"
            root = "self"
            read = local.read.replace("BODY", body).replace("ROOT", root)
            write = local.write.replace("BODY", body).replace("ROOT", root)
            lines = []
            value = f"0.5 * {read} + float(h.detach().mean())"
            if self.writer == where:
                lines += [
                    f"{indent}if step >= {self.first}:",
                    f"{indent}    {write.replace('VALUE', value)}",
                ]
            if self.reader == where:
                lines += [f"{indent}gain = 0.1 * {read}"]
            return "\n".join(lines) or f"{indent}pass"

        hook = (
            "\n        self.body.register_forward_hook(self.note)" if self.writer == "hook" else ""
        )
        scope = "\n        global NUMBER" if self.place == "global number" else ""
        return TEXT.format(
            prelude=place.prelude.replace("SIZE", str(self.size)),
            made=place.made.replace("SIZE", str(self.size)),
            scope=scope,
            hook=hook,
            body=at("body"),
            noted=at("hook"),
            before=at("root before"),
            after=at("root after"),
        )


def drawn(chance: random.Random) -> Program:
    """Return a program."""
    name = chance.choice(sorted(PLACES))
    # The remote module has no name for the root.
    writers = [
        writer
        for writer in WRITERS
        if not (name.endswith(("of the root", "in the root")) and writer == "body")
    ]
    readers = [
        reader
        for reader in READERS
        if not (name.endswith(("of the root", "in the root")) and reader == "body")
    ]
    size = chance.choice(PLACES[name].sizes)
    return Program(
        name, chance.choice(writers), chance.choice(readers), chance.choice(FIRST_STEPS), size
    )
