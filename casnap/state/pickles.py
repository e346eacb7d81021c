"""Follow a pickle without running it.

A pickle is a program. :class:`PickleMachine` follows the opcodes that ``torch.save`` writes and
``torch.load(weights_only=True)`` reads, but it calls nothing: it records the name and the arguments
of each call.
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from casnap.errors import with_article

MAX_DEPTH = 1000
"""The deepest nesting of tuples. Python may overflow the stack when it hashes a deeper one."""


class RefusedError(ValueError):
    """A pickle has an opcode that torch.save does not write, or a step that is not permitted."""


class BrokenError(RefusedError):
    """A pickle, or the archive around it, is damaged or cut off."""


class Term:
    """A container, global, call or storage in a pickle.

    Numbers, strings and other plain values stand for themselves.

    Attributes:
        kind: ``tuple``, ``list``, ``dict``, ``global``, ``call`` or ``storage``.
        name: The name of a global, or of the function that a call calls.
        parts: The elements of a tuple or list; each key of a dict, followed by its value; the
            arguments of a call.
        depth: For a tuple, how deep tuples are nested.
        state: For a call, the state that the pickle gives to the object made by the call.
    """

    __slots__ = ("depth", "kind", "name", "parts", "state")

    def __init__(self, kind: str, name: str = "", parts: list[Any] | None = None) -> None:
        self.kind = kind
        self.name = name
        self.parts: list[Any] = [] if parts is None else parts
        self.depth = 0
        self.state: Any = None


EMPTY = Term("tuple")


def kind_of(value: object) -> str:
    """Return the kind of a term, or the name of a plain value's type."""
    return value.kind if isinstance(value, Term) else type(value).__name__


Check: TypeAlias = Callable[[str, Term], None]


class PickleMachine:
    """Follows the opcodes of a pickle, without calling or importing anything.

    Args:
        data: The bytes that hold the pickle.
        check: Called before each step that makes or changes an object, with the kind of the step
            and a term: a call for the kinds ``call``, ``new``, ``build`` and ``item``, a storage
            for ``storage``. It refuses a step by raising a :class:`RefusedError`.
        newest: The newest protocol that may be used: 2, as torch.save does, or up to 5, as
            ``pickle.dump`` does.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        check: Check | None = None,
        newest: int = 2,
    ) -> None:
        self._at = 0
        self._data = data
        self._check = check
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._newest = newest
        self._steps = _STEPS if newest == 2 else _STEPS | _NEWER_STEPS

    def run(self) -> Any:
        """Return the value of the pickle.

        Raises:
            RefusedError: The pickle has an opcode that torch.save does not write, or the check
                refused a step.
        """
        try:
            while (opcode := self._read(1)) != b".":
                step = self._steps.get(opcode)
                if step is None:
                    raise RefusedError(f"torch.save does not write the opcode {opcode!r}")
                step(self)
            return self._stack.pop()
        except (IndexError, KeyError, struct.error, UnicodeDecodeError) as e:
            raise BrokenError(f"its pickle is damaged: {e!r}") from e

    def _read(self, n: int) -> bytes:
        data = bytes(self._data[self._at : self._at + n])
        if len(data) < n:
            raise RefusedError("its pickle is cut off")
        self._at += n
        return data

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._read(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        line = bytes(self._data[self._at : self._at + 1000]).partition(b"\n")[0]
        self._at += len(line) + 1
        return line.decode()

    def _pop(self, count: int | None) -> list[Any]:
        """Take ``count`` values off the stack; None for all since the last mark."""
        if count is not None:
            return [self._stack.pop() for _ in range(count)][::-1]
        items = self._stack
        self._stack = self._marks.pop()
        return items

    # --- what the opcodes do ---

    def _do_protocol(self) -> None:
        if not 2 <= self._number("B") <= self._newest:
            raise RefusedError("its pickle is of another protocol than torch.save's")

    def _do_mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _do_constant(self, value: object) -> None:
        self._stack.append(value)

    def _do_number(self, layout: str) -> None:
        self._stack.append(self._number(layout))

    def _do_long(self) -> None:
        self._stack.append(int.from_bytes(self._read(self._number("B")), "little", signed=True))

    def _do_text(self, layout: str) -> None:
        data = self._read(self._number(layout))
        self._stack.append(data.decode("utf-8", "surrogatepass"))

    def _do_frame(self) -> None:
        self._read(8)

    def _do_memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _do_short_bytes(self) -> None:
        self._stack.append(self._read(self._number("B")))

    def _do_put(self, layout: str) -> None:
        self._memo[self._number(layout)] = self._stack[-1]

    def _do_get(self, layout: str) -> None:
        self._stack.append(self._memo[self._number(layout)])

    def _do_container(self, kind: str) -> None:
        self._stack.append(Term(kind))

    def _do_tuple_of(self, count: int | None) -> None:
        parts = self._pop(count)
        term = Term("tuple", parts=parts)
        term.depth = 1 + max((p.depth for p in parts if isinstance(p, Term)), default=0)
        if term.depth > MAX_DEPTH:
            raise RefusedError("its tuples are nested too deeply")
        self._stack.append(term)

    def _do_append(self, count: int | None) -> None:
        self._add(self._pop(count), ("list",), 1)

    def _do_set_items(self, count: int | None) -> None:
        self._add(self._pop(count), ("dict", "call"), 2)

    def _add(self, items: list[Any], kinds: tuple[str, ...], width: int) -> None:
        top = self._stack[-1]
        if kind_of(top) not in kinds or len(items) % width:
            raise RefusedError(f"its pickle adds to {with_article(kind_of(top))}")
        if top.kind == "call":
            self._ask("item", top)
        top.parts += items

    def _do_stack_global(self) -> None:
        module, name = self._pop(2)
        if type(module) is not str or type(name) is not str:
            raise RefusedError("its pickle names a global that is not text")
        self._stack.append(Term("global", f"{module}.{name}"))

    def _do_find_global(self) -> None:
        module, name = self._line(), self._line()
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self._stack.append(Term("global", f"{module}.{name}"))

    def _do_storage(self) -> None:
        ident = self._stack.pop()
        if kind_of(ident) != "tuple":
            raise RefusedError("a storage has no name")
        term = Term("storage", parts=ident.parts)
        self._ask("storage", term)
        self._stack.append(term)

    def _do_call(self, step: str) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        if kind_of(args) != "tuple" or kind_of(callee) not in ("global", "call"):
            raise RefusedError("its pickle calls a value that is not a function")
        name = callee.name if callee.kind == "global" else f"the result of {callee.name}"
        term = Term("call", name, list(args.parts))
        self._ask(step, term)
        self._stack.append(term)

    def _do_build(self) -> None:
        state = self._stack.pop()
        top = self._stack[-1]
        if kind_of(top) != "call":
            raise RefusedError(f"its pickle gives a state to {with_article(kind_of(top))}")
        self._ask("build", top)
        top.state = state

    def _ask(self, step: str, term: Term) -> None:
        if self._check is not None:
            self._check(step, term)


_STEPS: dict[bytes, Callable[[PickleMachine], None]] = {
    b"\x80": PickleMachine._do_protocol,
    b"(": PickleMachine._do_mark,
    b"N": partial(PickleMachine._do_constant, value=None),
    b"\x88": partial(PickleMachine._do_constant, value=True),
    b"\x89": partial(PickleMachine._do_constant, value=False),
    b"K": partial(PickleMachine._do_number, layout="<B"),
    b"M": partial(PickleMachine._do_number, layout="<H"),
    b"J": partial(PickleMachine._do_number, layout="<i"),
    b"G": partial(PickleMachine._do_number, layout=">d"),
    b"\x8a": PickleMachine._do_long,
    b"X": partial(PickleMachine._do_text, layout="<I"),
    b"U": PickleMachine._do_short_bytes,
    b"q": partial(PickleMachine._do_put, layout="<B"),
    b"r": partial(PickleMachine._do_put, layout="<I"),
    b"h": partial(PickleMachine._do_get, layout="<B"),
    b"j": partial(PickleMachine._do_get, layout="<I"),
    b"]": partial(PickleMachine._do_container, kind="list"),
    b"}": partial(PickleMachine._do_container, kind="dict"),
    b")": partial(PickleMachine._do_constant, value=EMPTY),
    b"\x85": partial(PickleMachine._do_tuple_of, count=1),
    b"\x86": partial(PickleMachine._do_tuple_of, count=2),
    b"\x87": partial(PickleMachine._do_tuple_of, count=3),
    b"t": partial(PickleMachine._do_tuple_of, count=None),
    b"a": partial(PickleMachine._do_append, count=1),
    b"e": partial(PickleMachine._do_append, count=None),
    b"s": partial(PickleMachine._do_set_items, count=2),
    b"u": partial(PickleMachine._do_set_items, count=None),
    b"c": PickleMachine._do_find_global,
    b"Q": PickleMachine._do_storage,
    b"R": partial(PickleMachine._do_call, step="call"),
    b"\x81": partial(PickleMachine._do_call, step="new"),
    b"b": PickleMachine._do_build,
}

_NEWER_STEPS: dict[bytes, Callable[[PickleMachine], None]] = {
    b"\x95": PickleMachine._do_frame,
    b"\x8c": partial(PickleMachine._do_text, layout="B"),
    b"\x94": PickleMachine._do_memoize,
    b"\x93": PickleMachine._do_stack_global,
    b"C": PickleMachine._do_short_bytes,
}
