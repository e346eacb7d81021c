"""The first takes of a process say what an app state leaves out, and nothing of a right one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from casnap import RNGState, StateDict, Store
from casnap.take import left_out
from tests.support.warm import run_python

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Let this process be one that has taken nothing so far."""
    caplog.set_level("WARNING", "casnap.hints")
    monkeypatch.setattr("casnap.take.take.hints", left_out.Hints())


@pytest.fixture
def training() -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    return {
        "model": model, "optim": optimizer, "lr": scheduler, "rng": RNGState(),
        "progress": StateDict(step=0),
    }  # fmt: skip


def hints_of(state: State, caplog: pytest.LogCaptureFixture, takes: int = 3) -> Iterator[str]:
    store = Store(f"memory://{uuid.uuid4().hex}")
    for step in range(takes):
        torch.nn.functional.dropout(torch.ones(99), 0.5)
        store.take(state, f"step_{step}")
    for record in caplog.records:
        # The weights of these trainings stand still, which is another hint.
        if record.name == "casnap.hints" and record.message.startswith(left_out.LEFT_OUT):
            yield record.message


def test_a_whole_state_gives_none(training: State, caplog: pytest.LogCaptureFixture) -> None:
    assert not list(hints_of(training, caplog))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rng", "the random states of torch"),
        ("model", "2 of 2 parameters that 'optim' trains, the first with the shape [4, 4]"),
    ],
)
def test_what_is_left_out_is_said_once(
    training: State, caplog: pytest.LogCaptureFixture, key: str, words: str
) -> None:
    # Without any module, the weights might be in another snapshot.
    training |= {"other": torch.nn.Linear(3, 3).requires_grad_(requires_grad=False)}
    del training[key]
    (hint,) = hints_of(training, caplog)
    assert words in hint


def test_a_scheduler_may_be_made_anew(training: State, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run may begin it at any step, by ``last_epoch=``: no first run can tell."""
    scheduler, optimizer = training.pop("lr"), training["optim"]
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert not list(hints_of(training, caplog))
    learning_rates = scheduler.get_last_lr()
    rebuilt = lr_scheduler.StepLR(optimizer, 2, last_epoch=2)
    assert rebuilt.get_last_lr() == learning_rates
    assert not list(hints_of(training, caplog))


def test_weights_in_other_things_than_modules(
    training: State, caplog: pytest.LogCaptureFixture
) -> None:
    """As they are, or as copies."""
    model = training.pop("model")
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    for held in (dict(model.named_parameters()), copies):
        assert not list(hints_of({**training, "held": StateDict(held)}, caplog))


def test_seeds_and_other_numbers_are_no_loss(
    training: State, caplog: pytest.LogCaptureFixture
) -> None:
    """A loader draws a seed at each start; a training may seed itself at each step."""
    del training["rng"]
    store = Store(f"memory://{uuid.uuid4().hex}")
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4)))
    for step in range(3):
        list(data)
        store.take(training, f"loads/step_{step}")
        torch.manual_seed(step + 1)
        torch.rand(99)
        store.take(training, f"seeds/step_{step}")
    assert left_out.LEFT_OUT not in caplog.text


def test_a_filter_silences_them() -> None:
    code = """
import logging, torch
from casnap import Store
logging.getLogger("casnap.hints").setLevel(logging.ERROR)
model, parameter = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(3))
state = {"model": model, "optim": torch.optim.SGD([parameter])}
Store("memory://silent").take(state, "step_1")
"""
    assert run_python(code).stderr == ""
    assert left_out.LEFT_OUT in run_python(code.replace("ERROR", "WARNING")).stderr
