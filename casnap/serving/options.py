"""The options and reports of pulls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from casnap.extending import Size, bytes_of, count_of, seconds_of

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that tensors are cast from and to."""
_SEPARATED = re.compile(r"s([^\w\s\\])((?:\\.|(?!\1).)+)\1((?:\\.|(?!\1).)*)\1(g?)")


@dataclass(frozen=True, kw_only=True)
class PullOptions:
    r"""Which snapshot to pull, and how its folder looks.

    Args:
        tag: Only snapshots with this tag.
        match: Only snapshots whose name, below the folder that is pulled from, this glob matches.
            ``*`` crosses ``/``.
        path: The part of the snapshot that holds the weights; None for all of it. The names of
            tensors are the keys below it, joined by dots.
        rename: Changes of names as sed has them, such as ``s/^module\.//``, made in this order.
            The patterns are Python's.
        dtype: Cast tensors of floats to this dtype, such as ``bfloat16``. They are no longer those
            of the training, bit for bit, and the version file says so.
        tied: Tensors to store only under another name with equal bytes, by their new names. Not for
            the head of a model in vLLM on CPUs, which keeps its old one when it reloads then.
        max_shard_size: The most bytes of a file, if a tensor fits. More are shards with an index.
        keep: How many versions to keep, the current one included.
        patches: Note in each version what leads to it from the one before, so that engines which
            take patches need not wait until both were compared.
        in_place: Make a real folder of one version, and write into its files what has changed, so
            that the disk needs no room for two. Who reads them meanwhile, or has mapped them, sees
            a mix. ``keep`` means nothing then.
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
        """What a version depends on, besides the snapshot."""
        names = ("path", "rename", "dtype", "tied", "max_shard_size")
        values = {name: getattr(self, name) for name in names}
        return {n: list(v) if n in ("rename", "tied") else v for n, v in values.items()}


@dataclass(frozen=True, kw_only=True)
class FollowerOptions:
    """Which snapshots a :class:`Follower` follows, and how.

    Args:
        tag: Only snapshots with this tag. :meth:`casnap.Store.publish` moves it.
        match: Only snapshots whose name, below the folder, this glob matches.
        path: Where the weights are in a snapshot, as for :meth:`casnap.Snapshot.load_into`.
        rename: The names in the target for those of the snapshot: a mapping, or a function.
        strict: Whether it is an error if the snapshot or the target has a name that the other one
            has not.
        every: Ranks agree at every so-many-th forward.
        timeout: Seconds that a rank waits for another; and that a version waits until forwards have
            ended, while others wait for it. Then these go on, and it is tried again. By default
            600 and 60.
        notes: Whether to note in the store which version is staged and served here, for
            :meth:`casnap.Store.wait_served`. Of several ranks, one does.
    """

    tag: str | None = None
    match: str | None = None
    path: str = "model"
    rename: Mapping[str, str] | Callable[[str], str | None] | None = None
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
    """What a pull did.

    Attributes:
        folder: The folder of the version that is current now, without links.
        snapshot: The full name of its snapshot.
        commit: The commit id of the snapshot.
        number: The number of the root that published it by the tag, or else committed it: what
            ``Store.wait_served`` waits for.
        published_time: When that was, in seconds since the epoch, by the clock of who did it.
        switched: Whether another version was current before, or none.
        changed: The tensors that the version before did not have, or not with these bytes.
        tensors: How many tensors there are.
        total_bytes: The bytes of all files.
        linked_bytes: Those of files that are hard links of the version before, or stay in place.
        copied_bytes: Those of tensors that were copied from it, or stay in place.
        fetched_bytes: Those of tensors that needed the store: in it, deltas are smaller.
        received_bytes: What came from the store for that: chunks as they are stored, deltas above
            all, nodes of trees, parts of the index; and what other threads read there meanwhile.
        left_out: The paths of values that safetensors cannot hold.
        equal: Tensors with the bytes of an earlier name, and that name: perhaps tied weights.
        seconds: How long it took.
        written_bytes: Those of tensors that were written: copied or fetched, and not there already.
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
    """What happened while a store was followed.

    Attributes:
        event: ``switched``: another version is current; ``called``: ``on_version`` has returned;
            ``failed``: a pull failed; ``call_failed``: ``on_version`` did. Both are tried again.
        report: The last pull; None if there was none.
        error: What failed.
    """

    event: Literal["switched", "called", "failed", "call_failed"]
    report: PullReport | None = None
    error: str | None = None
