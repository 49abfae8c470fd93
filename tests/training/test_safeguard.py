"""Steps that go wrong: nothing of them remains, and the policy decides what follows."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, FailedStepError
from pyro_bdl.optim import IVON, VOGN, GaussNewton_ELBO, InSVI
from pyro_bdl.training import Safeguard, train

pytestmark = pytest.mark.usefixtures("double")
_BAD = 7


def data(rows=24):
    x = torch.linspace(-1, 1, rows)[:, None]
    return x, torch.sin(3 * x)


def program(batch_norm=True):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(3) if batch_norm else nn.Identity()
    net = nn.Sequential(nn.Linear(1, 3), middle, nn.Tanh(), nn.Linear(3, 1))
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.3, num_data=24)


def numbers(*modules):
    return [v.clone() for m in modules for v in m.state_dict().values() if torch.is_tensor(v)]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def batches(count, bad=None, spoil=lambda x, y: (x, y * math.nan)):
    """Batches of 8 rows; the one with number ``bad`` is spoiled, or left out if spoil is None."""
    generator = torch.Generator().manual_seed(1)
    x, y = data()
    for number in range(count):
        rows = torch.randperm(24, generator=generator)[:8]
        if number != bad:
            yield x[rows], y[rows]
        elif spoil is not None:
            yield spoil(x[rows], y[rows])


def _schedule(step):
    return min(1.0, 0.1 + 0.05 * step)


def torch_loop(elbo, optimizer, **options):
    model = program(**options)
    guide = bdl.guides.AutoMeanField(model).prototype(*data())
    objective = elbo()(model, guide)
    made = optimizer(guide, objective)
    return model, guide, (objective, made)


def svi_loop(optimizer, elbo=bdl.elbo.TemperedTraceMeanField_ELBO):
    model = program()
    guide = bdl.guides.AutoMeanField(model).prototype(*data())
    return model, guide, (SVI(model, guide, optimizer(guide), elbo()),)


def adam(guide, objective):
    return torch.optim.Adam(objective.parameters(), 0.03)


LOOPS = {
    "plain": lambda: torch_loop(lambda: bdl.elbo.TemperedTraceMeanField_ELBO(_schedule), adam),
    "compiled": lambda: torch_loop(lambda: bdl.elbo.CompiledELBO(_schedule), adam),
    "ivon": lambda: torch_loop(bdl.elbo.TemperedTraceMeanField_ELBO, lambda g, _: IVON(g)),
    "vogn": lambda: torch_loop(GaussNewton_ELBO, lambda g, _: VOGN(g), batch_norm=False),
    "svi": lambda: svi_loop(lambda _: pyro.optim.ClippedAdam({"lr": 0.03, "lrd": 0.99})),
    "svi, compiled": lambda: svi_loop(
        lambda _: pyro.optim.Adam({"lr": 0.03}), bdl.elbo.CompiledELBO
    ),
    "svi, ivon": lambda: svi_loop(lambda g: InSVI(IVON(g))),
    "svi, Pyro's bound": lambda: svi_loop(lambda _: pyro.optim.Adam({"lr": 0.03}), Trace_ELBO),
}


@pytest.mark.parametrize("name", LOOPS)
def test_skip_goes_on_as_if_there_had_been_no_such_batch(name):
    results = []
    for spoil in (lambda x, y: (x, y * math.nan), None):
        model, guide, made = LOOPS[name]()
        safeguard = Safeguard(*made, on_failure="skip")
        torch.manual_seed(2)
        losses = []
        for x, y in batches(12, _BAD, spoil):
            if spoil is not None and safeguard.number == _BAD:
                with pytest.warns(BdlWarning, match=f"^step {_BAD}: .*: the batch is left out"):
                    assert safeguard.step(x, y) is None
            else:
                losses.append(float(safeguard.step(x, y)))
        results.append((numbers(model, guide), losses))
    (ours, losses), (theirs, expected) = results
    assert losses == expected and len(losses) == 11
    assert same(ours, theirs) and all(value.isfinite().all() for value in ours)


@pytest.mark.parametrize("name", ["plain", "compiled", "ivon", "svi"])
def test_stop_leaves_the_state_before_the_step_and_names_it(name):
    results = []
    for bad in (_BAD, None):
        model, guide, made = LOOPS[name]()
        safeguard = Safeguard(*made)
        torch.manual_seed(2)
        for x, y in batches(12 if bad else _BAD, bad):
            if safeguard.number == bad:
                with pytest.raises(FailedStepError, match="step 7, batch 7 of 12: ") as caught:
                    safeguard.step(x, y, batch="batch 7 of 12")
                assert caught.value.step == _BAD
                break
            safeguard.step(x, y)
        results.append(numbers(model, guide))
    assert same(*results)


@pytest.mark.parametrize("name", ["plain", "compiled", "ivon", "svi", "svi, ivon"])
def test_restore_goes_back_and_lowers_the_rate(name):
    model, guide, made = LOOPS[name]()
    safeguard = Safeguard(*made, on_failure="restore", every=3, factor=0.25)
    torch.manual_seed(2)
    stored = {}
    rates = safeguard._kind.rates
    for x, y in batches(_BAD + 1, _BAD):
        stored[safeguard.number] = numbers(model, guide)
        before = rates()
        if safeguard.number == _BAD:
            said = f"^step {_BAD}: .*: back to the state of step 6, with 0.25 times the learning"
            with pytest.warns(BdlWarning, match=said):
                safeguard.step(x, y)
        else:
            safeguard.step(x, y)
    assert same(numbers(model, guide), stored[6]) and not same(stored[6], stored[7])
    assert rates() == [0.25 * rate for rate in before] and rates()
    for x, y in batches(3):
        assert math.isfinite(safeguard.step(x, y))


@pytest.mark.parametrize("policy", ["skip", "restore"])
def test_out_of_memory_leaves_the_batch_out(policy):
    results = []
    for fails in (True, False):
        model, guide, (objective, optimizer) = LOOPS["plain"]()
        count = itertools.count()

        def loss(x, y, objective=objective, count=count, fails=fails):
            found = objective(x, y)
            if fails and next(count) == _BAD:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return found

        loss.elbo = objective.elbo
        safeguard = Safeguard(loss, optimizer, on_failure=policy)
        torch.manual_seed(2)
        for x, y in batches(12, None if fails else _BAD, None):
            if fails and safeguard.number == _BAD:
                with pytest.warns(BdlWarning, match=r"step 7: out of memory \(CUDA out of memory"):
                    safeguard.step(x, y)
                if policy == "restore":
                    return
            else:
                safeguard.step(x, y)
        results.append(numbers(model, guide))
    assert same(*results)


def test_out_of_memory_stops():
    def failing():
        raise MemoryError("no room")

    safeguard = Safeguard(failing, torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1))
    with pytest.raises(FailedStepError, match=r"step 0: out of memory \(no room\): stopped"):
        safeguard.step()


def test_an_error_of_the_program_is_no_failed_step():
    _, _, made = LOOPS["plain"]()
    safeguard = Safeguard(*made, on_failure="skip")
    with pytest.raises(Exception, match=r"shape|size|mat1"):
        safeguard.step(torch.zeros(8, 5), torch.zeros(8, 1))
    assert not safeguard.failures


def test_new_parameters_that_are_not_finite_are_taken_back():
    """Adam without epsilon divides zero by zero where the gradient is zero."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    safeguard = Safeguard(lambda: weight[0] ** 2, torch.optim.Adam([weight], eps=0.0))
    with pytest.raises(FailedStepError, match="step 0: the optimizer's new parameters are not"):
        safeguard.step()
    assert weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "loss, said",
    [
        (lambda w: (w - w).sqrt().sum(), "the gradient is not finite"),
        (lambda w: w.sum() / 0.0, "the loss is inf"),
    ],
)
def test_loss_and_gradient_are_both_checked(loss, said):
    weight = nn.Parameter(torch.ones(2))
    safeguard = Safeguard(lambda: loss(weight), torch.optim.SGD([weight], 0.1))
    with pytest.raises(FailedStepError, match=said):
        safeguard.step()
    assert weight.tolist() == [1.0, 1.0]


def test_a_divergence_goes_back_to_where_the_loss_was_low():
    """Gradient descent on w^2 / 2 at rate 3 doubles w in each step; at 3 / 4 it converges."""
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], 3.0)
    safeguard = Safeguard(lambda: weight**2 / 2, optimizer, on_failure="restore", factor=0.25)
    with pytest.warns(BdlWarning, match="the loss diverges: the median of the last 20 is"):
        for _ in range(200):
            safeguard.step()
    assert optimizer.param_groups[0]["lr"] == 0.75 and abs(weight.item()) < 1e-6
    (failure,) = safeguard.failures
    assert failure.action.startswith("back to the state of step 0,")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_divergence_stops(policy):
    weight = nn.Parameter(torch.tensor(1.0))
    safeguard = Safeguard(lambda: weight**2 / 2, torch.optim.SGD([weight], 3.0), on_failure=policy)
    with pytest.raises(FailedStepError, match="the loss diverges"):
        for _ in range(200):
            safeguard.step()


def test_a_loss_that_grows_with_the_temperature_does_not_diverge():
    class Warming:
        step, temperature = 0, 0.0

    weight, elbo = nn.Parameter(torch.tensor(1.0)), Warming()

    def loss():
        elbo.temperature = 10.0 ** (elbo.step / 10)
        elbo.step += 1
        return elbo.temperature * weight**2

    loss.elbo = elbo
    safeguard = Safeguard(loss, torch.optim.SGD([weight], 0.0))
    for _ in range(60):
        safeguard.step()
    assert not safeguard.failures


@pytest.mark.parametrize("policy", ["skip", "restore"])
def test_too_many_failures_in_a_row_stop(policy):
    model, guide, made = LOOPS["plain"]()
    safeguard = Safeguard(*made, on_failure=policy, most=3)
    x, y = data()
    safeguard.step(x, y)
    with pytest.warns(BdlWarning):
        safeguard.step(x, y * math.nan)
        safeguard.step(x, y * math.nan)
    with pytest.raises(FailedStepError, match="after 3 failures in a row: stopped"):
        safeguard.step(x, y * math.nan)
    assert all(value.isfinite().all() for value in numbers(model, guide))


class _Hole(bdl.elbo.TemperedTraceMeanField_ELBO):
    """The bound, but NaN at one step."""

    def _loss(self, model, guide, args, kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        loss = super()._loss(model, guide, args, kwargs)
        return loss * math.nan if self.calls == _BAD + 1 else loss


def test_train_names_the_rows_and_follows_the_policy():
    x, y = data()
    model = program()
    guide = bdl.guides.AutoMeanField(model)
    settings = {"steps": 12, "batch_size": 5, "elbo": _Hole()}
    with pytest.raises(FailedStepError, match=r"step 7, rows \d+(, \d+)+ and \d+: the loss is nan"):
        train(model, guide, x, y, **settings)
    assert all(value.isfinite().all() for value in numbers(model, guide))
    for policy, action in (("skip", "the batch is left out"), ("restore", "back to the state of")):
        settings["elbo"] = _Hole()
        with pytest.warns(BdlWarning, match=action):
            run = train(model, guide, x, y, on_failure=policy, **settings)
        assert len(run.losses) == 11 and run.losses.isfinite().all()
        (failure,) = run.failures
        assert failure.step == _BAD and failure.batch.startswith("rows ")
    with pytest.raises(ValueError, match="on_failure must be one of stop, skip, restore"):
        train(model, guide, x, y, steps=1, on_failure="hope")


def test_a_run_without_failures_is_the_same_run():
    x, y = data()
    results = []
    for policy in ("stop", "restore"):
        model = program()
        guide = bdl.guides.AutoMeanField(model).prototype(x, y)
        torch.manual_seed(3)
        run = train(model, guide, x, y, steps=10, batch_size=5, on_failure=policy)
        results.append([*numbers(model, guide), run.losses])
    assert same(*results)


def test_functions_and_parameters_of_the_store():
    """A guide without a module, whose parameters SVI finds in each step."""

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)

    def guide(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        pyro.sample("mean", dist.Normal(loc, 1.0))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    safeguard = Safeguard(svi, on_failure="skip")
    safeguard.step(torch.ones(3))
    before = pyro.param("loc").item()
    with pytest.warns(BdlWarning, match="the batch is not finite|the loss is nan"):
        safeguard.step(torch.full((3,), math.nan))
    assert pyro.param("loc").item() == before != 0.0


def test_options_are_checked():
    _, _, (objective, optimizer) = LOOPS["plain"]()
    with pytest.raises(TypeError, match="give the optimizer too"):
        Safeguard(objective)
    for wrong in ({"factor": 1.0}, {"divergence": -1.0}, {"every": 0}, {"most": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Safeguard(objective, optimizer, **wrong)
