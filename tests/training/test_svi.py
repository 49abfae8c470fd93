"""Training reaches the known optimum, in full and small batches; Ctrl-C keeps the parameters so
far."""

import contextlib
import itertools
import math

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal

from pyro_bdl import bayesianize, evidence, guides, models, optim, priors, training
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning


def test_mean_field_reaches_its_optimum(conjugate):
    eta = 0.1
    guide = guides.AutoMeanField(conjugate.model)
    run = training.train(
        conjugate.model, guide, conjugate.x, conjugate.y, steps=500, learning_rate=0.05,
        elbo=TemperedTraceMeanField_ELBO(eta, num_particles=4),
    )  # fmt: skip
    sd = conjugate.precision(eta).diagonal().rsqrt()
    assert run.losses.shape == (500,) and run.batch_size == 8 and not run.interrupted
    assert ((guide.loc - conjugate.mean(eta)).abs() / sd).max() < 0.1
    assert ((guide.scale / sd).log().abs()).max() < 0.05


def test_another_loss(conjugate):
    """-H(q) has its only fixed point at scales of infinity: they grow, the means stay."""

    class Wide(TemperedTraceMeanField_ELBO):
        def differentiable_loss(self, model, guide, *args):
            with guide.cached_parameters():
                return -guide.parameter("scale").log().sum() + 0.0 * guide.parameter("loc").sum()

    guide = guides.AutoMeanField(conjugate.model).prototype(conjugate.x, conjugate.y)
    loc, scale = guide.loc.detach().clone(), guide.scale.detach().clone()
    training.train(conjugate.model, guide, conjugate.x, conjugate.y, steps=20, elbo=Wide())
    assert torch.equal(guide.loc, loc) and (guide.scale > scale).all()


def test_bounds_without_a_loss_are_refused_before_the_first_step(conjugate):
    """Those of Pyro that make gradients alone; SVI takes them."""
    guide = guides.AutoMeanField(conjugate.model).prototype(conjugate.x, conjugate.y)
    bound = pyro.infer.RenyiELBO(num_particles=2)
    arguments = conjugate.model, guide, conjugate.x, conjugate.y
    for train in (
        lambda: training.train(*arguments, steps=1, elbo=bound),
        lambda: evidence.variational_em(*arguments[:2], arguments[2:], elbo=bound),
        lambda: optim.InSVI(conjugate.model, guide, optim.IVON(guide), bound),
    ):
        with pytest.raises(TypeError, match=r"RenyiELBO has no differentiable_loss.*SVI"):
            train()
    svi = SVI(conjugate.model, guide, pyro.optim.Adam({"lr": 0.01}), bound)
    assert math.isfinite(svi.step(conjugate.x, conjugate.y))


def test_no_training_without_gradients(conjugate):
    guide = guides.AutoSWAG(conjugate.model).prototype(conjugate.x, conjugate.y)
    arguments = conjugate.model, guide, conjugate.x, conjugate.y
    with torch.inference_mode():
        for train in (lambda: training.train(*arguments, steps=1),
                      lambda: training.collect_swag(*arguments)):  # fmt: skip
            with pytest.raises(RuntimeError, match="train outside of it"):
                train()


def test_training_turns_gradients_on(conjugate):
    """Inside torch.no_grad() the same steps are taken."""
    arguments = conjugate.x, conjugate.y
    trained = []
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context:
            pyro.set_rng_seed(1)
            guide = guides.AutoSWAG(conjugate.model).prototype(*arguments)
            run = training.train(conjugate.model, guide, *arguments, steps=5)
            training.collect_swag(
                conjugate.model, guide, *arguments, snapshots=3, batch_size=len(conjugate.x)
            )
            optimizer = pyro.optim.Adam({"lr": 0.1})
            svi = SVI(conjugate.model, guide, optimizer, TemperedTrace_ELBO())
            loss = svi.step(*arguments)
        trained.append((guide.location(), run.losses, loss))
    (loc, losses, loss), (other_loc, other_losses, other_loss) = trained
    assert torch.equal(loc, other_loc) and torch.equal(losses, other_losses)
    assert loss == other_loss


def test_elbo_estimate_is_the_exact_one(conjugate):
    guide = conjugate.mean_field(guides.AutoMeanField(conjugate.model))
    likelihood, kl = conjugate.terms(guide.loc.detach(), guide.scale.detach())
    found = training.estimate_elbo(
        conjugate.model, guide, conjugate.x, conjugate.y, num_particles=4000
    )
    assert found == pytest.approx((likelihood - kl).item(), abs=0.2)


@pytest.mark.parametrize("options", [{}, {"batch_size": 7}])
def test_the_error_of_an_elbo_estimate_is_its_spread(conjugate, options):
    """Over 60 estimates, of all rows at once and of batches; of a point mass it is zero."""
    model = models.Regression(conjugate.model.network, noise=0.5, num_data=len(conjugate.y))
    x, y = conjugate.x, conjugate.y
    options = {"num_particles": 200, "with_error": True, **options}
    guide = guides.AutoMeanField(model, init_scale=0.1).prototype(x, y)
    found = [training.estimate_elbo(model, guide, x, y, **options) for _ in range(60)]
    values, errors = torch.tensor(found).unbind(1)
    assert errors.square().mean().sqrt() == pytest.approx(float(values.std()), rel=0.35)
    point = guides.AutoMAP(model).prototype(x, y)
    bound, error = training.estimate_elbo(model, point, x, y, **options)
    assert error == pytest.approx(0.0, abs=1e-9)
    assert bound == training.estimate_elbo(model, point, x, y, num_particles=1)


def straight_line(rows, **options):
    x = torch.linspace(-1, 1, rows)[:, None]
    y = 0.7 * x[:, 0] + 0.1 * torch.randn(rows)
    network = bayesianize(torch.nn.Linear(1, 1), priors.Normal(1.0))
    return models.Regression(network, noise=2.0, **options), x, y


def test_minibatches_of_many_rows_reach_the_same_posterior():
    model, x, y = straight_line(3000, num_data=3000)
    guide = guides.AutoMeanField(model)
    run = training.train(model, guide, x, y, steps=400, learning_rate=0.04)
    assert run.batch_size == 256
    precision = torch.stack([x.square().sum(), torch.tensor(3000.0)]) / 4 + 1
    assert torch.allclose(guide.scale.detach(), precision.rsqrt(), rtol=0.1)


def test_elbo_of_many_rows_is_taken_in_parts(monkeypatch, capsys):
    model, x, y = straight_line(100, num_data=100)
    guide = guides.AutoMeanField(model, init_scale=1e-4).prototype(x, y)
    whole = training.estimate_elbo(model, guide, x, y)
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # a second at each look
    parts = training.estimate_elbo(model, guide, x, y, batch_size=30, progress=True)
    assert "ELBO" in capsys.readouterr().err
    assert parts == pytest.approx(whole, rel=1e-3)


def test_ctrl_c_keeps_what_was_learned(monkeypatch):
    model, x, y = straight_line(20)
    guide = guides.AutoMeanField(model)
    step, calls = torch.optim.Adam.step, []

    def interrupted(self, *args):
        calls.append(step(self, *args))
        if len(calls) == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.Adam, "step", interrupted)
    with pytest.warns(BdlWarning, match="interrupted after 29 of 100 steps"):
        run = training.train(model, guide, x, y, steps=100)
    assert run.interrupted and len(run.losses) == 29
    assert guide.loc.isfinite().all()


def _bits(model, x, y):
    wrong = (y > 0).long().index_fill(0, torch.tensor([2, 17]), 2)
    return models.BinaryClassification(model.network, num_data=20), x, wrong


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({"batch_size": 5}, None, "num_data=20"),
        ({"batch_size": 0}, None, "batch_size must be at least 1"),
        ({"steps": 0}, None, "steps must be at least 1"),
        ({"steps": math.nan}, None, "must be a whole number"),
        ({"batch_size": 2.5}, None, "must be a whole number"),
        ({"batch_size": 5}, _bits, r"support.* in rows 2, 17"),
        ({}, lambda m, x, y: (m, x, y.index_fill(0, torch.tensor(3), torch.nan)), "rows 3"),
    ],
)
def test_what_is_refused(options, change, words):
    problem = straight_line(20)
    model, x, y = problem if change is None else change(*problem)
    with pytest.raises(ValueError, match=words):
        training.train(model, guides.AutoMeanField(model), x, y, **{"steps": 1, **options})


class _Sum(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, left, right):
        return self.linear(left + right)


@pytest.mark.filterwarnings("ignore:the loss rose")
def test_dicts_of_inputs_are_cut_as_tensors_are(conjugate):
    """Two parts that add up to x give the losses of x, in minibatches too."""
    x, y = conjugate.x, conjugate.y
    found = []
    for net, inputs in ((conjugate.net, x), (_Sum(conjugate.net), {"left": 0.3 * x, "right": x})):
        torch.manual_seed(0)
        net = bayesianize(net, priors.Normal(2.0))
        model = models.Regression(net, noise=0.5, num_data=8)
        x_scaled = inputs if isinstance(inputs, dict) else 1.3 * inputs
        guide = guides.AutoSWAG(model)
        run = training.train(model, guide, x_scaled, y, steps=6, batch_size=3)
        swag = training.collect_swag(
            model, guide, x_scaled, y, snapshots=2, learning_rate=1e-3, batch_size=3
        )
        mean_field = guides.AutoMeanField(model).prototype(x_scaled, y)
        bound = training.estimate_elbo(model, mean_field, x_scaled, y, batch_size=5)
        found.append(torch.cat([run.losses, swag.losses, torch.tensor([bound]).double()]))
    torch.testing.assert_close(found[1], found[0])
    with pytest.raises(ValueError, match=r"x\['left'\] is not finite|x\['left'\]"):
        training.train(model, guide, {"left": x * math.nan, "right": x}, y, steps=1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"elbo": TemperedTrace_ELBO}, r"the class TemperedTrace_ELBO: make one"),
        ({"optimizer": torch.optim.Adam}, r"optimizer must be one of torch over parameters"),
        ({"optimizer": pyro.optim.Adam({"lr": 0.1})}, r"those of Pyro are for pyro\.infer\.SVI"),
    ],
)
def test_classes_and_optimizers_of_pyro_are_refused_by_name(conjugate, options, words):
    guide = guides.AutoMeanField(conjugate.model)
    with pytest.raises(TypeError, match=words):
        training.train(conjugate.model, guide, conjugate.x, conjugate.y, steps=1, **options)


def test_guides_of_pyro_are_refused_by_name():
    model, x, y = straight_line(20)
    with pytest.raises(TypeError, match=r"AutoNormal: use pyro\.infer\.SVI"):
        training.train(model, AutoNormal(model), x, y, steps=1)
