"""Restores on more or fewer ranks: what each rank gets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from casnap import RNGState, Snapshot, StateDict
from casnap.errors import MismatchError
from casnap.restore.restore_report import RestoreReport
from tests.support.ranks import Worlds

COMMON = ("model", "optim", "progress")
OWN = ("loader", "rng")


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def state_of(value: float) -> dict[str, Any]:
    """Return a state in which all is filled with a value, or is of the rank and the value."""
    rank = rank_of()
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(100, 300))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    torch.manual_seed(int(value) * 100 + rank)
    loader = StateDict(position=int(value) * 100 + rank, order=torch.full((5000,), value + rank))
    return {
        "rng": RNGState(),
        "model": model,
        "optim": optimizer,
        "loader": loader,
        "progress": StateDict(step=value, losses=[value, torch.tensor(value)]),
    }


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return all that a state holds in a form that can be compared."""

    def listed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {k: listed(v) for k, v in value.items()}
        return [listed(v) for v in value] if isinstance(value, list | tuple) else value

    return {key: listed(dict(value.state_dict())) for key, value in state.items()}


def take(path: str) -> dict[str, Any]:
    state = state_of(1.0)
    Snapshot.take(path, state)
    return plain(state)


def restore(path: str, keys: tuple[str, ...], strict: bool, read_once: bool = True) -> Any:
    """Restore some keys of a fresh state; return what it was, what it is now, and the report."""
    state = state_of(2.0)
    before = plain(state)
    try:
        some = {key: state[key] for key in keys}
        outcome: Any = Snapshot(path).restore(some, strict, read_once=read_once)
    except MismatchError as e:
        outcome = str(e)
    return before, plain(state), outcome


@pytest.fixture(scope="module")
def taken(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the path of a snapshot that three ranks took, and what each had."""
    path = str(tmp_path_factory.mktemp("elastic") / "store/s")
    return path, world(3).run(take, path)


def test_each_rank_gets_its_own_back(world: Worlds, taken: Any) -> None:
    path, had = taken
    for (_, after, report), mine in zip(
        world(3).run(restore, path, COMMON + OWN, True), had, strict=True
    ):
        assert after == mine
        assert report == RestoreReport()


@pytest.mark.parametrize(
    ("keys", "read_once"), [((*COMMON, *OWN), True), (("loader", "model"), False)], ids=str
)
def test_what_belongs_to_ranks_stands_in_the_way_of_a_new_rank(
    world: Worlds, taken: Any, keys: tuple[str, ...], read_once: bool
) -> None:
    path, _ = taken
    for before, after, error in world(4).run(restore, path, keys, True, read_once):
        assert isinstance(error, str)
        assert "rank 3 is new" in error
        assert "    loader is kept for ranks 0, 1 and 2 alone; rank 3 is new" in error
        assert 'Pass new_ranks="keep"' in error
        assert "strict=False" not in error
        assert "model is" not in error
        assert "rng" not in error
        assert after == before


def restore_generators(path: str, options: Any) -> tuple[Any, Any]:
    """Restore what README restores, and a generator; return the new states, and the report."""
    state = state_of(2.0)
    del state["loader"]
    state["sampler"] = torch.Generator().manual_seed(rank_of())
    random = [torch.get_rng_state(), state["sampler"].get_state()]
    try:
        report: Any = Snapshot(path).restore(state, **options)
    except MismatchError as e:
        report = str(e)
    kept = [torch.get_rng_state(), state["sampler"].get_state()]
    return list(map(torch.equal, random, kept)), report


def take_generators(path: str) -> None:
    state = state_of(1.0)
    del state["loader"]
    Snapshot.take(path, {**state, "sampler": torch.Generator().manual_seed(99 + rank_of())})


def test_a_new_rank_keeps_its_own_generators(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    world(2).run(take_generators, path)
    told = [f"{key} is kept for ranks 0 and 1 alone; rank 2 is new" for key in ("rng", "sampler")]
    for rank, (kept, report) in enumerate(world(3).run(restore_generators, path, {})):
        assert report == RestoreReport(new_ranks=told, environment=["2 → 3 ranks"])
        assert not report
        assert kept == [rank == 2] * 2
    for strict in (True, False):
        options = {"strict": strict, "new_ranks": "error"}
        for kept, error in world(3).run(restore_generators, path, options):
            assert [line.strip() for line in error.splitlines()[2:4]] == told
            assert kept == [True, True]


def restore_renamed(path: str) -> str:
    model, generator = nn.Linear(100, 300), RNGState()
    with pytest.raises(MismatchError) as caught:
        Snapshot(path).restore({"model": model, "rng": generator})
    return str(caught.value)


def test_what_does_not_fit_is_told_without_the_generators(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    world(1).run(take_generators, path)
    for error in world(2).run(restore_renamed, path):
        assert "missing in the snapshot (2):\n    model/bias\n    model/weight\n" in error
        assert "rng" not in error
        assert "new_ranks" not in error


def test_new_ranks_are_kept_or_an_error(tmp_path: Path) -> None:
    snapshot = Snapshot.take(tmp_path / "store/s", {"progress": StateDict(step=1)})
    with pytest.raises(ValueError, match="new_ranks is 'keep' or 'error'; got 'drop'"):
        snapshot.restore({}, new_ranks="drop")  # type: ignore[arg-type]


class Resetting:
    """Forgets what it has before it reads what it is given."""

    def __init__(self, value: float) -> None:
        self.own, self.common = torch.full((3,), value), torch.full((3,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own, "common": self.common}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.zero_()
        self.common.zero_()
        self.own += state["own"]
        self.common += state["common"]


class Counted(nn.Linear):
    """A layer with a buffer, and an extra state, of which a part is the rank's."""

    def __init__(self, value: float) -> None:
        super().__init__(6, 6, bias=False)
        nn.init.constant_(self.weight, value)
        self.register_buffer("seen", torch.tensor(value + rank_of()))
        self.register_buffer("scale", torch.tensor(value))
        self.extra = {"rank": value + rank_of(), "all": value}

    def get_extra_state(self) -> dict[str, float]:
        return self.extra

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.extra = state


def mixed(value: float) -> dict[str, Any]:
    """Return a state in whose keys some is everyone's, and some is of the rank."""
    own = value + rank_of()
    model = Counted(value)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = [nn.Parameter(torch.tensor([w])) for w in (own, value)]
    optimizer = torch.optim.SGD(weights, lr=value, momentum=0.9)
    if value == 1:  # a new optimizer has no moments
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer.step()
    progress = StateDict(
        step=value,
        data={"shard": own, "epoch": value, "seen": [value, own]},
        **{f"of rank {rank_of()}": value},
    )
    return {"model": model, "optim": optimizer, "progress": progress, "other": Resetting(value)}


def mixed_values(state: dict[str, Any]) -> dict[str, Any]:
    model, optimizer, progress, other = state.values()
    moments = [moment["momentum_buffer"] for moment in optimizer.state.values()]
    return {
        "weight": model.weight.full_tensor().unique().tolist(),
        "buffers": [model.seen.item(), model.scale.item()],
        "extra": model.extra,
        "lr": optimizer.param_groups[0]["lr"],
        "moments": [moment.item() for moment in moments],
        "progress": dict(progress),
        "other": [other.own.tolist(), other.common.tolist()],
    }


def take_mixed(path: str) -> None:
    state = mixed(1.0)
    state["other"].own += rank_of()
    Snapshot.take(path, state)


def restore_mixed(path: str, options: Any) -> tuple[Any, Any]:
    state = mixed(5.0)
    before = mixed_values(state)
    try:
        report: Any = Snapshot(path).restore(state, **options)
    except MismatchError as e:
        assert mixed_values(state) == before
        report = str(e)
    return mixed_values(state), report


@pytest.mark.parametrize("options", [{"strict": False}, {"new_ranks": "keep"}], ids=str)
def test_a_new_rank_gets_what_is_everyones_in_a_key_too(
    world: Worlds, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = str(tmp_path / "store/s")
    world(2).run(take_mixed, path)
    results = world(3).run(restore_mixed, path, options)
    for rank, (values, report) in enumerate(results):
        is_new = rank == 2
        own = 5.0 + rank if is_new else 1.0 + rank
        assert values["weight"] == [1.0]
        assert values["buffers"] == [own, 1.0]
        assert values["extra"] == {"rank": own, "all": 1.0}
        assert values["lr"] == 1.0
        assert values["moments"] == ([1.0] if is_new else [own, 1.0])
        assert values["progress"]["step"] == 1.0
        assert values["progress"]["data"] == {"shard": own, "epoch": 1.0, "seen": [1.0, own]}
        assert values["other"] == [[5.0 if is_new else own] * 3, [1.0] * 3]
        assert report.new_ranks == [
            f"{what} kept for ranks 0 and 1 alone; rank 2 is new"
            for what in (
                "model/_extra_state/rank, model/seen are",
                "optim/state/0/momentum_buffer is",
                "progress/data/seen/1, progress/data/shard, progress/of rank 0 and 1 more of "
                "progress are",
                "other/own is",
            )
        ]
        assert not report
    for _, error in world(4).run(restore_mixed, path, {}):
        assert "model/seen are kept for ranks 0 and 1 alone; ranks 2 and 3 are new" in error


def other_lengths(value: float, length: int) -> dict[str, Any]:
    losses = [value] * length
    if losses:
        losses[-1] += rank_of()
    return {"progress": StateDict(step=value, losses=losses, deep={"losses": [losses], "n": value})}


def take_lengths(path: str) -> None:
    Snapshot.take(path, other_lengths(1.0, 3))


def restore_lengths(path: str, length: int) -> tuple[Any, Any]:
    state = other_lengths(5.0, length)
    report = Snapshot(path).restore(state, strict=False)
    return dict(state["progress"]), report


@pytest.mark.parametrize("length", [2, 3])
def test_a_list_that_lacks_an_element_stays_as_it_is(
    world: Worlds, tmp_path: Path, length: int
) -> None:
    path = str(tmp_path / "store/s")
    world(2).run(take_lengths, path)
    progress, report = world(3).run(restore_lengths, path, length)[2]
    losses = [1.0, 1.0, 7.0] if length == 3 else other_lengths(5.0, length)["progress"]["losses"]
    if length == 2:
        losses[-1] += 2
    assert progress == {"step": 1.0, "losses": losses, "deep": {"losses": [losses], "n": 1.0}}
    (told,) = report.new_ranks
    assert told.endswith("are kept for ranks 0 and 1 alone; rank 2 is new")


@pytest.mark.parametrize("size", [1, 2])
def test_fewer_ranks_leave_the_rest_behind(world: Worlds, taken: Any, size: int) -> None:
    path, had = taken
    results = world(size).run(restore, path, COMMON + OWN, True)
    for (_, after, report), mine in zip(results, had, strict=False):
        assert after == mine
        assert report.left_behind == [f"{r}/{key}" for r in range(size, 3) for key in OWN]
        assert not report


def grow_and_shrink(last: str, name: str) -> None:
    """Take with what is there on each number of ranks, as a job does that changes its size."""
    state = {key: value for key, value in state_of(2.0).items() if key in COMMON}
    Snapshot(last).restore(state)
    Snapshot.take(name, state)


def test_a_job_that_changes_its_size_keeps_its_state(
    world: Worlds, taken: Any, tmp_path: Path
) -> None:
    path, had = taken
    sizes = [2, 4, 1, 3]
    manifests = [Snapshot(path).contents.manifest.shared]
    for size in sizes:
        name = f"{Path(path).parent}/again-{size}"
        world(size).run(grow_and_shrink, path, name)
        path = name
        manifests.append(Snapshot(path).contents.manifest.shared)
    assert all(m == {key: manifests[0][key] for key in COMMON} for m in manifests[1:])
    _, after, _ = restore(path, COMMON, True)
    assert {key: after[key] for key in COMMON} == {key: had[0][key] for key in COMMON}


# --- keys that not all ranks ask for ------------------------------------------------------------


def restore_what_i_like(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    rank = dist.get_rank()
    state = state_of(2.0)
    keys = [("model", "loader", "rng"), ("rng", "optim", "model"), (), ("progress",)][rank]
    before = plain(state)
    Snapshot(path).restore({key: state[key] for key in keys})
    after = plain(state)
    return {key: after[key] for key in keys}, {
        key: (after[key], before[key]) for key in state if key not in keys
    }


def test_ranks_may_ask_for_different_keys_in_any_order(world: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "store/s")
    had = world(4).run(take, path)
    for (asked, left), mine in zip(world(4).run(restore_what_i_like, path), had, strict=True):
        assert asked == {key: mine[key] for key in asked}
        for after, before in left.values():
            assert after == before


def restore_what_differs(path: str, differing: dict[str, Any]) -> str:
    """Restore, with something else on one rank."""
    state = state_of(2.0)
    if rank_of() == 1:
        state |= differing
    before = plain(state)
    with pytest.raises(MismatchError) as caught:
        Snapshot(path).restore(state)
    assert plain(state) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("differing", "said"),
    [
        ({"other": StateDict()}, "other"),
        (
            {"model": nn.Sequential(nn.Linear(3, 2), nn.Linear(100, 301))},
            "(301, 100) here, (300, 100) in the snapshot",
        ),
    ],
    ids=["a key", "a shape"],
)
def test_what_does_not_fit_on_one_rank_is_named_on_all(
    world: Worlds, taken: Any, differing: dict[str, Any], said: str
) -> None:
    path, _ = taken
    for error in world(3).run(restore_what_differs, path, differing):
        assert said in error


# --- a module without an app state --------------------------------------------------------------


class Halving(nn.Linear):
    """A layer that changes what it loads."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._register_load_state_dict_pre_hook(self.halve)

    def halve(self, values: dict[str, Any], prefix: str, *_: Any) -> None:
        values[f"{prefix}weight"] = 2 * values[f"{prefix}weight"] / 2


def forward_and_load(path: str) -> None:
    """From the first forward on FSDP2 hooks into loads, and leaves weights whole."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 400), nn.Linear(400, 40))
    Snapshot.take(path, {"model": base})
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.ones(2, 400)
    for load in ("load_into", "restore"):
        wrapped = checkpoint_wrapper(nn.Linear(300, 400))
        target = nn.Sequential(nn.Linear(400, 300), wrapped, Halving(400, 40))
        for layer in target[1:]:
            fully_shard(layer, mesh=mesh)
        fully_shard(target, mesh=mesh)
        with torch.no_grad():
            target(x)
            if load == "restore":
                Snapshot(path).restore({"model": target})
            else:
                Snapshot(path).load_into(target)
            assert torch.equal(target(x), base(x))
            target.reshard()
            assert torch.equal(target(x), base(x))


def test_weights_that_are_gathered_are_loaded(world: Worlds, tmp_path: Path) -> None:
    world(2).run(forward_and_load, str(tmp_path / "store/base"))
