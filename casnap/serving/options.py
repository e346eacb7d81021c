"""The options and reports of pulls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from casnap.runtime.units import Size, bytes_of, count_of, seconds_of

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that tensors are cast from and to."""
_SEPARATED = re.compile(r"s([^\w\s\\])((?:\\.|(?!\1).)+)\1((?:\\.|(?!\1).)*)\1(g?)")


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    r"""The options of a pull: which snapshot to pull, and how its folder looks.

    Args:
        tag: Only snapshots with this tag.
        match: Only snapshots whose name matches this glob. The name is the part below the folder
            that is pulled from. ``*`` matches ``/`` too.
        path: The part of the snapshot that holds the weights; None for all of it. The names of
            tensors are the keys below it, joined by dots.
        rename: Changes to names, in this order, in the syntax of sed, such as ``s/^module\.//``.
            The patterns are Python's.
        dtype: Cast floating-point tensors to this dtype, such as ``bfloat16``. The tensors are then
            not those of the training bit for bit, and the version file says so.
        tied: Tensors, by their new names, to leave out because another name has equal bytes. Do not
            use it for the head of a model that vLLM serves on CPUs: vLLM would keep its old head
            when it reloads.
        max_shard_size: The most bytes of a file, unless a single tensor has more. Several files are
            shards with an index.
        keep: How many versions to keep, the current one included.
        patches: Put into each version the patches that lead to it from the one before. Engines that
            take patches then need not wait for a comparison of both.
        in_place: Make a real folder of one version, and write changes into its files, so that the
            disk needs no room for two versions. A process that reads these files meanwhile, or has
            mapped them, sees a mix. ``keep`` has no effect then.
    """

    tag: str | None = None
    match: str | None = None
    path: str | None = "model"
    rename: Sequence[str] = ()
    dtype: str | None = None
    tied: Sequence[str] = ()
    max_shard_size: Size = 5_000_000_000
    keep: int = 2
    patches: bool = False
    in_place: bool = False

    def __post_init__(self) -> None:
        for option, value in (("rename", self.rename), ("tied", self.tied)):
            if isinstance(value, str):
                raise TypeError(f"{option} is a list, such as [{value!r}]; got a str")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise ValueError(f"dtype= is one of {', '.join(FLOATS)}; got {self.dtype!r}")
        object.__setattr__(self, "max_shard_size", bytes_of("max_shard_size", self.max_shard_size))
        object.__setattr__(self, "keep", count_of("keep", self.keep))
        if self.patches and self.in_place:
            raise ValueError(
                "patches= lead from the version before, which in_place= writes over; leave out one"
            )
        self.renaming()

    def renaming(self) -> Callable[[str], str]:
        """Return the function that gives tensors their new names.

        Raises:
            ValueError: A change is malformed.
        """
        changes = [_substitution(text) for text in self.rename]

        def renamed(name: str) -> str:
            for pattern, replacement, count in changes:
                name = pattern.sub(replacement, name, count)
            return name

        return renamed

    @property
    def mapping(self) -> dict[str, Any]:
        """The options on which the content of a version depends, by name."""
        names = ("path", "rename", "dtype", "tied", "max_shard_size")
        values = {name: getattr(self, name) for name in names}
        return {n: list(v) if n in ("rename", "tied") else v for n, v in values.items()}


@dataclass(frozen=True, kw_only=True)
class FollowerOptions:
    """The options of a :class:`Follower`: which snapshots it follows, and how.

    Args:
        tag: Only snapshots with this tag. :meth:`casnap.Store.publish` moves it.
        match: Only snapshots whose name below the folder matches this glob.
        path: Where the weights are in a snapshot, as for :meth:`casnap.Snapshot.load_into`.
        rename: A mapping or function from names in the snapshot to names in the target.
        strict: Whether it is an error if only the snapshot, or only the target, has a name.
        every: Ranks agree at each forward whose number is a multiple of this.
        timeout: The seconds that a rank waits for another (by default 600), and that a version
            waits for running forwards to end (by default 60). Forwards that want to begin wait
            meanwhile. After that time they go on, and the version is tried again later.
        notes: Whether to note in the store which version is staged and served here, for
            :meth:`casnap.Store.wait_served`. With several ranks, rank 0 writes the notes.
    """

    tag: str | None = None
    match: str | None = None
    path: str = "model"
    rename: Mapping[str, str] | Callable[[str], str | None] | None = field(default=None, hash=False)
    strict: bool = True
    every: int = 1
    timeout: float | None = None
    notes: bool = True

    def __post_init__(self) -> None:
        if not (self.rename is None or isinstance(self.rename, Mapping) or callable(self.rename)):
            raise TypeError(
                f"rename= is a mapping of names, or a function; got {self.rename!r:.80}"
            )
        object.__setattr__(self, "every", count_of("every", self.every))
        if self.timeout is not None:
            object.__setattr__(self, "timeout", seconds_of("timeout", self.timeout))


def _substitution(text: str) -> tuple[re.Pattern[str], str, int]:
    parts = _SEPARATED.fullmatch(text)
    if parts is None:
        raise ValueError(rf"rename= is like s/^module\.//; got {text!r:.200}")
    separator, pattern, replacement, everywhere = parts.groups()
    try:
        compiled = re.compile(pattern.replace(f"\\{separator}", re.escape(separator)))
        plain = replacement.replace(f"\\{separator}", separator)
        compiled.sub(plain, "")
    except (re.error, IndexError) as e:
        raise ValueError(f"rename={text!r:.200} is not a regular expression: {e}") from e
    return compiled, plain, 0 if everywhere else 1


@dataclass
class PullReport:
    """The outcome of a pull.

    Attributes:
        folder: The folder of the version that is current now, without links.
        snapshot: The full name of its snapshot.
        commit: The commit id of the snapshot.
        number: The number of the root that published the snapshot by the tag, or else committed it.
            ``Store.wait_served`` waits for this number.
        published_time: When that root was put, in seconds since the epoch, by its writer's clock.
        switched: Whether this pull made the version current.
        changed: The tensors that the version before lacked, or held with other bytes.
        tensors: How many tensors the version has.
        total_bytes: The bytes of all files.
        linked_bytes: The bytes of files that are links to the version before, or stay in place.
        copied_bytes: The bytes of tensors that were copied from the version before, or stay in
            place.
        fetched_bytes: The bytes of tensors that the pull read from the store, counted without
            compression and deltas.
        received_bytes: The bytes that the store sent for that: chunks in their stored form, which
            is smaller for deltas, nodes of trees, and parts of the index. Reads of other threads in
            this store count too.
        left_out: The paths of values that safetensors cannot hold.
        equal: The name of each tensor that has the bytes of an earlier one → the name of the
            earliest one: perhaps tied weights.
        seconds: How long the pull took.
        written_bytes: The bytes of tensors that were written. Bytes that stay in place do not
            count.
    """

    folder: str
    snapshot: str
    commit: str
    number: int = 0
    published_time: float = 0.0
    switched: bool = False
    changed: list[str] = field(default_factory=list)
    tensors: int = 0
    total_bytes: int = 0
    linked_bytes: int = 0
    copied_bytes: int = 0
    fetched_bytes: int = 0
    received_bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    equal: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    written_bytes: int = 0


@dataclass(frozen=True)
class FollowEvent:
    """An event while a store is followed, such as a new version or a failure.

    Attributes:
        event: ``switched``: another version is current; ``called``: ``on_version`` has returned;
            ``failed``: a pull has failed, and is tried again; ``call_failed``: ``on_version`` has
            failed, and is called again.
        report: The report of the last pull; None if there was none.
        error: The text of the error, after ``failed`` and ``call_failed``.
    """

    event: Literal["switched", "called", "failed", "call_failed"]
    report: PullReport | None = None
    error: str | None = None
