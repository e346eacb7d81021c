"""A training that is interrupted and resumed is, bit for bit, the one that was not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as sched
from torch.optim.swa_utils import SWALR

from casnap import NewStore, RNGState, StateDict, Store
from casnap.errors import MismatchError
from tests.support.bitwise import assert_same
from tests.support.torches import needs_torch

pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step",
    "ignore:The epoch parameter",
    "ignore:Sparse invariant checks",
    "ignore:Converting a tensor with requires_grad=True",  # of LBFGS itself, in torch 2.8
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(
        tmp_path_factory.mktemp("training") / "store", create=NewStore(chunk_size=64 << 10)
    )


class Net(nn.Module):
    """Small, but with a weight of more than one chunk."""

    def __init__(self, outputs=2):
        super().__init__()
        self.hidden = nn.Linear(30, 700, bias=False)
        self.out = nn.Linear(700, outputs, bias=False)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x))).sum()


class Rows(nn.Module):
    """Gets sparse gradients."""

    def __init__(self, count=400):
        super().__init__()
        self.rows = nn.Embedding(count, 60, sparse=True)

    def forward(self, x):
        return self.rows((x.abs() * 100).long()).pow(2).sum()


class Run:
    """A model and an optimizer, and whatever else a test gives it, on their way."""

    def __init__(self, make_optimizer, make_scheduler=None, model=Net):
        self.model = model()
        self.optimizer = make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.progress = StateDict(step=0, losses=[])

    def app_state(self):
        state = {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler}

    def train(self, steps):
        for _ in range(steps):
            step = self.progress["step"]
            x = torch.randn(4, 30, generator=torch.Generator().manual_seed(step))

            def closure(x=x):
                self.optimizer.zero_grad()
                loss = self.model(x)
                loss.backward()
                return loss

            loss = self.optimizer.step(closure).detach().item()
            if isinstance(self.scheduler, sched.ReduceLROnPlateau):
                self.scheduler.step(loss)
            elif self.scheduler is not None:
                self.scheduler.step()
            self.progress["step"] = step + 1
            self.progress["losses"].append(loss)
        return self


names = map("take-{}".format, itertools.count())


def check_resumption(store, make_run, before=3, after=3):
    """Interrupt a run after some steps, and compare what a fresh one makes of the snapshot."""
    run = make_run().train(before)
    snapshot = store.take(run.app_state(), next(names))
    pending = store.async_take(run.app_state(), next(names))
    run.train(after)
    for taken in (snapshot, pending.wait()):
        resumed = make_run()
        taken.restore(resumed.app_state())
        assert resumed.progress["step"] == before
        resumed.train(after)
        for key, stateful in run.app_state().items():
            assert_same(resumed.app_state()[key].state_dict(), stateful.state_dict(), key)


def two_groups(model):
    return [{"params": [model.hidden.weight], "lr": 0.01}, {"params": [model.out.weight]}]


OPTIMIZERS = {
    "ASGD": [{}],
    "Adadelta": [{}],
    "Adafactor": [{}],
    "Adagrad": [{}],
    "Adam": [{"amsgrad": True}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(1e-3)}],
    "AdamW": [{}],
    "Adamax": [{}],
    "LBFGS": [{"max_iter": 3}, {"max_iter": 3, "line_search_fn": "strong_wolfe"}],
    "Muon": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}],
    "SparseAdam": [{}],
}
CASES = [(name, options) for name, cases in OPTIMIZERS.items() for options in cases]


def test_every_optimizer_has_a_case():
    of_torch = {
        n
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    assert of_torch - {"Optimizer"} <= set(OPTIMIZERS)


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if type(v) is str else "")
def test_optimizers(store, name, options):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    kind, model = getattr(torch.optim, name), Rows if name == "SparseAdam" else Net
    check_resumption(store, lambda: Run(lambda m: kind(m.parameters(), **options), model=model))


def test_groups_of_parameters(store):
    check_resumption(store, lambda: Run(lambda m: torch.optim.AdamW(two_groups(m), lr=0.1)))


def test_named_parameters(store):
    """The optimizer's state then holds their names too."""
    check_resumption(store, lambda: Run(lambda m: torch.optim.Adam(m.named_parameters())))


def test_an_optimizer_that_has_not_stepped(store):
    check_resumption(store, lambda: Run(lambda m: torch.optim.Adam(m.parameters())), before=0)


def shapes_of(optimizer):
    return {
        f"optimizer/state/{i}/{name}": tuple(value.shape)
        for i, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if type(v) is str else "")
def test_moments_of_another_shape(store, name, options, steps):
    """torch loads them; the next step would fail, or write beyond their memory."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    if name == "Adagrad" and torch.__version__ < "2.10":
        pytest.skip("its state is made with it, and never anew")
    kind = getattr(torch.optim, name)

    def make(size):
        model = (lambda: Rows(200 * size)) if name == "SparseAdam" else (lambda: Net(size))
        return Run(lambda m: kind(m.parameters(), **options), model=model)

    taken, live = make(2).train(2), make(3).train(steps)
    snapshot = store.take(taken.app_state(), next(names))
    wanted = shapes_of(make(3).train(2).optimizer)
    unlike = {
        path for path, shape in shapes_of(taken.optimizer).items() if shape != wanted.get(path, ())
    }
    before = {key: repr(value.state_dict()) for key, value in live.app_state().items()}
    if unlike:
        with pytest.raises(MismatchError) as e:
            snapshot.restore({"optimizer": live.optimizer})
        told = [line.strip() for line in str(e.value).splitlines() if " here, " in line]
        assert {line.partition(":")[0] for line in told} == unlike
        assert {key: repr(value.state_dict()) for key, value in live.app_state().items()} == before
    else:
        assert (name, options) == ("SGD", {})
        assert not snapshot.restore({"optimizer": live.optimizer})
    report = snapshot.restore(live.app_state(), strict=False)
    told = {line.partition(":")[0] for line in report.mismatched}
    assert told >= unlike
    states = {path.rpartition("/")[0] for path in told} - {"model"}
    assert states == {path.rpartition("/")[0] for path in unlike}
    assert shapes_of(live.optimizer) == {
        path: shape
        for path, shape in shapes_of(taken.optimizer).items()
        if path.rpartition("/")[0] not in states
    }
    live.train(2)
    trained = shapes_of(live.optimizer)
    assert {path: shape for path, shape in trained.items() if shape} == {
        path: shape for path, shape in wanted.items() if shape
    }


SCHEDULERS = {
    "ChainedScheduler": lambda o: sched.ChainedScheduler(
        [sched.ConstantLR(o, 0.5, 2), sched.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ConstantLR": lambda o: sched.ConstantLR(o, 0.5, 4),
    "CosineAnnealingLR": lambda o: sched.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: sched.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: sched.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    "ExponentialLR": lambda o: sched.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: sched.LambdaLR(o, [lambda e: 0.9**e]),
    "LinearLR": lambda o: sched.LinearLR(o, total_iters=5),
    "MultiStepLR": lambda o: sched.MultiStepLR(o, [2, 4, 4], 0.5),
    "MultiplicativeLR": lambda o: sched.MultiplicativeLR(o, lambda e: 0.95),
    "OneCycleLR": lambda o: sched.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: sched.PolynomialLR(o, 6, 2.0),
    "ReduceLROnPlateau": lambda o: sched.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SequentialLR": lambda o: sched.SequentialLR(
        o, [sched.ConstantLR(o, 0.5, 2), sched.CosineAnnealingLR(o, 5)], milestones=[2]
    ),
    "StepLR": lambda o: sched.StepLR(o, 2, 0.5),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=3),
}


def test_every_scheduler_has_a_case():
    of_torch = {
        n
        for n, c in vars(sched).items()
        if isinstance(c, type) and issubclass(c, sched.LRScheduler)
    }
    assert of_torch - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_torch("2.10", "its state has a function"))
        if name == "SWALR"
        else name
        for name in SCHEDULERS
    ],
)
def test_schedulers(name):
    memory = Store("memory://schedulers", create=NewStore(chunk_size=64 << 10))

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    check_resumption(memory, lambda: Run(sgd, SCHEDULERS[name]))


def test_grad_scaler(store):
    def scaler(scale):
        made = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        made.scale(torch.ones(1))  # its tensors are made late
        return made

    run, other = scaler(64.0), scaler(2.0)
    run.update(32.0)
    snapshot = store.take(
        {"scaler": run, "disabled": torch.amp.GradScaler("cpu", enabled=False)}, "s"
    )
    snapshot.restore({"scaler": other})
    assert_same(other.state_dict(), run.state_dict())
    assert other.get_scale() == 32.0


def test_dropout_goes_on_where_it_stopped(store):
    """With the random state in the app state nothing needs a seed."""

    def start():
        model = nn.Sequential(nn.Linear(20, 300), nn.Dropout(), nn.Linear(300, 2))
        state = {"model": model, "rng": RNGState()}
        return {**state, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}

    def train(state):
        losses = []
        for _ in range(3):
            loss = state["model"](torch.randn(4, 20)).pow(2).sum()
            loss.backward()
            state["optimizer"].step()
            losses.append(loss.item())
        return losses

    run = start()
    train(run)
    run["optimizer"].zero_grad()
    snapshot = store.take(run, next(names))
    expected = train(run)
    resumed = start()
    torch.randn(100)
    snapshot.restore(resumed)
    assert train(resumed) == expected
    assert_same(dict(resumed["model"].state_dict()), dict(run["model"].state_dict()))
