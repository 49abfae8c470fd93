"""Posteriors in files: ``guide.save`` and ``load_posterior``."""

import subprocess
import sys
import textwrap

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.distributions.dropout_noise import Annealed, BernoulliNoise, GaussianNoise
from pyro_bdl.guides import (
    AutoLaplaceGGN,
    AutoMCDropout,
    AutoMeanField,
    AutoPathfinder,
    AutoSubnetwork,
)
from pyro_bdl.utils.tensor_file import load_tree, save_tree

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*#draws-without-their-program"),  # draws alone
    pytest.mark.filterwarnings("ignore:.*#dropout"),  # programs without hidden units to drop
    pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum"),  # around points that nobody trained
]


def _draws(guide):
    torch.manual_seed(3)
    return guide.sample_vectors(5).detach()


def test_every_guide_comes_back_bit_for_bit(guide, linear, tmp_path):
    (_, x, _), program = linear, guide.program_model
    path = guide.save(tmp_path / "posterior")
    found = bdl.load_posterior(path, program)
    assert type(found) is type(guide)
    assert torch.equal(_draws(found), _draws(guide))
    assert torch.equal(found.location(), guide.location())
    assert torch.equal(found.variances(), guide.variances())
    torch.manual_seed(0)
    expected = bdl.Predictive(program, guide, num_samples=3)(x)["y"]
    torch.manual_seed(0)
    assert torch.equal(bdl.Predictive(program, found, num_samples=3)(x)["y"], expected)
    again = found.save(tmp_path / "again")  # a loaded posterior can be saved
    assert torch.equal(_draws(bdl.load_posterior(again, program)), _draws(guide))


def test_every_trained_class_comes_back(kind, linear, tmp_path):
    program, x, y = linear
    guide = kind(program).prototype(x, y)
    with torch.no_grad():
        guide.loc.add_(0.3)
    found = bdl.load_posterior(guide.save(tmp_path / "posterior"), program)
    assert type(found) is kind
    assert torch.equal(found.loc, guide.loc)


_X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64)[:, None]


def _network(width=4, noise=0.3, dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(1, width), nn.BatchNorm1d(width), nn.Tanh()]
    layers += [nn.Dropout(dropout)] * bool(dropout)
    net = nn.Sequential(*layers, nn.Linear(width, 1)).double()
    scale = pyro.nn.PyroParam(torch.tensor(noise, dtype=torch.float64), dist.constraints.positive)
    return bdl.models.Regression(bdl.bayesianize(net), noise=scale, num_data=24)


def test_the_programs_own_numbers_come_along_and_the_data_do_not(tmp_path):
    model = _network(noise=0.7)
    guide = AutoLaplaceGGN(model, structure="kron").prototype(_X, _X)
    guide(_X, _X)
    model(_X, _X)  # moves the statistics of BatchNorm
    posterior = guide.laplace_approximation((_X, _X))
    path = posterior.save(tmp_path / "posterior")
    stored = load_tree(path, kind="posterior")["program"]["batch"][0]
    assert [len(rows) for rows in stored] == [2, 2]
    other = _network(noise=0.1)
    found = bdl.load_posterior(path, other)
    assert other.noise.item() == pytest.approx(0.7)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    expected = bdl.LinearizedPredictive(model, posterior).parameter_moments(_X)["y"]
    moments = bdl.LinearizedPredictive(other, found).parameter_moments(_X)["y"]
    assert torch.equal(moments.variance["loc"], expected.variance["loc"])
    assert found.num_data == 24
    assert bdl.evidence.log_marginal_likelihood(found).item() == pytest.approx(
        bdl.evidence.log_marginal_likelihood(posterior).item()
    )
    more = found.update((_X, _X)).variances()  # further data are welcome
    assert torch.equal(more, posterior.update((_X.clone(), _X)).variances())
    with pytest.raises(RuntimeError, match="loaded from a file without its data"):
        bdl.evidence.maximize(found, linearized=True)


def test_dropout_layers_are_silenced_again(tmp_path):
    guide = AutoMCDropout.from_dropout_layers(_network(dropout=0.25), learn_p=True)
    path = guide.prototype(_X, _X).save(tmp_path / "posterior")
    model = _network(dropout=0.25)
    found = bdl.load_posterior(path, model)
    assert found.layers
    assert found.rates().keys() == guide.rates().keys()


def test_another_program_is_refused_and_stays_as_it_was(tmp_path):
    model = _network()
    path = AutoMeanField(model).prototype(_X, _X).save(tmp_path / "posterior")
    other = _network(width=5)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    shapes = r"'\S*weight' is of shape \(\d+, \d+\) in the file and of shape \(\d+, \d+\) here"
    with pytest.raises(RuntimeError, match=f"another program: {shapes}"):
        bdl.load_posterior(path, other)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())

    def plain(x, y=None):
        pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))

    with pytest.raises(RuntimeError, match="another program"):
        bdl.load_posterior(path, plain)


def _regression(prior=1.0, noise=0.5, num_data=24):
    torch.manual_seed(0)
    net = bdl.bayesianize(nn.Linear(1, 1).double(), bdl.priors.Normal(prior))
    return bdl.models.Regression(net, noise=noise, num_data=num_data)


@pytest.mark.parametrize(
    "change, site",
    [({"prior": 0.1}, "weight"), ({"noise": 5.0}, "y"), ({"num_data": 240}, "y"), ({}, None)],
    ids=["prior", "noise", "num_data", "none"],
)
def test_a_program_with_another_density_is_refused(tmp_path, change, site):
    """Its evidence would be of the one's curvature and the other's prior."""
    guide = AutoLaplaceGGN(_regression(), structure="full").prototype(_X, _X[:, 0])
    path = guide.laplace_approximation((_X, _X[:, 0])).save(tmp_path / "posterior")
    other = _regression(**change)
    if site is None:
        found = bdl.load_posterior(path, other)
        again = AutoLaplaceGGN(other, structure="full").prototype(_X, _X[:, 0])
        exact = again.laplace_approximation((_X, _X[:, 0]))
        evidence = bdl.evidence.log_marginal_likelihood
        assert evidence(found).item() == pytest.approx(evidence(exact).item())
        return
    with pytest.raises(RuntimeError, match=rf"another program.*of the site '{site}' was"):
        bdl.load_posterior(path, other)


class Doubled(GaussianNoise):
    """A noise of a user's."""

    def __init__(self, factor):
        self.factor = factor


@pytest.mark.parametrize(
    "noise",
    [BernoulliNoise(0.3), BernoulliNoise(Annealed(2.0, 0.5, 10)), GaussianNoise(), Doubled(2.0)],
)
def test_the_noise_of_dropout_comes_back(tmp_path, noise):
    guide = AutoMCDropout(_network(), noise=noise, learn_p=True).prototype(_X, _X)
    found = bdl.load_posterior(guide.save(tmp_path / "posterior"), _network())
    assert type(found.noise) is type(noise) and vars(found.noise) == vars(noise)
    assert found.learn_p and found.rates() == guide.rates()


def test_a_selector_and_the_options_of_a_path_come_back(tmp_path):
    selector = bdl.selectors.Random(3)
    guide = AutoSubnetwork(_network(), select=selector, size=4).prototype(_X, _X)
    found = bdl.load_posterior(guide.save(tmp_path / "subnetwork"), _network())
    assert found.select.seed == 3 and found.size == 4
    assert torch.equal(found.choose((_X, _X)), guide.choose((_X, _X)))
    by_layer = AutoSubnetwork(model := _network(), select=bdl.selectors.Sites(model.network))
    with pytest.raises(TypeError, match=r"\['select'\]\['selection'\].*without code"):
        by_layer.prototype(_X, _X).save(tmp_path / "by layer")
    path = AutoPathfinder(_network(), history=2, num_paths=2, most_steps=9).prototype(_X, _X)
    found = bdl.load_posterior(path.save(tmp_path / "path"), _network())
    assert found.history == 2 and torch.equal(found.elbos, path.elbos)


def test_a_class_that_has_moved_within_its_package_is_found(tmp_path):
    guide = AutoMeanField(_network()).prototype(_X, _X)
    tree = load_tree(guide.save(tmp_path / "guide"), kind="posterior")
    for path in ("pyro_bdl.elsewhere.AutoMeanField", "other.AutoMeanField"):
        tree["guide"]["class"] = path
        save_tree(tmp_path / "moved", tree, kind="posterior")
        if path.startswith("pyro_bdl"):
            found = bdl.load_posterior(tmp_path / "moved", _network())
            assert torch.equal(found.loc, guide.loc)
        else:
            with pytest.raises(ValueError, match=r"other\.AutoMeanField, which is not known"):
                bdl.load_posterior(tmp_path / "moved", _network())


def test_what_is_no_posterior_is_refused(tmp_path):
    path = tmp_path / "posterior"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        bdl.load_posterior(path, _network())
    bdl.Checkpoint(path, net=nn.Linear(1, 1)).save(0)
    with pytest.raises(ValueError, match="it is checkpoint, version 1"):
        bdl.load_posterior(path, _network())
    model = _network()
    guide = AutoLaplaceGGN(model, subset=lambda name, latent: "weight" in name)
    with pytest.raises(TypeError, match=r"\['subset'\] is a function"):
        guide.prototype(_X, _X).save(path)


_OTHER_PROCESS = textwrap.dedent("""
    import sys, torch
    from torch import nn
    import pyro_bdl as bdl
    x = torch.linspace(-1.0, 1.0, 24)[:, None]
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), num_data=24)
    posterior = bdl.load_posterior(sys.argv[1], model)
    moments = bdl.LinearizedPredictive(model, posterior).parameter_moments(x)["y"]
    print(moments.variance["loc"].sum().item())
""")


@pytest.mark.slow
def test_another_process_opens_it(tmp_path):
    x = _X.float()
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    model = bdl.models.Regression(bdl.bayesianize(net), num_data=24)
    posterior = AutoLaplaceGGN(model).prototype(x, x).laplace_approximation((x, x))
    path = posterior.save(tmp_path / "posterior")
    command = [sys.executable, "-c", _OTHER_PROCESS, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    expected = (
        bdl.LinearizedPredictive(model, posterior).parameter_moments(x)["y"].variance["loc"].sum()
    )
    assert float(found) == pytest.approx(expected.item(), rel=1e-6)
