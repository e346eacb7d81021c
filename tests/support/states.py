"""States of every storable kind, as Hypothesis strategies."""

from __future__ import annotations

import datetime
import enum
import pathlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

texts = st.text(st.characters(exclude_categories=()), max_size=5)
primitives = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.complex_numbers()
    | texts
    | st.sampled_from(["True", "None", "1", "nan", "a/b", "a%b", "1%int", "(1, 2)", "torch.int8"])
    | st.binary(max_size=5)
    | st.sampled_from([torch.float32, torch.int8])
)
keys = st.recursive(primitives, lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4)


class Color(enum.Enum):
    RED = "r"
    BLUE = 2
    CRIMSON = "r"  # noqa: PIE796 - an alias is meant


class Mode(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: object
    second: object = None


Plain = namedtuple("Plain", ["x", "class_"])

singles = primitives | st.sampled_from(
    [
        bytearray(b"ab"),
        range(3),
        range(-(2**70), 2**70, 3),
        slice(1, None, 2),
        torch.device("cuda:1"),
        torch.device("cpu"),
        torch.strided,
        torch.channels_last,
        torch.per_tensor_affine,
        TorchVersion("2.4.0"),
        Color.CRIMSON,
        Color.BLUE,
        Mode.A | Mode.B,
        Mode(0),
        Level.LOW,
        datetime.timedelta(-3, 4, 5),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
        datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
        pathlib.Path("/a/b"),
        torch.Size([2, 3]),
        torch.ones(2, 3),
        torch.zeros(()),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(2)),
        np.arange(6).reshape(2, 3),
        np.float32(2.5),
        np.str_("ü"),
    ]
)
elements = st.recursive(
    primitives | st.sampled_from([*Color, Mode.A | Mode.B]),
    lambda e: st.lists(e, max_size=3).map(tuple) | st.frozensets(e, max_size=3),
    max_leaves=4,
)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, children, max_size=4)
    lists = st.lists(children, max_size=4)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda d: defaultdict(list, d)),
        dicts.map(lambda d: defaultdict(None, d)),
        dicts.map(Counter),
        lists,
        lists.map(tuple),
        lists.map(deque),
        lists.map(lambda x: deque(x, 7)),
        st.sets(elements, max_size=4),
        st.frozensets(elements, max_size=4),
        st.builds(Pair, children, children),
        st.builds(Plain, children, children),
    )


states = st.recursive(singles, containers, max_leaves=12)
