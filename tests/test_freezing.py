"""``freeze``: the numbers of a predictive, without Pyro, for any number of rows."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.families import FAMILIES
from torch import nn
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode

import pyro_bdl as bdl

ANY_ROWS = ({0: Dim("n")},)


def by_hand(x, y=None):
    weights = pyro.sample("w", dist.Normal(torch.zeros(4, 1), 1.0).to_event(2))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal((x @ weights)[:, 0], scale), obs=y)


def convolutions():
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip
    return bdl.models.Classification(bdl.bayesianize(net)), torch.randn(9, 1, 6, 6)


def attention():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))
    return bdl.models.Classification(bdl.bayesianize(net)), torch.randn(9, 3, 4)


def perceptron():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return bdl.models.HeteroscedasticRegression(bdl.bayesianize(net)), torch.randn(9, 4)


PROGRAMS = {
    "by hand": lambda: (by_hand, torch.randn(9, 4)),
    "perceptron": perceptron,
    "convolutions": convolutions,
    "attention": attention,
}


def problem(name):
    model, x = PROGRAMS[name]()
    classes = isinstance(model, bdl.models.Classification)
    return model, x, torch.randint(3, (9,)) if classes else torch.randn(9)


def drawn(model, x, y, draws=4):
    """``Samples`` of a mean-field guide that was not trained."""
    latents = bdl.guides.AutoMeanField(model).prototype(x, y).sample_latents(draws)
    return bdl.Samples({name: value[None] for name, value in latents.items()})


def pair(result):
    """Mean and sd; of classes the probabilities alone."""
    return result if isinstance(result, tuple | list) else (result,)


def close(found, expected):
    for value, other in zip(pair(found), pair(expected), strict=True):
        torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_the_predictive(name, monkeypatch):
    model, x, y = problem(name)
    samples = drawn(model, x, y)
    frozen = bdl.freeze(model, samples, x[:1], draws=4)
    moments = bdl.Predictive(model, samples).moments(x)["y"]
    monkeypatch.setattr(pyro, "sample", None)  # not needed any more
    expected = moments.mean, moments.variance.sqrt()
    for rows in (9, 1, 4):
        close(frozen(x[:rows]), tuple(v[:rows] for v in expected)[: len(pair(frozen(x)))])


@pytest.mark.parametrize(("name", "linearized"), [("perceptron", True), ("convolutions", False)])
def test_export_and_compile_with_any_number_of_rows(name, linearized):
    model, x, y = problem(name)
    posterior = drawn(model, x, y)
    if linearized:
        guide = bdl.guides.AutoLaplaceGGN(model, structure="diag").prototype(x, y)
        posterior = guide.laplace_approximation((x, y))
    frozen = bdl.freeze(model, posterior, x, draws=4)
    exported = torch.export.export(frozen, (x,), dynamic_shapes=ANY_ROWS).module()
    compiled = torch.compile(frozen, backend="aot_eager")
    for rows in (9, 1, 4):
        close(exported(x[:rows]), frozen(x[:rows]))
        close(compiled(x[:rows]), frozen(x[:rows]))


def test_onnx(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    model, x, y = problem("convolutions")
    frozen = bdl.freeze(model, drawn(model, x, y), x, draws=4)
    file = str(tmp_path / "frozen.onnx")
    torch.onnx.export(frozen, (x,), file, dynamo=True, dynamic_shapes=ANY_ROWS, verbose=False)
    session = runtime.InferenceSession(file)
    (name,) = (entry.name for entry in session.get_inputs())
    for rows in (9, 1, 4):
        (found,) = session.run(None, {name: x[:rows].numpy()})
        close(torch.from_numpy(found), frozen(x[:rows]))


def test_the_state_is_in_the_state_dict():
    model, x, y = problem("perceptron")
    frozen, other = (bdl.freeze(model, drawn(model, x, y), x, draws=4) for _ in range(2))
    assert (frozen(x)[0] - other(x)[0]).abs().max() > 1e-3
    other.load_state_dict(frozen.state_dict())
    close(other(x), frozen(x))


def test_laplace_is_linearized_around_its_exact_mean():
    model, x, y = problem("perceptron")
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    count = 2000
    means, noise = bdl.freeze(model, posterior, x, draws=count).at_draws(x)
    exact = bdl.LinearizedPredictive(model, posterior).parameter_moments(x)["y"]
    torch.testing.assert_close(means.mean(0), exact.mean["loc"], atol=1e-4, rtol=1e-4)
    # the variance of S Normal draws has a relative standard error of sqrt(2 / S)
    ratio = means.var(0) / exact.variance["loc"]
    assert (ratio - 1).abs().max() < 5 * (2 / count) ** 0.5
    log_scale = noise.log() / 2
    torch.testing.assert_close(log_scale.mean(0), exact.mean["scale"], atol=1e-4, rtol=1e-4)


# whose moments are known by draws alone
WITHOUT_MOMENTS = {"LogisticNormal", "ProjectedNormal", "SkewLogistic", "TransformedDistribution"}


def observing(family):
    size, make = FAMILIES[family]

    def program(x, y=None):
        weights = pyro.sample("w", dist.Normal(torch.zeros(4, size), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", make(x @ weights), obs=y)

    return program


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT_MOMENTS])
def test_every_family_is_that_of_the_predictive(family):
    model, x = observing(family), torch.randn(7, 4)
    samples = bdl.Samples({"w": 0.5 * torch.randn(1, 3, 4, FAMILIES[family][0])})
    frozen = bdl.freeze(model, samples, x[:2], draws=3)
    moments = bdl.Predictive(model, samples).draw_moments(x)["y"]
    for rows in (7, 2, 1):
        found = frozen.at_draws(x[:rows])
        for value, other in zip(found, moments, strict=True):
            torch.testing.assert_close(value, other[:, :rows], atol=1e-5, rtol=1e-5, equal_nan=True)


def with_classes(x, y=None):
    """A discrete site for each datum, which predictions sum out."""
    weights = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        kind = pyro.sample("kind", dist.Bernoulli(0.3))
        pyro.sample("y", dist.Normal(x @ weights + 2.0 * kind, 0.5), obs=y)


def test_discrete_sites_are_summed_out():
    x, samples = torch.randn(6, 4), bdl.Samples({"w": torch.randn(1, 3, 4)})
    frozen = bdl.freeze(with_classes, samples, x[:1], draws=3)
    mean, variance = frozen.at_draws(x)
    loc = torch.einsum("nd,cd->cn", x, samples.latents["w"][0])
    torch.testing.assert_close(mean, loc + 0.6)
    torch.testing.assert_close(variance, torch.full_like(mean, 0.25 + 4.0 * 0.3 * 0.7))


class Network(nn.Module):
    """Of four inputs, with rows as a function of all of them and of a layer."""

    def __init__(self, rows):
        super().__init__()
        self.layer, self.rows = nn.Linear(4, 1), rows
        self.register_buffer("fixed", torch.randn(9, 1))

    def forward(self, x):
        return self.rows(self, x)


def by_pairs(net, x):
    n = len(x)
    pairs = (x[:, None] - x).reshape(n * n, 4)
    return net.layer(pairs.tanh()).reshape(n, n).sum(1, keepdim=True)


def in_blocks(net, x):
    padded = nn.functional.pad(net.layer(x), (0, 0, 0, -len(x) % 8))
    return padded[: len(x)]


DEPENDING = {
    "long": (lambda net, x: net.layer(x) * (2.0 if len(x) > 70 else 1.0), "n <= 70"),
    "single": (lambda net, x: net.layer(x) * (3.0 if len(x) == 1 else 1.0), "special if it is one"),
    "odd": (lambda net, x: net.layer(x) * (1 + len(x) % 2), "n"),
    "at 1000": (lambda net, x: net.layer(x) * (2.0 if x.shape[0] == 1000 else 1.0), "1000"),
    "at 61": (lambda net, x: net.layer(x) * (2.0 if x.shape[0] == 61 else 1.0), "61"),
    "numel": (lambda net, x: net.layer(x) * (2.0 if x.numel() > 4000 else 1.0), "n"),
    "pairs": (by_pairs, r"n\*\*2"),
    "blocks": (in_blocks, "n"),
    "parts": (lambda net, x: torch.cat([net.layer(part) for part in x.split(50)]), "n"),
    "loop": (lambda net, x: torch.stack([net.layer(x[i]) for i in range(len(x))]), "n"),
    "fixed": (lambda net, x: net.layer(x) + net.fixed, "fails with 3 rows .*9"),
}


@pytest.mark.parametrize("kind", ["draws", "Laplace"])
@pytest.mark.parametrize("name", DEPENDING)
def test_what_depends_on_the_number_of_rows_is_refused(name, kind):
    function, words = DEPENDING[name]
    model = bdl.models.Regression(bdl.bayesianize(Network(function)), noise=0.3)
    x, y = torch.randn(9, 4), torch.randn(9)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full", rows="together").prototype(x, y)
    posterior = guide.laplace_approximation((x, y)) if kind == "Laplace" else drawn(model, x, y)
    with pytest.raises(bdl.errors.UnsupportedProgramError, match=words):
        bdl.freeze(model, posterior, x, draws=4)


ALLOWED = {
    "squeeze": lambda net, x: net.layer(x).squeeze(),  # the program restores one row
    "len": lambda net, x: net.layer(x) / len(x) ** 0 + torch.zeros(len(x), 1),
    "ones": lambda net, x: net.layer(torch.cat([x[:, :3], x.new_ones(x.shape[0], 1)], 1)),
    "tokens": lambda net, x: net.layer(x.repeat(2, 1)).reshape(2, len(x), 1).mean(0),
    "constants": lambda net, x: net.layer(x) * (2.0 if net.fixed.sum() > -1e9 else 1.0),
    "distances": lambda net, x: net.layer(torch.cdist(x, net.fixed[:4].mT.expand(4, 4))),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_sizes_and_constants_may_be_used(name):
    model = bdl.models.Regression(bdl.bayesianize(Network(ALLOWED[name])), noise=0.3)
    x, y = torch.randn(9, 4), torch.randn(9)
    samples = drawn(model, x, y)
    frozen = bdl.freeze(model, samples, x[:1], draws=4)
    for rows in (torch.cat([x] * 9), x[:1]):
        moments = bdl.Predictive(model, samples).moments(rows)["y"]
        close(frozen(rows), (moments.mean, moments.variance.sqrt()))


def test_len_is_what_it_was():
    """Afterwards, and all the time in other threads."""

    class Page(torch.Tensor):
        def __len__(self):
            return 7

    page, before, found = torch.zeros(3).as_subclass(Page), len, []

    def rows(net, x):
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(lambda: len(page)).result())
        return DEPENDING["long"][0](net, x)

    model = bdl.models.Regression(bdl.bayesianize(Network(rows)), noise=0.3)
    with pytest.raises(bdl.errors.UnsupportedProgramError):
        bdl.freeze(
            model, drawn(model, torch.randn(9, 4), torch.randn(9)), torch.randn(9, 4), draws=4
        )
    assert len is before and len([1, 2]) == 2
    assert set(found) == {7}


def test_sites_of_any_name():
    names = ("graph", "classes", "a.0.weight", "a__0.weight", "draws", "offset of draws")

    def program(x, y=None):
        total = 0.0
        for number, name in enumerate(names):
            total = total + number * pyro.sample(name, dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(total * x, 1.0), obs=y)

    samples = bdl.Samples({name: torch.randn(1, 3) for name in names})
    x = torch.randn(5)
    frozen = bdl.freeze(program, samples, x, draws=3)
    slope = sum(number * samples.latents[name][0] for number, name in enumerate(names))
    torch.testing.assert_close(frozen.at_draws(x).mean, slope[:, None] * x)
    assert frozen.sites["draws"] == names
    point = bdl.guides.AutoLaplaceGGN(program, structure="full").prototype(x, x)
    frozen = bdl.freeze(program, point.laplace_approximation((x, x)), x, draws=3)
    assert frozen.sites["center"] == frozen.sites["draws"] == names


@pytest.mark.parametrize(
    "args", [(), (torch.randn(0, 4),), (torch.tensor(1.0),), (torch.randn(3, 4), torch.randn(2))]
)
def test_examples_are_tensors_with_rows(args):
    samples = bdl.Samples({"w": torch.randn(1, 3, 4, 1), "scale": torch.ones(1, 3)})
    with pytest.raises(bdl.errors.ArgumentError, match="freeze needs the program's arguments"):
        bdl.freeze(by_hand, samples, *args)
    with pytest.raises(bdl.errors.ArgumentError, match="ndarray"):
        bdl.freeze(by_hand, samples, torch.randn(3, 4).numpy())


def deep(outputs=1):
    hidden = [nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(40, outputs))


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def last_layer(model, data):
    return bdl.guides.AutoLaplaceGGN(model, subset="last-layer").prototype(*data)


OF_LAST_LAYER = {
    "Laplace": lambda model, data: last_layer(model, data).laplace_approximation(data),
    "AutoLastLayer": lambda model, data: (
        bdl.guides.AutoLastLayer(model).prototype(*data).laplace_approximation(data)
    ),
    "variational": lambda model, data: bdl.guides.AutoVariationalLastLayer(model).prototype(*data),
}


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
@pytest.mark.parametrize("kind", OF_LAST_LAYER)
def test_only_what_varies_is_kept_and_computed_for_each_draw(kind):
    x, y, count = torch.randn(30, 4), torch.randn(30), 20
    net = deep()
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.3)
    frozen = bdl.freeze(model, OF_LAST_LAYER[kind](model, (x, y)), x[:1], draws=count)
    network, head = flops(lambda: net(x)), 2 * 30 * 40
    assert flops(lambda: frozen(x)) <= network + (count + 1) * head
    numbers = sum(value.numel() for value in frozen.state_dict().values())
    assert numbers <= sum(p.numel() for p in net.parameters()) + count * 41 + 10


def test_all_weights_cost_two_passes_a_draw():
    x, y, count = torch.randn(30, 4), torch.randn(30), 20
    net = deep()
    model = bdl.models.Regression(bdl.bayesianize(net), noise=0.3)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="diag").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    frozen = bdl.freeze(model, posterior, x[:1], draws=count)
    assert flops(lambda: frozen(x)) <= (2 * count + 1) * flops(lambda: net(x))
    numbers = sum(value.numel() for value in frozen.state_dict().values())
    assert numbers <= (count + 1) * sum(p.numel() for p in net.parameters()) + 10


def test_a_subset_of_entries_and_a_point():
    """Half of a layer's entries vary, then none: the mean is the network at the center."""
    x, y = torch.randn(9, 4), torch.randn(9)
    model = bdl.models.Regression(bdl.bayesianize(deep()), noise=0.3)
    chosen = torch.arange(10, 60)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full", subset=chosen).prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    frozen = bdl.freeze(model, posterior, x, draws=500)
    exact = bdl.LinearizedPredictive(model, posterior).parameter_moments(x)["y"]
    mean, sd = frozen(x)
    torch.testing.assert_close(mean, exact.mean["loc"], atol=1e-4, rtol=1e-4)
    # the sd of S Normal draws has a relative error of 1 / sqrt(2 S)
    spread = (sd.square() - 0.3**2) / exact.variance["loc"]
    assert (spread - 1).abs().max() < 5 * (2 / 500) ** 0.5
    point = bdl.guides.AutoMAP(model).prototype(x, y)
    frozen = bdl.freeze(model, point, x, draws=5)
    means, _ = frozen.at_draws(x)
    assert means.shape == (5, 9) and not frozen.sites["draws"]
    torch.testing.assert_close(means, bdl.Predictive(model, point, 5).mean(x)["y"])


def of_two(x, offsets, y=None):
    weights = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weights + offsets, 1.0), obs=y)


class OfTwo(nn.Module):
    """``frozen`` with names for its inputs, which any version of torch can export."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen

    def forward(self, x, offsets):
        return self.frozen(x, offsets)


def test_two_inputs():
    samples = bdl.Samples({"w": torch.randn(1, 3, 4)})
    x, offsets = torch.randn(5, 4), torch.randn(5)
    frozen = bdl.freeze(of_two, samples, x[:1], offsets[:1], draws=3)
    rows = {0: Dim("n")}
    torch.export.export(frozen, (x, offsets), dynamic_shapes=(rows, (rows,)))
    exported = torch.export.export(OfTwo(frozen), (x, offsets), dynamic_shapes=(rows, rows))
    mean = x @ samples.latents["w"][0].mean(0) + offsets
    for count in (5, 1):
        found, _ = exported.module()(x[:count], offsets[:count])
        torch.testing.assert_close(found, mean[:count])


def with_two_sites(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("a", dist.Normal(weight * x, 1.0), obs=y)
        pyro.sample("b", dist.Normal(-weight * x, 1.0), obs=y)


def branching(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(weight * x if x.sum() > 0 else x, 1.0), obs=y)


def of_three_rows(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(weight * x if len(x) == 3 else x, 1.0), obs=y)


def without_moments(x, y=None):
    weight = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.LogisticNormal(weight * x[:, None], torch.ones(2)), obs=y)


@pytest.mark.parametrize(
    "model, words",
    [
        (without_moments, "random numbers"),
        (with_two_sites, "site="),
        (branching, "control flow"),
        (of_three_rows, "number (n )?of rows"),
    ],
)
def test_refusals(model, words):
    samples = bdl.Samples({"w": torch.ones(1, 3)})
    with pytest.raises(bdl.errors.UnsupportedProgramError, match=words):
        bdl.freeze(model, samples, torch.randn(4), draws=3)


def test_a_site_by_name():
    samples = bdl.Samples({"w": torch.tensor([[1.0, 2.0]])})
    x = torch.randn(4)
    with pytest.raises(
        bdl.errors.UnsupportedProgramError, match=r"'f' is none; the program has .*b"
    ):
        bdl.freeze(with_two_sites, samples, x, draws=2, site="f")
    mean, _ = bdl.freeze(with_two_sites, samples, x, draws=2, site="b")(x)
    torch.testing.assert_close(mean, -1.5 * x)


@pytest.mark.parametrize("kind", ["draws", "Laplace"])
def test_a_deterministic_site_in_the_plate(kind):
    """Pyro's statement of it has n times the n numbers, which repeat."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            f = pyro.deterministic("f", (x @ w).sin())
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    x, y = torch.randn(9, 4), torch.randn(9)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = bdl.Samples({"w": torch.randn(1, 4, 4)})
    if kind == "Laplace":
        guide.warned_of.add("not at a maximum")
        posterior = guide.laplace_approximation((x, y))
    frozen = bdl.freeze(model, posterior, x[:1], draws=4)
    for rows in (torch.cat([x] * 9), x[:1]):
        if kind == "Laplace":
            mean = (rows @ guide.location()).sin()
            close(frozen(rows)[0], mean)
        else:
            moments = bdl.Predictive(model, posterior).moments(rows)["y"]
            close(frozen(rows), (moments.mean, moments.variance.sqrt()))
