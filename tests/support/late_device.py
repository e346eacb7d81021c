"""``late``: a device for tests, whose work takes effect only when somebody waits for it.

Its tensors are ordinary ones of torch, on ``late:0`` and ``late:1``; their memory is the host's.
Each kernel and copy goes into the queue of a stream, and runs when that stream, or an event behind
it, is waited for, in the order of the queue, and not before. So who reads too early gets old bytes,
and who writes too early has them overwritten. Memory that is freed is written over by the stream
that it was allocated on, as if somebody else had got it. With ``module.is_prompt`` the default
streams run at once, and only the others late: then who gives memory back too early is punished.
Who unpins memory of the host while a copy from or to it is under way is noted in ``errors``.

torch lets a backend be written in Python (``torch.utils.backend_registration``). A process that has
:func:`install`-ed this one has an accelerator until it ends.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import _pytree

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
except ImportError:
    pytest.skip("this torch lets no backend be written in Python", allow_module_level=True)

DEVICES = 2
_FRESH, _FREED = 0xCD, 0xAB
_lock = threading.RLock()
_here = threading.local()

counts: Counter[str] = Counter()
"""Bytes that crossed ``to host`` and ``to device``, and ``pageable`` ones among them; how often
somebody had to ``wait``, and was ``refused`` pinned memory."""
errors: list[str] = []


class Stream:
    """A queue of work on one device."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("late", _index(device))
        self._queue: deque[Callable[[], object]] = deque()
        self.end = self._done = 0
        _streams.append(self)

    def enqueue(self, work: Callable[[], object]) -> None:
        with _lock:
            self._queue.append(work)
            self.end += 1
            if module.is_prompt and self is module.default_stream(self.device):
                self.run_to(self.end)

    def run_to(self, end: int) -> None:
        """Let the work take effect that was enqueued before; raise its first error after all."""
        error: Exception | None = None
        with _lock:
            while self._done < end:
                self._done += 1
                try:
                    self._queue.popleft()()
                except Exception as e:  # noqa: BLE001 - of whatever work it is
                    error = error or e
        if error is not None:
            raise error

    def synchronize(self) -> None:
        counts["wait"] += 1
        self.run_to(self.end)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Have what is enqueued from now on run after what the event stands behind."""
        stream, end = event.stream, event.end
        if stream is not None:
            self.enqueue(lambda: stream.run_to(end))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """A place in the queue of a stream."""

    def __init__(self, **_: object) -> None:
        self.stream: Stream | None = None
        self.end = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or module.current_stream()
        self.end = self.stream.end

    def synchronize(self) -> None:
        counts["wait"] += 1
        if self.stream is not None:
            self.stream.run_to(self.end)


_streams: list[Stream] = []


class _Runtime:
    """What casnap uses of ``cudart``: host memory that copies may read and write later."""

    def __init__(self) -> None:
        # Address → bytes, and the only device that it is pinned for; None for all.
        self.registered: dict[int, tuple[int, int | None]] = {}
        self.free_bytes: int | None = None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        pinned = sum(n for n, _ in self.registered.values())
        if self.free_bytes is not None and pinned + nbytes > self.free_bytes:
            counts["refused"] += 1
            _here.last_error = "out of memory"
            return 2
        self.registered[address] = nbytes, None if flags & 1 else module.current_device()
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return int(self.registered.pop(address, None) is None)

    def holds(self, tensor: torch.Tensor, device: int) -> bool:
        address = tensor.data_ptr()
        return any(
            at <= address < at + nbytes and only in (None, device)
            for at, (nbytes, only) in self.registered.items()
        )


def _check_last_error() -> None:
    """Raise the last error of a call of the runtime in this thread, as each kernel does, once."""
    error, _here.last_error = getattr(_here, "last_error", None), None
    if error:
        raise RuntimeError(f"late: {error}")


class _Module:
    """``torch.late``: what torch and casnap ask of the module of a device."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        # Whether default streams are as fast as can be: their work takes effect at once.
        self.is_prompt = False
        self.runtime = _Runtime()
        self.free_bytes: int | None = None
        self._seeds = {i: torch.Generator().manual_seed(i) for i in range(DEVICES)}
        self._default: dict[int, Stream] = {}

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return getattr(_here, "device", 0)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, _here.device = self.current_device(), _index(device)
        try:
            yield
        finally:
            _here.device = before

    def default_stream(self, device: Any = None) -> Stream:
        index = _index(device)
        with _lock:
            if index not in self._default:
                self._default[index] = Stream(index)
        return self._default[index]

    def current_stream(self, device: Any = None) -> Stream:
        index = _index(device)
        streams: dict[int, Stream] = getattr(_here, "streams", {})
        return streams.get(index) or self.default_stream(index)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        streams = getattr(_here, "streams", {})
        _here.streams = {**streams, stream.device.index: stream}
        try:
            with self.device(stream.device):
                yield
        finally:
            _here.streams = streams

    def synchronize(self, device: Any = None) -> None:
        counts["wait"] += 1
        for stream in _streams:
            if stream.device.index == _index(device):
                stream.run_to(stream.end)

    def cudart(self) -> _Runtime:
        return self.runtime

    def manual_seed_all(self, seed: int) -> None:
        for generator in self._seeds.values():
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._seeds[_index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._seeds[_index(device)].set_state(state)


module = _Module()


def under_way() -> int:
    """Return how much work on streams other than the default ones has not taken effect."""
    return sum(len(s._queue) for s in _streams if s not in module._default.values())


def run_all() -> None:
    """Let all work take effect."""
    for index in range(DEVICES):
        module.synchronize(index)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return module.current_device() if index is None else index


# --- memory, which torch takes over by DLPack -------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_EXTENSION_DEVICE, _UINT = 12, 1
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# By the address of the description that torch has: that, its shape, the memory, and the stream.
_allocated: dict[int, tuple[_Managed, Any, torch.Tensor, Stream]] = {}
_memories: dict[int, torch.Tensor] = {}


def _free(address: int) -> None:
    """Have the memory of a tensor that is gone written over, as its next owner would do."""
    _, _, memory, stream = _allocated.pop(address)
    _memories.pop(memory.data_ptr(), None)
    if module.free_bytes is not None:
        module.free_bytes += memory.nbytes
    stream.enqueue(lambda: memory.fill_(_FREED))


_free_by_torch = _Deleter(_free)


def _allocate(
    size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    # How far the last element lies from the first one.
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    nbytes = max(1, reach * dtype.itemsize) if all(size) else 1
    if module.free_bytes is not None:
        if nbytes > module.free_bytes:
            raise torch.OutOfMemoryError(f"late: out of memory: {nbytes} bytes")
        module.free_bytes -= nbytes
    memory = torch.full((nbytes,), _FRESH, dtype=torch.uint8)
    shape = (ctypes.c_int64 * 1)(nbytes)
    where = _Device(_EXTENSION_DEVICE, _index(device))
    described = _Tensor(memory.data_ptr(), where, 1, _DataType(_UINT, 8, 1), shape, None, 0)
    managed = _Managed(described, None, ctypes.cast(_free_by_torch, ctypes.c_void_p).value)
    address = ctypes.addressof(managed)
    _allocated[address] = (managed, shape, memory, module.current_stream(where.index))
    _memories[memory.data_ptr()] = memory
    whole = torch.utils.dlpack.from_dlpack(_capsule(address, b"dltensor", None))
    if not all(size):
        whole = whole[:0]
    return whole.view(dtype).as_strided(size, stride)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as one of the CPU, which keeps the memory alive."""
    memory = _memories[tensor.untyped_storage().data_ptr()]
    empty = torch.empty(0, dtype=tensor.dtype)
    host = empty.set_(
        memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    host = host.conj() if tensor.is_conj() else host
    return torch._neg_view(host) if tensor.is_neg() else host


def _is_late(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "late"


# --- operators --------------------------------------------------------------------------------

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# They only describe memory, so the kernels of the CPU do.
_VIEWS = (
    *("as_strided", "view", "view.dtype", "_reshape_alias", "alias", "unfold"),
    *("set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"),
)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    from_host, to_host = not _is_late(source), not _is_late(target)
    if from_host or to_host:
        host, late = (source, target) if from_host else (target, source)
        stream, device = module.current_stream(late.device), late.device.index
        pinned = module.runtime.holds(host, device)
        counts["to device" if from_host else "to host"] += late.nbytes
        counts["pageable"] += 0 if pinned else late.nbytes
        # The driver takes a copy of memory that is not pinned before the call returns.
        here = source.clone() if from_host and not pinned else source
        here, there = (_hosted(tensor) for tensor in (here, target))

        def copy() -> None:
            if pinned and not module.runtime.holds(host, device):
                errors.append("memory was unpinned during a copy")
            there.copy_(here)

        stream.enqueue(copy)
        if (pinned and not non_blocking) or (to_host and not pinned):
            stream.synchronize()
    else:
        _check_last_error()  # a kernel does it
        stream, other = (module.current_stream(t.device) for t in (source, target))
        here, there = _on_host(source), _on_host(target)
        if stream is not other:
            stream.wait_stream(other)
        stream.enqueue(lambda: there.copy_(here))
        if stream is not other:
            other.wait_stream(stream)
    return target


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> Any:
    return _allocate(list(size), list(stride), dtype or torch.get_default_dtype(), device)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    stride = torch.empty(size, device="meta").stride()
    return _allocate(list(size), list(stride), dtype or torch.get_default_dtype(), device)


def _arange(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.arange(*args, **kwargs).to(device)


def _read_now(op: Any) -> Callable[..., Any]:
    """Return what waits for the stream, and then calls an operator that returns no tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for value in _pytree.tree_leaves((args, kwargs)):
            if _is_late(value):
                module.current_stream(value.device).synchronize()
        return op(*_pytree.tree_map(_hosted, args), **_pytree.tree_map(_hosted, kwargs))

    return call


def _hosted(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "late":
        return torch.device("cpu")
    return _on_host(value) if _is_late(value) else value


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _enqueue(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Have an operator run later on the stream of its tensors; return its results at once."""
    _check_last_error()
    late = [value for value in _pytree.tree_leaves((args, kwargs)) if _is_late(value)]
    device = late[0].device if late else torch.device("late", module.current_device())
    stream = module.current_stream(device)
    on_host = _pytree.tree_map(_hosted, (args, kwargs))
    if op._schema.is_mutable:
        stream.enqueue(lambda: op(*on_host[0], **on_host[1]))
        written = [
            args[i] if i < len(args) else kwargs[argument.name]
            for i, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return written[0] if len(op._schema.returns) == 1 else None
    meta_args, meta_kwargs = _pytree.tree_map(_without_values, (args, kwargs))
    shapes, spec = _pytree.tree_flatten(op(*meta_args, **meta_kwargs))
    results = [
        _allocate(list(s.shape), list(s.stride()), s.dtype, device)
        if isinstance(s, torch.Tensor)
        else s
        for s in shapes
    ]
    there = [_hosted(result) for result in results]

    def run() -> None:
        values = _pytree.tree_leaves(op(*on_host[0], **on_host[1]))
        for target, value in zip(there, values, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(value)

    stream.enqueue(run)
    return _pytree.tree_unflatten(results, spec)


_libraries: list[Any] = []


def install() -> None:
    """Make ``late`` the accelerator of this process."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend("late", backend_module=module)
    library: Any = torch.library.Library
    aten, every = library("aten", "IMPL"), library("_", "IMPL")
    _libraries.extend((aten, every))
    for name in _VIEWS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def view(*args: Any, op: Any = op, **kwargs: Any) -> Any:
            return op.redispatch(_ON_CPU, *args, **kwargs)

        aten.impl(name, view, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    for view_of in ("Conjugate", "Negative"):
        # It copies such views as they are; torch would clone them first, and so come back here.
        aten.impl("_copy_from", torch.library.fallthrough_kernel, view_of)
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    for overload in ("arange", "arange.start", "arange.start_step"):
        aten.impl(overload, _arange, "PrivateUse1")
    for op in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default):
        aten.impl(op._schema.name.partition("::")[2], _read_now(op), "PrivateUse1")
    every.fallback(_enqueue, "PrivateUse1")
