"""What every test gets: a cache of its own, a Hypothesis profile, and no GPU test without a GPU."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakSet

import pytest
from hypothesis import HealthCheck, settings

from casnap import NewStore, Store
from casnap.backends import LocalBackend
from casnap.mirror.mirror import Mirror
from tests.support import servers, warm
from tests.support.ranks import Pool, Worlds
from tests.support.sweep import STEP
from tests.support.torches import HAS_DCP

# Read by torch when it is imported. Its own threads spin while they wait, and tests share cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Read by the C library when a process starts: workers of xdist, and all that they start. Its memory
# has huge pages then, without which a fork of a worker of 900 MB takes 60 ms of processor time.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
# Most tests say themselves when garbage is collected. Those of the automatic collector turn it on;
# CASNAP_GC=auto does so for all.
os.environ.setdefault("CASNAP_GC", "off")

# App states of tests lack what these tests do not need; tests of hints turn them on.
logging.getLogger("casnap.hints").setLevel(logging.ERROR)

settings.register_profile(
    "default",
    deadline=None,  # a shared disk is slow at times, and no example is at fault then
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("soak", settings.get_profile("default"), max_examples=2000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)

# These need an accelerator, which a process keeps. tests/test_on_a_device.py gives them one.
collect_ignore = [] if os.environ.get("CASNAP_TEST_DEVICE") else ["device"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the tests of what needs a newer torch than this one."""
    if HAS_DCP or collection_path.suffix != ".py":
        return None
    is_of_dcp = re.search(r"^from casnap\.integrations\.dcp ", collection_path.read_text(), re.M)
    return True if is_of_dcp else None


MEMORY = Path("/dev/shm")
ROOM = 4 << 30
"""Bytes that all tests of a session may write."""


@pytest.fixture
def collected_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing collected by itself, for tests that count what collections do."""
    monkeypatch.setenv("CASNAP_GC", "off")


@pytest.fixture
def unannounced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have collectors see no take under way, as where a file system has no locks."""
    monkeypatch.setattr(LocalBackend, "announced_bases", lambda *_: [])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give tests folders in memory, if there is room: on a disk they would mostly wait for it.

    ``--basetemp`` names another place. A test that is about a disk asks for `disk_path`.
    """
    # A script starts its background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if warm.FOLDER not in os.environ:  # a worker has that of the run
        place = TemporaryDirectory(prefix="casnap-tests-server-")
        os.environ[warm.FOLDER] = place.name
        config.add_cleanup(place.cleanup)
    if config.option.basetemp is None and os.access(MEMORY, os.W_OK):
        if shutil.disk_usage(MEMORY).free < ROOM:
            return
        folder = TemporaryDirectory(prefix="casnap-tests-", dir=MEMORY, ignore_cleanup_errors=True)
        config.option.basetemp = f"{folder.name}/session"
        config.add_cleanup(folder.cleanup)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store of small chunks, so that a few hundred kilobytes are several of them."""
    return Store(tmp_path / "store", create=NewStore(chunk_size=64 << 10)).make()


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """Return an empty folder that is not in memory, for what only a disk does: O_DIRECT, say."""
    with TemporaryDirectory(prefix="casnap-tests-") as folder:
        yield Path(folder).resolve()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is imported, all of torch with it: it stays to the end.

    To look through it again and again took a third of the time that collecting tests takes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()


_modules = 0


def _freeze() -> None:
    global _modules
    _modules = len(sys.modules)
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Nor look through what a test was the first to import, such as the compiler of torch."""
    if len(sys.modules) > _modules + 100:
        gc.collect()
        _freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_gpu_tests(items)
    # What takes longest begins first: at the end nobody else would have anything to do.
    items.sort(key=lambda item: "test_on_a_device.py" not in item.nodeid)
    if STEP > 1:
        _leave_some_cases(config, items)


def _skip_gpu_tests(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where CUDA is not; torch is imported only if there is such."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def _leave_some_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some cases of each test that is marked ``sampled``; ``make soak`` runs all."""
    seen: Counter[str] = Counter()
    left, deselected = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        number = seen[function]
        seen[function] += 1
        chosen = not item.get_closest_marker("sampled") or _is_chosen(number)
        (left if chosen else deselected).append(item)
    items[:] = left
    if deselected:
        config.hook.pytest_deselected(items=deselected)


def _is_chosen(number: int) -> bool:
    """Whether to keep a case: the first one, and then one of four in all.

    Each fourth one would often have the same value of a parameter, so the digits are added up.
    """
    digits = 0
    while number:
        number, digit = divmod(number, STEP)
        digits += digit
    return digits % STEP == 0


@pytest.fixture(scope="session", autouse=True)
def _cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the index cache of the session, child processes included, out of the user's.

    One folder serves all tests: the cache is keyed by store id, and each test makes its stores.
    """
    folder = tmp_path_factory.mktemp("casnap-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CASNAP_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module", autouse=True)
def _caches_of_a_module(_cache_dir: Path) -> Iterator[None]:
    """Remove what a module leaves in the cache: each new store would look at all of it."""
    yield
    for folder in _cache_dir.iterdir():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _mirrors_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the mirrors of a test: another one might find what they log of a folder that is gone."""
    began: WeakSet[Mirror] = WeakSet()
    monkeypatch.setattr("casnap.mirror.mirror._all", began)
    yield
    for mirror in list(began):
        mirror.stop()


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty index cache that this test alone uses, and that it may delete or damage."""
    folder = tmp_path / "casnap-cache"
    folder.mkdir()
    monkeypatch.setenv("CASNAP_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def world(_cache_dir: Path, request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """Return the worlds of a module by their size; see ``tests/support/ranks.py``.

    They end with it: each group that a rank has met in keeps a thread of gloo that polls.
    """
    with Pool(request.module.__name__) as pool:
        yield pool.world


@pytest.fixture(scope="session")
def server_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], servers.Server]]:
    """Return the server of a kind, which all workers of this run share, started on first use."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    found: dict[str, servers.Server] = {}
    with ExitStack() as stack:

        def server_of(kind: str) -> servers.Server:
            if kind not in found:
                found[kind] = stack.enter_context(servers.shared(kind, folder))
            return found[kind]

        yield server_of


@pytest.fixture
def bucket(server_of: Callable[[str], servers.Server]) -> Iterator[servers.Bucket]:
    """Return an empty bucket of SeaweedFS, which this test alone uses."""
    with server_of("seaweedfs").bucket() as bucket:
        yield bucket
