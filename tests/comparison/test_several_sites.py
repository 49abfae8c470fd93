"""Programs of several observed sites in a comparison, against densities and means by hand."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import Samples, compare, k_fold
from pyro_bdl.errors import BdlWarning

pytestmark = pytest.mark.usefixtures("double")
MOVES = [[0.8, 0.2], [0.3, 0.7]]
NOISE = 0.7


def draws(*shape, scale=1.0, count=15):
    torch.manual_seed(3)
    return Samples({"w": scale * torch.randn(2, count, *shape)})


def of_one(posterior, program, *data, **options):
    return compare(program, {"a": posterior}, *data, reference=None, **options).numbers()["a"]


def weights(*shape):
    return pyro.sample("w", dist.Normal(torch.zeros(*shape), 1.0).to_event(len(shape)))


def log_mean(densities):
    """-log mean_s p(y_n | w_s) of densities (S, N)."""
    return (len(densities) * torch.ones(())).log() - densities.logsumexp(0)


# A hidden Markov chain


def chain(x, y=None):
    w, z, moves = weights(2), 0, torch.tensor(MOVES)
    for t in pyro.markov(range(len(x))):
        z = pyro.sample(f"z{t}", dist.Categorical(moves[z]))
        pyro.sample(f"y{t}", dist.Normal(w[z], NOISE), obs=None if y is None else y[t])


def chains(y):
    """The same for several sequences (C, T), which have no inputs."""
    w, z, moves = weights(2), 0, torch.tensor(MOVES)
    with pyro.plate("sequences", len(y)):
        for t in pyro.markov(range(y.shape[1])):
            z = pyro.sample(f"z{t}", dist.Categorical(moves[z]))
            pyro.sample(f"y{t}", dist.Normal(w[z], NOISE), obs=y[:, t])


def forward(w, y):
    """log p(y | w) of a sequence by the forward algorithm, and E[y_t | y_1, ..., y_{t-1}, w]."""
    moves, means, total = torch.tensor(MOVES), [], torch.zeros(())
    p = moves[0]
    for value in y:
        means.append(p @ w)
        joint = p * dist.Normal(w, NOISE).log_prob(value).exp()
        total = total + joint.sum().log()
        p = (joint / joint.sum()) @ moves
    return total, torch.stack(means)


def test_a_chain_has_its_joint_density_and_one_step_ahead_means():
    y, posterior = torch.tensor([0.3, -1.0, 0.8, 1.4]), draws(2)
    found = of_one(posterior, chain, torch.zeros(4, 1), y)
    exact = [forward(w, y) for w in posterior.flat()["w"]]
    density = torch.stack([total for total, _ in exact])[:, None]
    assert found["nlpd"] == pytest.approx(log_mean(density).item() / 4, rel=1e-9)
    mean = torch.stack([means for _, means in exact]).mean(0)
    assert found["rmse"] == pytest.approx((y - mean).square().mean().sqrt().item(), rel=1e-9)


def test_no_datum_of_a_chain_is_left_out():
    y = torch.tensor([0.3, -1.0, 0.8, 1.4])
    data = torch.zeros(4, 1), y
    with pytest.warns(BdlWarning, match="tie the data of all observed sites to each other"):
        found = of_one(draws(2), chain, *data, train=data)
    assert "elpd_loo" not in found


def test_sequences_in_a_plate_are_left_out_one_by_one():
    torch.manual_seed(0)
    y = torch.randn(6, 3)
    posterior = draws(2, scale=0.1, count=60)
    found = of_one(posterior, chains, y, train=(y,))
    flat = posterior.flat()["w"]
    density = torch.stack([torch.stack([forward(w, one)[0] for one in y]) for w in flat])
    assert found["nlpd"] == pytest.approx(log_mean(density).mean().item(), rel=1e-9)
    exact = bdl.diagnostics.loo(density.unflatten(0, (2, -1)))
    assert found["elpd_loo"] == pytest.approx(exact.elpd, abs=0.05)
    parts = of_one(posterior, chains, y[:5])  # data may have another number of sequences
    assert parts["nlpd"] == pytest.approx(log_mean(density[:, :5]).mean().item(), rel=1e-9)


def test_as_many_steps_as_sequences_are_no_rows():
    """The first dimension of y is time, and the plate has as many cells."""

    def turned(y):
        chains(y.T)

    torch.manual_seed(0)
    y, posterior = torch.randn(3, 3), draws(2)
    found = of_one(posterior, turned, y)
    assert found["nlpd"] == pytest.approx(of_one(posterior, chains, y.T)["nlpd"], rel=1e-9)


# Mixtures


def test_sites_that_share_a_component_have_one_density_a_row():
    def pair(x, y):
        w = weights(2)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
            pyro.sample("a", dist.Normal(w[z], 1.0), obs=y["a"])
            pyro.sample("b", dist.Normal(-w[z], 0.5), obs=y["b"])

    torch.manual_seed(0)
    y, posterior = {"a": torch.randn(5), "b": torch.randn(5)}, draws(2)
    w = posterior.flat()["w"][:, None]
    terms = dist.Normal(w, 1.0).log_prob(y["a"][:, None])
    terms = terms + dist.Normal(-w, 0.5).log_prob(y["b"][:, None])
    density = (terms + torch.tensor([0.3, 0.7]).log()).logsumexp(-1)
    found = of_one(posterior, pair, torch.zeros(5), y, train=(torch.zeros(5), y))
    assert found["nlpd"] == pytest.approx(log_mean(density).mean().item(), rel=1e-9)
    assert "loo_by" in found


def test_a_mixture_over_classes_has_class_probabilities():
    def model(y):
        w = weights(2, 3)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
            pyro.sample("y", dist.Categorical(logits=w[z]), obs=y)

    posterior, y = draws(2, 3), torch.tensor([0, 2, 1, 2])
    p = (posterior.flat()["w"].softmax(-1) * torch.tensor([0.3, 0.7])[:, None]).sum(1)
    found = of_one(posterior, model, y)
    assert found["nlpd"] == pytest.approx(-p.mean(0)[y].log().mean().item(), rel=1e-9)
    one_hot = nn.functional.one_hot(y, 3)
    brier = (p.mean(0) - one_hot).square().sum(-1).mean()
    assert found["brier"] == pytest.approx(brier.item(), rel=1e-9)


# Sites of their own


def two_groups(treated, control):
    w = weights(2)
    with pyro.plate("treated", len(treated)):
        pyro.sample("a", dist.Normal(w[0], 1.0), obs=treated)
    with pyro.plate("control", len(control)):
        pyro.sample("b", dist.Normal(w[1], 2.0), obs=control)


def test_sites_of_different_sizes_have_a_term_for_each_number():
    torch.manual_seed(0)
    data, posterior = (torch.randn(3), torch.randn(5)), draws(2, scale=0.1, count=60)
    w = posterior.flat()["w"]
    parts = [
        dist.Normal(w[:, :1], 1.0).log_prob(data[0]),
        dist.Normal(w[:, 1:], 2.0).log_prob(data[1]),
    ]
    density = torch.cat(parts, 1)
    found = of_one(posterior, two_groups, *data, train=data)
    assert found["nlpd"] == pytest.approx(log_mean(density).mean().item(), rel=1e-9)
    exact = bdl.diagnostics.loo(density.unflatten(0, (2, -1)))
    assert found["elpd_loo"] == pytest.approx(exact.elpd, abs=0.05)
    mean = torch.cat([w[:, :1].mean(0).expand(3), w[:, 1:].mean(0).expand(5)])
    rmse = (torch.cat(data) - mean).square().mean().sqrt()
    assert found["rmse"] == pytest.approx(rmse.item(), rel=1e-9)


def test_distances_are_between_the_functions_of_all_sites():
    data = torch.zeros(3), torch.zeros(5)
    near = draws(2)
    far = Samples({"w": near.latents["w"] + torch.tensor([1.0, 2.0])})
    row = compare(two_groups, {"far": far, "near": near}, *data, reference="near").numbers()["far"]
    assert row["mean_error"] == pytest.approx((23 / 8) ** 0.5, rel=1e-9)
    assert row["sd_ratio"] == pytest.approx(1.0)


def classes_and_numbers(x, y):
    w = weights(2)
    with pyro.plate("data", len(x)):
        pyro.sample("a", dist.Normal(x * w[0], 1.0), obs=y["a"])
        logits = torch.stack([x * w[1], 0.0 * x, -x], -1)
        pyro.sample("b", dist.Categorical(logits=logits), obs=y["b"])


def test_classes_beside_numbers_are_scored_by_the_density():
    torch.manual_seed(0)
    data = torch.randn(4), {"a": torch.randn(4), "b": torch.tensor([0, 2, 1, 2])}
    found = compare(classes_and_numbers, {"a": draws(2), "b": draws(2)}, *data, reference="b")
    row = found.numbers()["a"]
    assert "rmse" not in row and row["nlpd"] > 0 and row["mean_error"] == 0
    assert found.figures()


def heads():
    torch.manual_seed(0)
    outputs = {
        "price": bdl.models.Regression(noise=0.3, output=lambda f: f[:, 0]),
        "sold": bdl.models.BinaryClassification(output=lambda f: f[:, 1]),
    }
    network = bdl.bayesianize(nn.Linear(2, 2))
    return bdl.models.MultiOutput(network, outputs, num_data=6)


def test_more_test_rows_than_training_data():
    model = heads()
    data = torch.randn(6, 2), {"price": torch.randn(6), "sold": torch.ones(6)}
    guide = bdl.guides.AutoMeanField(model).prototype(*data)
    test = torch.randn(9, 2), {"price": torch.randn(9), "sold": torch.ones(9)}
    posterior = bdl.Samples({n: v[None] for n, v in guide.sample_latents(20).items()})
    terms = [
        bdl.Predictive(model, posterior).log_likelihood(
            test[0][i], {n: v[i] for n, v in test[1].items()}
        )
        for i in (slice(0, 6), slice(6, 9))
    ]
    density = torch.cat([part["price"] + part["sold"] for part in terms], 1)
    row = of_one(posterior, model, *test)
    assert row["nlpd"] == pytest.approx(log_mean(density).mean().item(), rel=1e-9)


def test_cross_validation_adds_the_sites_of_a_row():
    torch.manual_seed(0)
    x, y = torch.randn(4), {"a": torch.randn(4), "b": torch.tensor([0, 2, 1, 2])}
    posterior = draws(2)
    found = k_fold(lambda x, y: (classes_and_numbers, posterior), x, y, folds=2, progress=False)
    terms = bdl.Predictive(classes_and_numbers, posterior).log_likelihood(x, y)
    torch.testing.assert_close(found.pointwise, -log_mean(terms["a"] + terms["b"]))
    with pytest.raises(ValueError, match="no common plate with a cell for each row"):
        k_fold(lambda *data: (two_groups, posterior), x, x, folds=2, progress=False)


def test_what_one_site_alone_can_have():
    data = torch.zeros(3), torch.zeros(5)
    for options in ({"ood": torch.zeros(3)}, {"units": (2.0, 0.0)}):
        with pytest.raises(ValueError, match="at one site, and this one has the data of 'a', 'b'"):
            of_one(draws(2), two_groups, *data, **options)


def test_targets_that_the_program_changes_are_scored_as_observed():
    def model(x, y):
        w = weights(2)
        with pyro.plate("groups", 2), pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, None] * w, 1.0), obs=y.T.log())

    torch.manual_seed(0)
    x, y, posterior = torch.randn(4), torch.rand(2, 4), draws(2)
    w = posterior.flat()["w"]
    density = dist.Normal(x[:, None] * w[:, None], 1.0).log_prob(y.T.log()).flatten(1)
    found = of_one(posterior, model, x, y)
    assert found["nlpd"] == pytest.approx(log_mean(density).mean().item(), rel=1e-9)
    rmse = (y.T.log() - x[:, None] * w.mean(0)).square().mean().sqrt()
    assert found["rmse"] == pytest.approx(rmse.item(), rel=1e-9)


def labels(x, y=None):
    w = weights(1)
    with pyro.plate("data", len(x)):
        law = dist.Bernoulli(logits=x * w)
        pyro.sample("y", law.to_event(1).mask(y is None or (y >= 0).all(1)), obs=y)


def cells(x, y=None):
    w = weights(1)
    with pyro.plate("columns", x.shape[1], dim=-1), pyro.plate("data", len(x), dim=-2):
        law = dist.Normal(x * w, NOISE)
        pyro.sample("y", law.mask(y is None or y > -9), obs=y)


@pytest.mark.parametrize("program", [labels, cells])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_hold_one_value_many_times_have_the_errors_of_one(program, masked):
    """The rows are what was sampled; by the spread of ten times as many points the errors are a
    third of these."""
    x, posterior = torch.randn(40, 1), draws(1, count=100)
    y = torch.bernoulli(x.sigmoid()) if program is labels else x + torch.randn(40, 1)
    if masked:
        y[::4] = -10.0
    one, many = (
        bdl.evaluate(program, posterior, x.repeat(1, n), y.repeat(1, n), progress=False).points
        for n in (1, 10)
    )
    compared = ("accuracy", "brier", "ece") if program is labels else ("rmse", "nlpd")
    for key in compared:
        assert many[key].number == pytest.approx(one[key].number), key
        assert len(many[key].influence) == 40 - 10 * masked
        torch.testing.assert_close(many[key].influence, one[key].influence)
