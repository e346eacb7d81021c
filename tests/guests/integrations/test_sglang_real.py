"""SGLang loads what a follower pulls, while it answers: the real server, on a CPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from casnap.errors import CasnapError
from casnap.integrations.engines import reload_sglang
from casnap.serving import PullOptions
from tests.support.engine_servers import PROMPTS, Answer, Trainer, clients, command_for_sglang
from tests.support.sglang_engines import SglangServer
from tests.support.sglang_server import stand_in
from tests.support.tiny_llamas import llama

pytestmark = [
    pytest.mark.engines,
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("sglang") is None, reason="`make test-sglang` has SGLang"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    stand_in()  # before Transformers is imported
    path = tmp_path_factory.mktemp("served")
    server = SglangServer(trainer_at(path).live, path / "log")
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def trainer_at(path: Path, *, in_place: bool = False) -> Trainer:
    models = [llama(seed) for seed in range(3)]
    return Trainer(path, models, PullOptions(in_place=in_place))


def loaded(server: SglangServer, path: Path, *, in_place: bool = False) -> Trainer:
    """Return a trainer whose first version the server has."""
    trainer = trainer_at(path, in_place=in_place)
    reload_sglang(server.url)(trainer.live.resolve(), [])
    assert trainer.of_last(ask_all(server))
    return trainer


def ask_all(server: SglangServer) -> list[Answer]:
    return [server.ask(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("in_place", [False, True], ids=["link", "in place"])
def test_each_answer_is_of_one_version(
    server: SglangServer, tmp_path: Path, in_place: bool
) -> None:
    trainer = loaded(server, tmp_path, in_place=in_place)
    callback = reload_sglang(server.url)
    with clients(server.ask) as answers:
        for _ in range(2):
            trainer.serve(callback)
    trainer.check(answers, "wait")
    version = f"2@{trainer.store['run/2'].commit_id}"
    for prompt in PROMPTS:
        answer = server.ask_fully(prompt)
        assert trainer.of_last([(prompt, answer["output_ids"])])
        assert answer["meta_info"]["weight_version"] == version
    assert server.look("/model_info")["weight_version"] == version


def test_prefixes_of_old_weights_are_forgotten(server: SglangServer, tmp_path: Path) -> None:
    trainer = loaded(server, tmp_path)
    path = "/update_weights_from_disk"
    trainer.serve(
        lambda folder, _: server.call(path, {"model_path": str(folder), "flush_cache": False})
    )
    assert not trainer.of_last(ask_all(server))  # of the old prefixes
    reload_sglang(server.url)(trainer.live.resolve(), [])
    assert server.ask_fully(PROMPTS[0])["meta_info"]["cached_tokens"] == 0
    assert trainer.of_last(ask_all(server))


def test_requests_that_are_under_way_are_aborted(server: SglangServer, tmp_path: Path) -> None:
    """No old prefix stays, and none has to be dropped by another call."""
    trainer = loaded(server, tmp_path)
    callback = reload_sglang(server.url, abort_all_requests=True)

    def is_whole(answer: Answer) -> bool:
        return len(answer[1]) == server.tokens

    with clients(server.ask) as answers:
        trainer.serve(callback)
        while all(is_whole(answer) for answer in answers):
            callback(trainer.live.resolve(), [])
    assert trainer.of_last(ask_all(server))


def test_a_folder_that_is_not_there(server: SglangServer, tmp_path: Path) -> None:
    trainer = loaded(server, tmp_path)
    with pytest.raises(CasnapError, match=r"answers 400: .*no_such"):
        reload_sglang(server.url)(tmp_path / "no_such", [])
    assert trainer.of_last(ask_all(server))


def test_the_command_of_the_guide(server: SglangServer, tmp_path: Path) -> None:
    trainer = loaded(server, tmp_path)
    command = command_for_sglang(server.url)
    trainer.take()
    casnap = [sys.executable, "-m", "casnap", "pull", str(trainer.store.uri), str(trainer.live)]
    with subprocess.Popen([*casnap, "--follow", "--interval", "0.1s", "--exec", command]) as follow:
        try:
            while not trainer.of_last([server.ask(PROMPTS[0])]):
                assert follow.poll() is None
                time.sleep(0.1)
        finally:
            follow.terminate()
    assert trainer.of_last(ask_all(server))
