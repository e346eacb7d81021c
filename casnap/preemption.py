"""Take a last snapshot before the machine is taken away: all ranks agree that a signal came.

This module imports ``take``, ``state`` and lower layers; no public class imports it.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from casnap.errors import CasnapError, RankError
from casnap.runtime.fork import add_signal, in_child, never_free, remove_signal
from casnap.runtime.lazy_imports import ModuleLater
from casnap.runtime.units import Duration, seconds_of
from casnap.state.stateful import AppState
from casnap.take.pending import held_back, wait_for_last

if TYPE_CHECKING:
    import casnap
    from casnap.pending import PendingSnapshot
    from casnap.snapshot import Snapshot
else:
    casnap = ModuleLater("casnap")

Batch = TypeVar("Batch")
_log = logging.getLogger("casnap")
_MOST_STEPS = 1 << 20
_ADVICE = (
    "Earlier snapshots are whole. If the signal has also ended the workers of a data loader, have "
    "them ignore it, by its worker_init_fn"
)


class Preemption:
    """Watches for signals; made by :func:`on_preemption`.

    Attributes:
        snapshot: The last snapshot once it is durable; None before, or if it was too late.
    """

    def __init__(
        self,
        store: casnap.Store,
        app_state: AppState,
        within: float,
        signals: Sequence[int],
        every: float,
        name: str,
        pg: Any,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CasnapError(
                "on_preemption() was called off the main thread, where Python installs no signal "
                "handlers; call it on the main thread, before the loop"
            )
        self.snapshot: Snapshot | None = None
        self._store = store
        self._app_state = app_state
        self._within = within
        self._every = every
        self._name = name
        self._pg = pg
        self._group = _own_group(pg)
        self._values: Any = None
        self._since: float | None = None
        self._stopped = self._closed = False
        # The last step; the last one that has ended since the loader gave a batch; and the one
        # after which the state certainly is just now, since no later step has begun.
        self._last: int | None = None
        self._ended: int | None = None
        self._whole: int | None = None
        self._steps, self._left, self._agreed_at = 1, 1, time.monotonic()
        self._before: dict[int, Any] = {}
        in_child(self._leave)
        try:
            for number in dict.fromkeys(signals):
                self._before[number] = signal.signal(number, self._hear)
                add_signal(number)
        except BaseException:
            self.close()
            raise

    @property
    def signalled(self) -> bool:
        """Whether this process has received a signal. Other ranks may not know of it yet."""
        return self._since is not None

    def step(self, step: int) -> bool:
        """Note the end of a step; return whether to stop. If so, the last take has been made.

        All ranks call this after the same steps. Most calls only count. From time to time the ranks
        agree whether to stop, so that all of them stop after the same step.

        Args:
            step: The number of the step, which the name of the last snapshot gets.

        Raises:
            CasnapError: The last take failed. Earlier snapshots are whole.
            RankError: The ranks cannot agree, since another one died or hangs.
        """
        self._last = self._ended = self._whole = step
        if not self._stopped and not self._closed:
            seconds = 0.0 if self._since is None else time.monotonic() - self._since
            is_asked = self._since is not None
            if self._group is not None:
                is_asked, seconds = self._agree(is_asked, seconds)
            if is_asked:
                self._stopped = True
                self._take(step, time.monotonic() + self._within - seconds)
        self._whole = None
        return self._stopped

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader; remember that no step is half done while it fetches one.

        A signal to the whole job ends the workers of the loader too, and the loader fails. At the
        end of the ``with``, a job of one process then takes the state that it had after the last
        whole step.

        Args:
            loader: The loader. If it is in the app state, its state there says which batch came
                last.
        """
        self._whole, self._ended = self._ended, None
        for batch in loader:
            self._whole = None
            yield batch
            self._whole, self._ended = self._ended, None
        self._whole = None

    def close(self) -> None:
        """Restore the earlier handlers of the signals; from now on, :meth:`step` does nothing."""
        if not self._closed:
            self._closed = True
            for number in self._before:
                remove_signal(number)
                if signal.getsignal(number) == self._hear:
                    signal.signal(number, self._earlier(number))
        dist: Any = sys.modules.get("torch.distributed")
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _leave(self) -> None:
        """In a forked child, stop watching: a signal to it does not mean that the job ends."""
        # Do not destroy the group: that would wait for threads that the child does not have.
        never_free(self._group)
        self._group = None
        self.close()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None and self.signalled and self.snapshot is None and not self._closed:
                self._take_whole(error)
        finally:
            self.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # Only sets a flag: the main thread may hold any lock.
        if self._since is None and not self._closed:
            self._since = time.monotonic()
        before = self._earlier(number)
        if callable(before):
            before(number, frame)

    def _earlier(self, number: int) -> Any:
        """Return the signal handler to call after this one; skip handlers of closed objects.

        Args:
            number: The signal.
        """
        before = self._before.get(number)
        owner = getattr(before, "__self__", None)
        if isinstance(owner, Preemption) and owner._closed:
            return owner._earlier(number)
        return signal.SIG_DFL if before is None else before

    def _agree(self, is_asked: bool, seconds_waited: float) -> tuple[bool, float]:
        """From time to time, agree with all ranks whether one of them was asked to stop.

        Most calls ask no other rank, and return False.

        Args:
            is_asked: Whether this rank was asked.
            seconds_waited: How long ago.

        Returns:
            Whether any rank was asked, and the longest time since then, in seconds.
        """
        self._left -= 1
        if self._left:
            return False, 0.0
        seconds = max((time.monotonic() - self._agreed_at) / self._steps, 1e-6)
        steps = max(1, min(int(self._every / seconds), 2 * self._steps, _MOST_STEPS))
        any_asked, longest, most = self._most(float(is_asked), seconds_waited, -float(steps))
        # The same on all ranks: they count the steps down until they agree again.
        self._steps = self._left = int(-most)
        self._agreed_at = time.monotonic()
        return bool(any_asked), longest

    def _most(self, first: float, second: float = 0.0, third: float = 0.0) -> list[float]:
        """Return the maximum over all ranks, for each of three values. All ranks call this."""
        import torch
        import torch.distributed as dist

        if self._values is None:
            # It stays: with torch 2.7, a thread of gloo that frees a tensor waits for the GIL, and
            # `close` holds that while it waits for the thread.
            with torch.inference_mode(mode=False):
                self._values = torch.empty(3, dtype=torch.float64, device="cpu")
        tensor = self._values
        tensor.copy_(torch.tensor([first, second, third], dtype=torch.float64, device="cpu"))
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as e:
            raise RankError(f"the ranks cannot agree whether to stop: {e}") from e
        maxima: list[float] = tensor.tolist()
        return maxima

    def _take(self, step: int, until: float) -> None:
        is_idle = wait_for_last(max(0.0, until - time.monotonic()))
        if self._group is not None:
            is_idle = not self._most(float(not is_idle))[0]
        if not is_idle:
            self._too_late("the take before was still pending, so no last snapshot was taken")
            return
        # The error of an earlier take must not prevent this one, which is needed all the more.
        with held_back():
            pending: PendingSnapshot = self._store.async_take(
                self._app_state,
                self._name.format(step=step),
                metadata={"step": step, "preempted": True},
                overwrite=True,
                pg=self._pg,
            )
            if wait_for_last(max(0.0, until - time.monotonic())):
                self.snapshot = pending.wait()
                return
        self._too_late("the last take goes on in the background, until the process is killed")

    def _take_whole(self, error: BaseException) -> None:
        """Take the app state, if it is certainly the state after a whole step; log what was done.

        Args:
            error: The error that ended the loop.
        """
        if self._stopped and (self._whole is None or self._group or isinstance(error, CasnapError)):
            return  # the last take was made, or has failed: the caller knows
        why = ""
        if self._last is None:
            why = "no step had ended"
        elif self._group is not None:
            why = "the other ranks may have ended after another step"
        elif self._whole is None:
            why = (
                f"the step after {self._last} may have begun; Preemption.batches() would tell "
                "whether a loader failed before that"
            )
        else:
            assert self._since is not None
            try:
                self._take(self._whole, self._since + self._within)
            except Exception as e:  # noqa: BLE001 - the error of the loop is the one to raise
                why = f"the state after step {self._whole} cannot be taken: {e}"
        begin = "%s: an error ended the loop after a signal (%s: %.200s). "
        loop = self._store.uri, type(error).__name__, error
        if self.snapshot is not None:
            name = self.snapshot.name
            _log.warning(begin + "%r is the state after the last whole step", *loop, name)
        elif why:
            _log.warning(begin + "No last snapshot was taken: %s. %s", *loop, why, _ADVICE)

    def _too_late(self, step: str) -> None:
        text = "%s: %g s after a signal, %s; earlier snapshots are whole"
        _log.warning(text, self._store.uri, self._within, step)


def _own_group(pg: Any) -> Any:
    """Return a new gloo group for the ranks of ``pg``; None for one process.

    It is a separate group, since a pending take may be using casnap's other groups.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(pg if pg is not None else dist.group.WORLD)
    if len(ranks) == 1:
        return None
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=pg is not None)


def on_preemption(
    store: casnap.Store,
    app_state: AppState,
    *,
    within: Duration = 30.0,
    signals: Sequence[int] = (signal.SIGTERM,),
    every: Duration = 1.0,
    name: str = "preempted_{step}",
    pg: Any = None,
) -> Preemption:
    """Watch for a signal that announces the end; then take a last snapshot at the end of a step.

    ::

        with casnap.on_preemption(store, app_state, within=30) as preemption:
            for step in range(start, steps):
                train(step)
                if preemption.step(step):
                    break

    The handler only sets a flag, and calls the handler that was there before. In a forked child
    only that earlier handler acts. All ranks call this function together; one signal to one of them
    is enough. After the signal, :meth:`Preemption.step` waits for a pending ``async_take``, then
    takes a last snapshot. If this snapshot is not durable in time, a warning is logged, and
    :attr:`Preemption.snapshot` stays None. A second signal changes nothing.

    After a signal, an error may end the ``with``, for example if the workers of a data loader got
    the signal too. A warning then says whether a last snapshot was taken; see
    :meth:`Preemption.batches`.

    Args:
        store: The store.
        app_state: The state to take.
        within: How long after the first signal to wait for the last snapshot: seconds, or a text
            such as ``"90s"``.
        signals: The signals.
        every: With many ranks, about how many seconds pass until the ranks agree again. That is one
            small collective, on a group of its own; other steps only count.
        name: The name of the last snapshot. It replaces a snapshot of the same name.
        pg: The process group whose ranks take together; by default the whole world.

    Returns:
        The object whose :meth:`Preemption.step` to call after each step. Its ``close()``, or the
        end of the ``with``, restores the earlier handlers.

    Raises:
        CasnapError: This is not the main thread.
        ValueError: ``within`` or ``every`` is not above 0, or there is no such signal.
        OSError: A signal cannot be handled, such as SIGKILL.
    """
    within_seconds, every_seconds = (
        seconds_of(option, value, above_zero=True)
        for option, value in (("within", within), ("every", every))
    )
    return Preemption(store, app_state, within_seconds, signals, every_seconds, name, pg)
