"""``install()`` redirects DCP's bare paths below a store, however they are written; no others."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from casnap import Store
from casnap.errors import FileFormatError, StateError, StoreError
from casnap.integrations.dcp import CasnapReader, install, uninstall
from casnap.integrations.dcp.redirect import FsspecReader, FsspecWriter
from casnap.integrations.folders import prune_missing_folders
from tests.support.bitwise import assert_same
from tests.support.dcp_saves import files_of_dcp
from tests.support.faults import backend_faults, in_child
from tests.support.launched import launched

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is ",  # DCP says once in each call that there is no process group
    "ignore:TypedStorage is deprecated",  # of DCP's own writer, before torch 2.13
)


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    uninstall()


def state() -> dict[str, Any]:
    return {"x": torch.arange(5), "step": 3}


def loaded(**how: Any) -> dict[str, Any]:
    found = {"x": torch.zeros(5, dtype=torch.int64), "step": 0}
    dcp.load(found, **how)
    return found


NO_REASON = "metadata is (not )?None"
"""A pattern: all that DCP says of any error of a reader, in torch 2.9 and 2.10."""


def names(folder: Path) -> list[str]:
    return [snapshot.name for snapshot in Store(folder, create=False).snapshots()]


# --- paths ------------------------------------------------------------------------------------

WRITTEN: dict[str, Callable[[Path], tuple[Any, str]]] = {
    "str": lambda top: (f"{top}/ckpts/a", "a"),
    "Path": lambda top: (top / "ckpts/a", "a"),
    "nested": lambda top: (f"{top}/ckpts/checkpoint_0/optimizer_0", "checkpoint_0/optimizer_0"),
    "a slash at the end": lambda top: (f"{top}/ckpts/run/a/", "run/a"),
    "slashes": lambda top: (f"{top}//ckpts/.//run//a", "run/a"),
    "..": lambda top: (f"{top}/ckpts/gone/../a", "a"),
    "relative": lambda top: ("ckpts/a", "a"),
    "relative ..": lambda top: ("../here/ckpts/a", "a"),
    "a link to the store": lambda top: (top / "to-ckpts/run/a", "run/a"),
    "a link in the store": lambda top: (top / "ckpts/latest/a", "run/a"),
    "a link out of the store": lambda top: (top / "ckpts/large/a", "large/a"),
    "file": lambda top: (f"file://{top}/ckpts/a", "a"),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_path_below_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    top = tmp_path / "here"
    for folder in ("ckpts/run", "elsewhere"):
        (top / folder).mkdir(parents=True)
    for link, target in (
        ("to-ckpts", "ckpts"),
        ("ckpts/latest", "run"),
        ("ckpts/large", "../elsewhere"),
    ):
        (top / link).symlink_to(target)
    monkeypatch.chdir(top)
    install(top / "ckpts")
    path, name = WRITTEN[how](top)

    dcp.save(state(), storage_writer=FileSystemWriter(path))
    dcp.save(state(), storage_writer=FsspecWriter(path=path, thread_count=2))
    dcp.save(state(), checkpoint_id=path)
    assert names(top / "ckpts") == [name]
    for reader in (FileSystemReader(path), FsspecReader(path)):
        assert_same(loaded(storage_reader=reader), state())
    assert_same(loaded(checkpoint_id=path), state())
    assert files_of_dcp(tmp_path) == []


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    """Trainers make one to the latest."""
    install(tmp_path)
    dcp.save(state(), checkpoint_id=tmp_path / "run/a")
    (tmp_path / "run/latest").symlink_to("a")
    (tmp_path / "outside").symlink_to("run/latest")
    for link in ("run/latest", "outside"):
        assert_same(loaded(checkpoint_id=tmp_path / link), state())


@pytest.mark.filterwarnings("ignore:fsync not supported")  # torch 2.15, of a file in memory
def test_paths_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ckpts").mkdir()
    install(tmp_path / "ckpts")
    monkeypatch.chdir(tmp_path / "ckpts")
    for path in ("../ckpts2/a", tmp_path / "a", "../b", "../ckpts/../c", "memory://run/a"):
        dcp.save(state(), checkpoint_id=path)
        assert_same(loaded(checkpoint_id=path), state())
    assert names(tmp_path / "ckpts") == []
    assert files_of_dcp(tmp_path / "ckpts") == []
    assert len([path for path in files_of_dcp(tmp_path) if path.name == ".metadata"]) == 4


def test_two_stores_and_one_below_another(tmp_path: Path) -> None:
    for folder in ("one/inner", "one", "two"):
        install(tmp_path / folder)
    for path in ("one/a", "one/inner/b", "two/inner/c"):
        dcp.save(state(), checkpoint_id=tmp_path / path)
        assert_same(loaded(checkpoint_id=tmp_path / path), state())
    assert names(tmp_path / "one") == ["a"]
    assert names(tmp_path / "one/inner") == ["b"]
    assert names(tmp_path / "two") == ["inner/c"]


def test_a_view_of_a_store(tmp_path: Path) -> None:
    Store(tmp_path).make()
    install(tmp_path / "run")
    dcp.save(state(), checkpoint_id=tmp_path / "run/a")
    dcp.save(state(), checkpoint_id=tmp_path / "other/a")
    assert names(tmp_path) == ["run/a"]
    assert (tmp_path / "other/a/.metadata").exists()


def test_the_folder_of_the_store_needs_a_name(tmp_path: Path) -> None:
    """Nothing is written beside the store's own files; a name may come later."""
    install(tmp_path)
    for how in ({"checkpoint_id": tmp_path}, {"storage_writer": FileSystemWriter(tmp_path)}):
        with pytest.raises((CheckpointException, StateError), match=r"store|no name"):
            dcp.save(state(), **how)
    assert files_of_dcp(tmp_path) == []
    for name in ("a", "b"):
        writer, reader = FileSystemWriter(tmp_path), FileSystemReader(tmp_path)
        dcp.save(state(), checkpoint_id=tmp_path / name, storage_writer=writer)
        found = loaded(checkpoint_id=tmp_path / name, storage_reader=reader)
        assert_same(found, state())
    assert names(tmp_path) == ["a", "b"]


def test_what_dcp_saved_in_the_folder_before_it_was_a_store(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    install(tmp_path)
    assert_same(loaded(checkpoint_id=tmp_path), state())


# --- arguments --------------------------------------------------------------------------------


def test_arguments_of_the_writer_count_by_position_too(tmp_path: Path) -> None:
    install(tmp_path)
    dcp.save({"x": 1}, checkpoint_id=tmp_path / "a")
    for writer in (
        FileSystemWriter(tmp_path / "a", True, True, 1, 1, False, False),
        FsspecWriter(tmp_path / "a", overwrite=False),  # its place differs by version
        FileSystemWriter(path=tmp_path / "a", overwrite=False),
    ):
        with pytest.raises(CheckpointException, match="SnapshotExistsError"):
            dcp.save({"x": 2}, storage_writer=writer)
    with pytest.raises(TypeError, match="colour"):
        FileSystemWriter(tmp_path / "a", colour="red")  # type: ignore[call-arg]


def test_what_a_writer_would_do_to_the_bytes_is_not_left_out(tmp_path: Path) -> None:
    """An extension may encrypt them."""
    from torch.distributed.checkpoint._extension import ZStandard

    install(tmp_path)
    with pytest.raises(StateError, match=r"_extensions"):
        FileSystemWriter(tmp_path / "a", _extensions=[ZStandard()])


class Plain:
    """A class of the user's, which only pickle can store."""


def test_values_that_need_pickle(tmp_path: Path) -> None:
    """DCP's own writer would pickle them."""
    install(tmp_path)
    with pytest.raises(CheckpointException, match="allow_pickle=True"):
        dcp.save({"o": Plain()}, checkpoint_id=tmp_path / "a")
    install(tmp_path, allow_pickle=True)
    dcp.save({"o": Plain()}, checkpoint_id=tmp_path / "a")
    found: dict[str, Any] = {"o": None}
    dcp.load(found, checkpoint_id=tmp_path / "a")
    assert type(found["o"]) is Plain


# --- classes ----------------------------------------------------------------------------------


class Marked:
    """A base class that makes its objects itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.mark = args
        return made


class Own(FileSystemWriter, Marked):
    pass


def test_subclasses_and_other_bases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for change in (lambda: install(tmp_path), uninstall):
        change()
        made = Own(tmp_path / "a", thread_count=2)
        assert type(made) is Own
        assert made.mark == (tmp_path / "a",)  # type: ignore[attr-defined]
        assert made.thread_count == 2
    assert caplog.text.count("Own is a class of its own, which install() leaves alone") == 1
    dcp.save(state(), storage_writer=Own(tmp_path / "a"))
    assert (tmp_path / "a/.metadata").exists()


class OwnReader(FileSystemReader):
    """As Composer has one, which looks at DCP's files before it reads."""

    def read_data(self, *_: Any) -> Any:
        raise AssertionError


def test_a_subclass_of_a_reader_is_replaced_where_there_is_a_snapshot(tmp_path: Path) -> None:
    install(tmp_path)
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    assert_same(loaded(storage_reader=OwnReader(tmp_path / "a")), state())
    for other in ("b", "packs/a", "../a"):
        assert type(OwnReader(tmp_path / other)) is OwnReader


def test_files_of_dcp_are_for_stores_in_folders(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not in a folder"):
        install("memory://a", dcp_files=True)
    install("memory://a")
    dcp.save(state(), checkpoint_id="memory://a/x")
    assert_same(loaded(checkpoint_id="memory://a/x"), state())
    install(tmp_path, dcp_files=False)
    dcp.save(state(), checkpoint_id=tmp_path / "x")
    assert not (tmp_path / "x/.metadata").exists()


def steps(folder: Path) -> list[int]:
    """Return the steps of whole checkpoints, as scripts that use DCP look for them."""
    return sorted(int(path.parent.name.split("_")[1]) for path in folder.glob("step_*/.metadata"))


def test_a_script_finds_its_last_checkpoint_by_the_metadata_of_dcp(tmp_path: Path) -> None:
    def train(last: int) -> list[int]:
        install(tmp_path)
        done = steps(tmp_path)
        found = {"x": torch.zeros(5, dtype=torch.int64), "step": 0}
        if done:
            dcp.load(found, checkpoint_id=tmp_path / f"step_{done[-1]}")
        made = []
        for step in range(found["step"] + 1, last + 1):
            dcp.save({"x": torch.arange(5) * step, "step": step},
                     checkpoint_id=tmp_path / f"step_{step}")  # fmt: skip
            made.append(step)
        uninstall()
        return made

    assert train(2) == [1, 2]
    assert train(3) == [3]
    assert steps(tmp_path) == [1, 2, 3]
    assert not list(tmp_path.rglob("*.partial"))


def test_without_casnap_those_files_are_no_checkpoint(tmp_path: Path) -> None:
    install(tmp_path)
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    uninstall()
    with pytest.raises(CheckpointException, match=f"snapshot of casnap|{NO_REASON}"):
        loaded(checkpoint_id=tmp_path / "a")
    for name in (".metadata", "__0_0.distcp"):
        for safely in (True, False):
            with pytest.raises(KeyError, match=r"^'casnap: .* snapshot of casnap"):
                torch.load(tmp_path / "a" / name, weights_only=safely)
    # Where casnap is not installed either.
    script = (
        "import pickle, sys; sys.modules['casnap'] = None; pickle.load(open(sys.argv[1], 'rb'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a/.metadata"], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"KeyError: 'casnap: " in done.stderr
    with pytest.raises(FileFormatError, match="is a snapshot of casnap"):
        Store(tmp_path / "b").import_file(tmp_path / "a", "a")
    Store(tmp_path).delete("a")
    with pytest.raises(CheckpointException, match=f"holds no snapshot|{NO_REASON}"):
        loaded(storage_reader=CasnapReader(tmp_path / "a"))


@pytest.mark.parametrize("dcp_files", [False, True])
def test_code_that_deletes_the_folders_of_old_checkpoints(tmp_path: Path, dcp_files: bool) -> None:
    install(tmp_path / "ckpts", dcp_files=dcp_files)
    for step in range(5):
        dcp.save(state(), checkpoint_id=tmp_path / f"ckpts/step_{step}")
        if step >= 2:
            shutil.rmtree(tmp_path / f"ckpts/step_{step - 2}")
    prune_missing_folders(Store(tmp_path / "ckpts"))
    assert names(tmp_path / "ckpts") == ["step_3", "step_4"]


def test_until_that_is_undone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "ckpts", tmp_path / "elsewhere"
    replaced = install(inside)
    assert "torch.distributed.checkpoint.filesystem.FileSystemWriter" in replaced
    dcp.save(state(), checkpoint_id=inside / "a")
    dcp.save(state(), storage_writer=FileSystemWriter(str(inside / "b"), thread_count=2))
    assert_same(loaded(checkpoint_id=str(inside / "b")), state())
    dcp_to_torch_save(inside / "a", tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["x"], state()["x"])
    assert isinstance(FileSystemReader(inside / "a"), CasnapReader)
    dcp.save(state(), checkpoint_id=outside)
    assert (outside / ".metadata").exists()
    before = FileSystemWriter(inside / "c")

    uninstall()
    dcp.save(state(), storage_writer=before)
    assert names(inside) == ["a", "b", "c"]
    dcp.save(state(), checkpoint_id=inside / "d")
    assert (inside / "d/.metadata").exists()
    copied = pickle.loads(pickle.dumps(FileSystemWriter(inside / "e")))
    assert isinstance(copied, FileSystemWriter)


# --- threads and processes --------------------------------------------------------------------


def test_a_fork_saves_too(tmp_path: Path) -> None:
    install(tmp_path)
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    assert in_child(lambda: dcp.save(state(), checkpoint_id=tmp_path / "b")) == 0
    dcp.save({"step": 4}, checkpoint_id=tmp_path / "c")
    assert names(tmp_path) == ["a", "b", "c"]
    assert not Store(tmp_path).check(data=True).damages


def composed(seed: int) -> dict[str, Any]:
    """Return a state as Composer makes it of a model and optimizers of FSDP."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 301), torch.nn.Linear(301, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    rng = {
        "python": random.getstate(),
        "numpy": np.random.RandomState(seed).get_state(),
        "torch": torch.get_rng_state(),
    }
    timestamp = {"Timestamp": {"epoch": seed, "iteration": 0, "batch": 10 * seed}}
    return {
        "state": {
            "model": weights,
            "optimizers": {"AdamW": moments},
            "schedulers": {"LambdaLR": {"last_epoch": seed, "_last_lr": [0.1]}},
            "callbacks": [("CheckpointSaver", {"all_saved_checkpoints_to_timestamp": [timestamp]})],
            "timestamp": timestamp,
            "rank_zero_seed": 17,
            "run_name": "run",
        },
        "rng": [rng] * dist.get_world_size(),
    }


def save_and_load_as_composer(folder: Path) -> None:
    """Make the calls of ``composer.utils.checkpoint`` of mosaicml 0.32.1, which needs torch 2.7."""
    dist.init_process_group("gloo")
    install(folder)
    for epoch in (1, 1, 2):
        state = composed(epoch)
        if dist.get_rank() > 0:
            state.pop("rng")
        place = folder / f"run/ep{epoch}-ba{10 * epoch}"
        place.mkdir(parents=True, exist_ok=True)
        dcp.save(
            state_dict=state,
            storage_writer=dcp.FileSystemWriter(str(place)),
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=None,
        )
        assert (place / f"__{dist.get_rank()}_0.distcp").exists()
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "run/latest").symlink_to("ep1-ba10")
    dist.barrier()
    assert (folder / "run/latest/.metadata").exists()
    reader = OwnReader(str(folder / "run/latest"))
    names = reader.read_metadata().planner_data
    assert {path[0] for path in names.values()} == {"state", "rng"}
    kept = [path for name, path in names.items() if name.startswith("rng.")]
    assert {path[2] for path in kept if len(path) == 3} == {"python", "numpy", "torch"}
    assert {path[1] for path in kept} == set(range(dist.get_world_size()))
    found, wanted = composed(2), composed(1)
    dcp.load(state_dict=found, storage_reader=reader, planner=None)
    assert_same(local(found), local(wanted))
    dist.destroy_process_group()


def local(state: Any) -> Any:
    """Return a state with this rank's parts of tensors."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state.to_local() if hasattr(state, "to_local") else state


def test_the_calls_of_composer(tmp_path: Path) -> None:
    assert launched(2, lambda: save_and_load_as_composer(tmp_path)) == [0, 0]
    store = Store(tmp_path, create=False)
    assert names(tmp_path) == ["run/ep1-ba10", "run/ep2-ba20"]
    assert store["run/ep1-ba10"].stats.new_bytes == 0
    assert files_of_dcp(tmp_path) == []
    assert len([*tmp_path.rglob("*.distcp")]) == 4
    store.delete("run/ep1-ba10")
    with pytest.raises(
        CheckpointException, match=f"holds no snapshot 'run/ep1-ba10'|{NO_REASON}"
    ) as error:
        dcp.load({}, storage_reader=CasnapReader(tmp_path / "run/ep1-ba10"))
    assert "pickle" not in str(error.value)


def save_in_a_process(folder: Path) -> None:
    """Save by relative paths; the process has the working folder of the first."""
    dist.init_process_group("gloo")
    install(folder)
    for step, (place, path) in enumerate(((folder.parent, "ckpts/0"), (folder, "1"))):
        os.chdir(place)
        pending: Any = dcp.async_save(
            {"step": step},
            checkpoint_id=path,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        pending.result()
    dist.destroy_process_group()


@pytest.mark.slow
def test_async_saves_by_a_path_in_a_process_of_dcp(tmp_path: Path) -> None:
    assert launched(1, lambda: save_in_a_process(tmp_path / "ckpts")) == [0]
    assert names(tmp_path / "ckpts") == ["0", "1"]
    assert files_of_dcp(tmp_path) == []


def test_files_of_dcp_where_there_are_no_markers(tmp_path: Path) -> None:
    store = Store(tmp_path, markers=False)
    with pytest.raises(StoreError, match="markers=False"):
        install(store, dcp_files=True)
    install(store)
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    assert_same(loaded(checkpoint_id=tmp_path / "a"), state())
    assert not (tmp_path / "a").exists()


def test_a_handler_saves_within_a_save(tmp_path: Path) -> None:
    """As Lightning does with a sharded strategy: what was under way is saved, as are later ones."""
    install(tmp_path)
    errors: list[BaseException] = []

    def save_at(number: int, _: object) -> None:
        with pytest.raises(CheckpointException) as e:
            dcp.save(state(), checkpoint_id=tmp_path / f"at_{number}")
        errors.append(e.value)

    def save() -> None:
        signal.signal(signal.SIGUSR1, save_at)

        def send() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not errors:
                time.sleep(0.001)

        with backend_faults(0, send, names=["write"]):
            dcp.save(state(), checkpoint_id=tmp_path / "step_1")
        dcp.save(state(), checkpoint_id=tmp_path / "step_2")
        assert "nothing was taken" in str(errors[0])
        assert "pass SLURMEnvironment(auto_requeue=False)" in str(errors[0])
        assert names(tmp_path) == ["step_1", "step_2"]
        assert loaded(checkpoint_id=tmp_path / "step_1")["step"] == 3

    assert in_child(save) == 0
