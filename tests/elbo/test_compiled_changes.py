"""Random numbers in a compiled program, and values outside of the arguments that change."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.compiled_steps import regression, regression_with, same_steps
from helpers.guide_programs import X, Y, small_net
from pyro.nn import PyroParam
from torch import nn

from pyro_bdl import bayesianize, models, priors, training
from pyro_bdl.elbo import CompiledELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.estimators import local_reparameterization
from pyro_bdl.guides import AutoMCDropout, AutoMeanField, BernoulliNoise
from pyro_bdl.optim import IVON

pytestmark = pytest.mark.usefixtures("compiled")


# Randomness inside the program


def rows(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", 6, subsample_size=3) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def test_subsamples_are_drawn_in_every_step():
    _, record = same_steps({}, [(X, Y)] * 8, make=lambda: rows)
    assert len({round(likelihood, 3) for _, likelihood, *_ in record}) > 4


def local(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", 6, subsample_size=3) as i:
        z = pyro.sample("z", dist.LogNormal(torch.zeros(()), 1.0))
        pyro.sample("y", dist.Normal(z * (x[i] @ w), 1.0), obs=y[i])


def test_local_latents_in_a_subsampled_plate():
    same_steps({}, [(X, Y)] * 6, make=lambda: local)


def test_dropout_layers_drop_anew_and_follow_the_mode():
    def to_evaluation(number, model, guide):
        model.train(number < 5)

    elbo, _ = same_steps(
        {},
        [(X, Y)] * 10,
        make=lambda: regression_with(nn.Dropout(0.5)),
        between=to_evaluation,
        replays=4,
    )
    assert elbo.num_traces == 2


def test_batch_norm_moves_its_statistics():
    _, record = same_steps(
        {}, [(X, Y), (2 * X, Y)] * 3, make=lambda: regression_with(nn.BatchNorm1d(3))
    )
    assert record.model.network.network[1].num_batches_tracked == 6


def test_batch_norm_for_several_particles_runs_uncompiled():
    with pytest.warns(BdlWarning, match="reads numbers that change .* batch_norm.py"):
        same_steps(
            {"num_particles": 2},
            [(X, Y)] * 4,
            make=lambda: regression_with(nn.BatchNorm1d(3)),
            replays=0,
        )


def test_learned_dropout_rates_are_compiled():
    """The temperature of their relaxation falls from step to step."""
    noise = BernoulliNoise(lambda step: 1.0 / (1 + step))
    elbo, _ = same_steps(
        {},
        [(X, Y)] * 12,
        kind=lambda model: AutoMCDropout(model, p=0.3, learn_p=True, sites="all", noise=noise),
    )
    assert elbo.num_traces == 1


# What changes outside of the arguments


def test_learned_hyperparameters():
    def make():
        prior = priors.Normal(PyroParam(torch.tensor(1.0), dist.constraints.positive))
        return models.Regression(
            bayesianize(small_net(), prior), noise=PyroParam(torch.tensor(0.5))
        )

    _, record = same_steps({}, [(X, Y)] * 8, make=make)
    assert len(record.state) == 4 + 4  # and the network's buffers


@pytest.mark.parametrize(
    ("change", "replays"),
    [
        (lambda model, guide: guide.load_state_dict(
            {n: v + 0.1 if v.is_floating_point() else v for n, v in guide.state_dict().items()}
        ), 4),
        (lambda model, guide: setattr(guide, "loc", nn.Parameter(guide.loc.detach() + 0.1)), 2),
        (lambda model, guide: guide.loc.requires_grad_(False), 2),
    ],
    ids=["state", "parameter", "frozen"],
)  # fmt: skip
def test_changed_parameters_are_seen_at_once(change, replays):
    def make():
        net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        return models.Regression(bayesianize(net), noise=0.5, num_data=6)

    def between(number, model, guide):
        if number == 4:
            change(model, guide)

    same_steps({}, [(X, Y)] * 8, make=make, between=between, replays=replays)


def _differences(model, guide, change, expected):
    """|compiled - plain| loss at the same parameters: in steps 5 to 7, after a change, and 8 to 12.

    :param expected: a context that the steps are taken in.
    """
    elbos = CompiledELBO(), TemperedTraceMeanField_ELBO()

    def difference():
        losses = []
        for elbo in elbos:
            torch.manual_seed(0)
            losses.append(elbo.loss_and_grads(model, guide, X, Y))
        return abs(losses[0] - losses[1])

    before = [difference() for _ in range(4)]
    change()
    with expected:
        soon, later = [difference() for _ in range(3)], [difference() for _ in range(5)]
    assert max(before) < 1e-4 and max(later) < 1e-4
    assert elbos[0].num_traces == 2
    return soon


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))
        self.power, self.shift = 1, torch.tensor(0.0)

    def forward(self, x):
        return self.factor * x**self.power + self.shift


def _hook(module, args, output):
    return 2.0 * output


_CHANGES = {
    "dropout": lambda model, guide: setattr(model.network.network[1], "p", 0.9),
    "num_data": lambda model, guide: setattr(model, "num_data", 60),
    "noise": lambda model, guide: setattr(model, "_noise", 2.0),
    "prior": lambda model, guide: model.update_prior(guide),
    "network's prior": lambda model, guide: setattr(model.network, "task_prior", guide.as_prior()),
    "mode of a layer": lambda model, guide: model.network.network[1].eval(),
    "mode": lambda model, guide: model.eval(),
    "number": lambda model, guide: setattr(model.network.network[3], "power", 2),
    "tensor": lambda model, guide: setattr(model.network.network[3], "shift", torch.tensor(1.0)),
    "tensor in place": lambda model, guide: model.network.network[3].shift.add_(1.0),
    "buffer": lambda model, guide: setattr(model.network.network[3], "factor", torch.tensor(1.0)),
    "buffer in place": lambda model, guide: model.network.network[3].factor.fill_(1.0),
    "layer": lambda model, guide: model.network.network.insert(2, nn.Tanh()),
    "hook": lambda model, guide: model.network.network[3].register_forward_hook(_hook),
}


@pytest.mark.parametrize("bare", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_changes_of_modules_are_seen_at_once(change, bare):
    """Those of a function's network too, which a run shows."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1), _Scaled())
    model = models.Regression(bayesianize(net), noise=0.5, num_data=6)
    program = (lambda x, y: model(x, y)) if bare else model
    guide = AutoMeanField(program).prototype(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        soon = _differences(program, guide, lambda: change(model, guide), warnings.catch_warnings())
    assert max(soon) < 1e-4


def _in_closures():
    number, tensor = 2.0, torch.tensor(2.0)

    def program(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(number * tensor * (x @ w), 1.0), obs=y)

    def set_number():
        nonlocal number
        number = 3.0

    return program, set_number, lambda: tensor.fill_(3.0)


def test_a_tensor_of_a_closure_is_followed():
    program, _, fill = _in_closures()
    guide = AutoMeanField(program).prototype(X, Y)
    assert max(_differences(program, guide, fill, warnings.catch_warnings())) < 1e-4


def test_a_changed_closure_is_found_by_the_next_comparison():
    program, set_number, _ = _in_closures()
    guide = AutoMeanField(program).prototype(X, Y)
    warned = pytest.warns(BdlWarning, match="traces the program again")
    assert min(_differences(program, guide, set_number, warned)) > 1e-3


def test_a_training_begins_with_a_comparison():
    program, set_number, _ = _in_closures()
    guide = AutoMeanField(program).prototype(X, Y)
    elbo, plain = CompiledELBO(), TemperedTraceMeanField_ELBO()
    for _ in range(5):
        elbo.loss_and_grads(program, guide, X, Y)
    set_number()
    with pytest.warns(BdlWarning, match="traces the program again"):
        training.train(program, guide, X, Y, steps=1, elbo=elbo)
    losses = []
    for bound in (elbo, plain):
        torch.manual_seed(0)
        losses.append(bound.loss_and_grads(program, guide, X, Y))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class _Noting(nn.Module):
    """Counts its calls, and keeps what it returned last."""

    def __init__(self):
        super().__init__()
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = x.tanh()
        return self.last


def test_what_a_network_notes_of_its_runs_is_no_change():
    elbo, record = same_steps({}, [(X, Y)] * 12, make=lambda: regression_with(_Noting()))
    assert elbo.num_traces == 1 and record.model.network.network[1].calls > 0


def test_a_network_that_a_program_meets_later_is_known_from_then_on():
    net = bayesianize(nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5)))
    late = nn.Dropout(0.5)

    def program(x, y, dropping):
        f = net(x)[:, 0]
        f = late(f) if dropping else f
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    guide = AutoMeanField(program).prototype(X, Y, False)
    elbo, plain = CompiledELBO(), TemperedTraceMeanField_ELBO()
    for number in range(16):
        late.p = 0.2 if number == 10 else late.p
        late.train(number < 13)
        losses = []
        for bound in (elbo, plain):
            torch.manual_seed(number)
            losses.append(bound.loss_and_grads(program, guide, X, Y, number % 2 == 1))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert elbo.num_replays > 2


def test_a_variable_that_each_run_changes_ends_uncompiled():
    calls = 0

    def program(x, y):
        nonlocal calls
        calls += 1
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w * calls, 1.0), obs=y)

    guide = AutoMeanField(program).prototype(X, Y)
    elbo = CompiledELBO()
    with pytest.warns(BdlWarning, match="or a counter"):
        for _ in range(2):
            elbo.loss_and_grads(program, guide, X, Y)


def test_endless_changes_end_uncompiled():
    """Of a closure, before the steps of comparisons that come after the first one."""
    number = 1.0

    def program(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(number * (x @ w), 1.0), obs=y)

    guide = AutoMeanField(program).prototype(X, Y)
    elbo = CompiledELBO(max_graphs=2)
    again = pytest.warns(BdlWarning, match="traces the program again")
    with again, pytest.warns(BdlWarning, match="was changed between evaluations 2 times"):
        for step in range(16):
            if step in (3, 7):
                number += 1.0
            elbo.loss_and_grads(program, guide, X, Y)
    assert elbo.num_traces == 2


@pytest.mark.parametrize(("every", "compiled"), [(1, False), (40, True)])
def test_an_attribute_may_be_set_now_and_then_and_not_in_each_step(every, compiled):
    model = regression(num_data=6)
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO(max_graphs=2)
    expected = warnings.catch_warnings()
    if not compiled:
        expected = pytest.warns(BdlWarning, match=r"'Regression.num_data' is set between")
    with expected:
        for number in range(4 * every + 4):
            model.num_data += number % every == 0
            elbo.loss_and_grads(model, guide, X, Y)
    assert (elbo.num_replays > 80) == compiled


def test_values_from_pyros_store(tmp_path):
    def between(number, model, guide):
        if number == 2:
            pyro.get_param_store().save(tmp_path / "store")
        if number == 5:
            pyro.get_param_store().load(tmp_path / "store")

    same_steps({}, [(X, Y)] * 9, between=between, replays=3)


def test_double_precision_on_the_way():
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO()
    for _ in range(3):
        elbo.loss_and_grads(model, guide, X, Y)
    guide.double()
    model.double()
    guide.zero_grad()
    for _ in range(3):
        elbo.loss_and_grads(model, guide, X.double(), Y.double())
    assert (elbo.num_traces, elbo.num_replays) == (2, 2)
    assert guide.loc.grad.dtype == torch.float64
    options = {"temperature": 0.3}
    batches = [(X.double(), Y.double())] * 5
    same_steps(options, batches, make=lambda: regression(small_net(torch.float64)), rtol=1e-12)


def test_an_estimator_in_a_context():
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    plain, elbo = TemperedTraceMeanField_ELBO(), CompiledELBO()
    context = local_reparameterization()
    for _ in range(4):
        for inside in (True, False):
            losses = []
            for bound in (plain, elbo):
                torch.manual_seed(1)
                with context if inside else warnings.catch_warnings():
                    losses.append(bound.loss_and_grads(model, guide, X, Y))
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert elbo.num_traces == 2


def test_ivon_has_its_noise():
    same_steps({}, [(X, Y)] * 8, optimizer=lambda guide: IVON(guide, lr=0.05))
    model = regression()
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = CompiledELBO()
    for seed in range(4):
        torch.manual_seed(seed)
        step = elbo.take_step(model, guide, X, Y)
        torch.manual_seed(seed)
        assert torch.equal(step.draw, guide.sample_vectors(1)[0])
    assert elbo.num_replays == 1


def test_tensors_that_the_program_changes_in_place():
    """A running mean that is kept in a closure, for example."""
    total = torch.zeros(())

    def make():
        total.zero_()
        return model

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        mean = x @ w
        total.mul_(0.5).add_(mean.detach().sum())
        pyro.sample("y", dist.Normal(mean + total, 1.0).to_event(1), obs=y)

    totals = []

    def between(number, model, guide):
        totals.append(total.clone())

    same_steps({}, [(X, Y)] * 6, make=make, between=between)
    torch.testing.assert_close(totals[6:], totals[:6])
