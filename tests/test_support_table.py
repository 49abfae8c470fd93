"""The table of programs and methods in the documents: each cell is run, and compared with it.

With ``PYRO_BDL_WRITE_TABLE=1`` the cells are written instead. Cells of slow methods are run by
``-m slow``.
"""

import itertools
import os
import re
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.elbo import CompiledELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import ArgumentError, BdlWarning, MissingOperatorError
from pyro_bdl.utils.trees import tree_leaves

FILE = Path(__file__).parent.parent / "tutorials" / "programs_and_methods.md"
WRITES = os.environ.get("PYRO_BDL_WRITE_TABLE") == "1"
X = torch.tensor([[0.2, -1.0], [1.0, 0.5], [-0.3, 0.8], [0.6, 0.1]], dtype=torch.float64)
Y = torch.tensor([0.3, -0.2, 0.9, 0.4], dtype=torch.float64)
ZERO = X.new_zeros(())


# Programs: called with the inputs and, last, the targets, which are None for predictions


class Program(NamedTuple):
    """A row of the table.

    :param model: a Pyro program.
    :param data: the data that it is fitted to, the targets last.
    :param whole: all of its data, if ``data`` is a minibatch.
    """

    model: Any
    data: tuple[Any, ...] = (X, Y)
    whole: tuple[Any, ...] | None = None

    @property
    def test(self) -> tuple[Any, ...]:
        """The data of predictions, the targets last."""
        return self.data if self.whole is None else self.whole


def _net():
    return nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1))


def _regression(net, **options):
    return bdl.models.Regression(bdl.bayesianize(net, **options), noise=0.5)


def _line():
    return pyro.sample("w", dist.Normal(X.new_zeros(2), 1.0).to_event(1))


def _constrained(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(ZERO, 0.5))
    shares = pyro.sample("shares", dist.Dirichlet(X.new_ones(2)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ shares, scale), obs=y)


def _mixture(x, y=None):
    w = _line()
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(X.new_tensor([0.3, 0.7])))
        pyro.sample("y", dist.Normal(w[z] * x[:, 0], 0.7), obs=y)


def _entry(table, index):
    """table[index], which torch 2.9 cannot vectorize for an index without axes."""
    picked = table.index_select(0, index.reshape(-1))
    return picked.reshape(index.shape + table.shape[1:])


def _switch(x, y=None):
    w = _line()
    z = pyro.sample("z", dist.Categorical(X.new_tensor([0.3, 0.7])))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(_entry(w, z) * x[:, 0], 0.7), obs=y)


def _chain(x, y=None):
    w, z = _line(), torch.tensor(0)
    moves = X.new_tensor([[0.8, 0.2], [0.3, 0.7]])
    for t in pyro.markov(range(len(x))):
        z = pyro.sample(f"z{t}", dist.Categorical(_entry(moves, z)))
        pyro.sample(f"y{t}", dist.Normal(_entry(w, z), 0.7), obs=None if y is None else y[t])


def _networks():
    networks = bdl.bayesianize(_net(), plate="groups")

    def model(x, y=None):
        with pyro.plate("groups", 2):
            f = pyro.deterministic("f", networks(x)[..., 0])
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(f.T, 0.3), obs=y)

    return model


def _local(x, y=None):
    w = _line()
    with pyro.plate("data", len(X), subsample=torch.arange(len(x))):
        z = pyro.sample("z", dist.Normal(ZERO, 1.0))
        pyro.sample("y", dist.Normal(x @ w + z, 0.3), obs=y)


def _two_sites(x, y=None):
    w = _line()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=None if y is None else y[:, 0])
        count = None if y is None else y[:, 1]
        pyro.sample("count", dist.Poisson((x @ w).exp()), obs=count)


def _prior_factor(x, y=None):
    w = _line()
    pyro.factor("smooth", -(w[0] - w[1]).square())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


def _likelihood_factor(x, y=None):
    w = _line()
    if y is not None:
        with pyro.plate("data", len(x)):
            pyro.factor("y", -(x @ w - y).square())


def _flat(x, y=None):
    with poutine.mask(mask=False):
        w = _line()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


def _improper(x, y=None):
    support = dist.constraints.independent(dist.constraints.real, 1)
    w = pyro.sample("w", dist.ImproperUniform(support, (), (2,)))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


def _joint(x, y=None):
    w = _line()
    covariance = 0.3 * torch.eye(len(x), dtype=x.dtype) + 0.1
    pyro.sample("y", dist.MultivariateNormal(x @ w, covariance), obs=y)


class _Named(nn.Module):
    """A network of a dict of inputs."""

    def __init__(self):
        super().__init__()
        self.net = _net()

    def forward(self, inputs):
        return self.net(inputs["features"] * inputs["weights"][:, None])


class _Tied(nn.Module):
    """One matrix in two places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())[:, :1]


def _batch_norm():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


class _Messages(nn.Module):
    """A network on a ring of nodes, each of which sees the mean of its own and the next inputs."""

    def __init__(self):
        super().__init__()
        self.net = _net()

    def forward(self, x):
        return self.net((x + x.roll(1, 0)) / 2)


def _graph():
    model = _regression(_Messages())
    model.rows = "together"
    return model


PROGRAMS = {
    "network": lambda: Program(_regression(_net())),
    "hierarchical prior": lambda: Program(
        _regression(_net(), prior=bdl.priors.Normal(dist.LogNormal(ZERO, 0.2)))
    ),
    "constrained latents": lambda: Program(_constrained),
    "discrete local latents (mixture)": lambda: Program(_mixture),
    "discrete global latent (switch)": lambda: Program(_switch),
    "hidden Markov chain (`pyro.markov`)": lambda: Program(_chain),
    "networks in a plate": lambda: Program(_networks(), (X, Y[:, None].expand(4, 2))),
    "local latents in a plate of all data": lambda: Program(_local),
    "local latents in a subsampled plate": lambda: Program(_local, (X[:2], Y[:2]), (X, Y)),
    "Gaussian local latents (`integrate`)": lambda: Program(bdl.handlers.integrate(_local, "z")),
    "several observed sites": lambda: Program(
        _two_sites, (X, torch.stack([Y, torch.arange(4.0)], 1))
    ),
    "`pyro.factor` as a prior": lambda: Program(_prior_factor),
    "`pyro.factor` as the likelihood": lambda: Program(_likelihood_factor),
    "flat prior (`mask(False)`)": lambda: Program(_flat),
    "flat prior (`ImproperUniform`)": lambda: Program(_improper),
    "joint observation of all rows": lambda: Program(_joint),
    "adapters (`where=`, `nn.lora`)": lambda: Program(
        _regression(bdl.nn.lora(_net(), 1), where="*.lora_*")
    ),
    "dict inputs": lambda: Program(_regression(_Named()), ({"features": X, "weights": Y}, Y)),
    "tied weights": lambda: Program(_regression(_Tied())),
    "BatchNorm": lambda: Program(_regression(_batch_norm())),
    'graph network (`model.rows = "together"`)': lambda: Program(_graph()),
}


# Methods: each returns numbers that must be finite


def _svi(program, guide, elbo):
    svi = pyro.infer.SVI(program.model, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
    return [svi.step(*program.data) for _ in range(2)]


def _mean_field(program):
    return bdl.guides.AutoMeanField(program.model).prototype(*program.data)


def _laplace(program, structure):
    guide = bdl.guides.AutoLaplaceGGN(program.model, structure=structure)
    return guide.prototype(*program.data).laplace_approximation(program.data)


def _subnetwork(program):
    guide = bdl.guides.AutoSubnetwork(program.model, size=1).prototype(*program.data)
    return guide.laplace_approximation(program.data).sample_vectors(2)


def _last_layer(program):
    guide = bdl.guides.AutoLastLayer(program.model).prototype(*program.data)
    return guide.laplace_approximation(program.data).sample_vectors(2)


def _swag(program):
    guide = bdl.guides.AutoSWAG(program.model, rank=2).prototype(*program.data)
    for _ in range(3):
        guide.collect()
    return guide.swag_approximation().sample_vectors(2)


def _ensemble(program):
    guide = bdl.guides.AutoEnsemble(program.model, size=2)
    return _svi(program, guide, TemperedTraceMeanField_ELBO(num_particles=2))


def _nuts(program, backend):
    options = dict(num_warmup=1, num_samples=2, progress=False)
    options["kernel"] = bdl.mcmc.NUTS(max_tree_depth=2)
    options["init"] = "uniform"
    return bdl.mcmc.sample(program.model, *program.data, backend=backend, **options).latents


def _sghmc(program):
    options = dict(num_warmup=1, num_samples=2, progress=False)
    options["kernel"] = bdl.mcmc.SGHMC(step_size=1e-4, thinning=1)
    options |= dict(batch_size=len(program.data[-1]), init="uniform")
    return bdl.mcmc.sgmcmc(program.model, program.test, **options).latents


def _predictive(program):
    return bdl.Predictive(program.model, _mean_field(program), num_samples=2)(*_inputs(program))


def _linearized(program):
    moments = bdl.LinearizedPredictive(program.model, _laplace(program, "full")).moments
    return [site.mean for site in moments(*_inputs(program)).values()]


def _pointwise(program):
    predictive = bdl.Predictive(program.model, _mean_field(program), num_samples=2)
    return predictive.log_likelihood(*program.test)


def _arviz(program):
    options = dict(num_samples=2, prior_samples=2)
    groups = bdl.to_arviz(program.model, _mean_field(program), *program.test, **options)
    return [torch.as_tensor(value.to_numpy()) for value in groups["posterior"].values()]


def _compare(program):
    guide = _mean_field(program)
    options = dict(reference=None, num_samples=2)
    table = bdl.compare(program.model, {"mean-field": guide}, *program.test, **options)
    return [table.numbers()["mean-field"]["nlpd"]]


def _inputs(program):
    return (*program.test[:-1], None)


GUIDES = {
    "mean-field VI": lambda program: _svi(
        program, bdl.guides.AutoMeanField(program.model), TemperedTraceMeanField_ELBO()
    ),
    "`CompiledELBO`": lambda program: _svi(
        program, bdl.guides.AutoMeanField(program.model), CompiledELBO()
    ),
    "MC dropout": lambda program: _svi(
        program, bdl.guides.AutoMCDropout(program.model), TemperedTraceMeanField_ELBO()
    ),
    "Laplace, full": lambda program: _laplace(program, "full").variances(),
    "Laplace, KFAC": lambda program: _laplace(program, "kron").variances(),
    "Laplace, diagonal": lambda program: _laplace(program, "diag").variances(),
    "subnetwork": _subnetwork,
    "last layer": _last_layer,
    "SWAG": _swag,
    "ensemble": _ensemble,
}
AFTER = {
    "NUTS, NumPyro": lambda program: _nuts(program, "numpyro"),
    "NUTS, Pyro": lambda program: _nuts(program, "pyro"),
    "SGHMC": _sghmc,
    "`Predictive`": _predictive,
    "`LinearizedPredictive`": _linearized,
    "pointwise log likelihood": _pointwise,
    "`to_arviz`": _arviz,
    "`compare`": _compare,
}
TABLES = {"Guides": GUIDES, "MCMC, prediction and comparison": AFTER}
METHODS = GUIDES | AFTER
SLOW = ["`CompiledELBO`", "NUTS, NumPyro"]  # each program is compiled


OF_SHORT_RUNS = ("the guide is not at a maximum",)


# Cells


pytestmark = pytest.mark.usefixtures("double")


def _cell(name, method):
    """ "yes"; "yes: " and the first clause of the package's warning; or "no: " and the first clause
    of the error by which the package refuses. Other errors are raised."""
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    program = PROGRAMS[name]()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", BdlWarning)
        try:
            found = tree_leaves(METHODS[method](program))
        except (ValueError, ArgumentError, MissingOperatorError) as error:
            place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if not place.is_relative_to(Path(bdl.__file__).parent):
                raise
            return f"no: {_first_clause(error)}"
    assert found and all(torch.as_tensor(value).isfinite().all() for value in found)
    notes = [_first_clause(w.message) for w in told if issubclass(w.category, BdlWarning)]
    notes = [note for note in notes if not note.startswith(OF_SHORT_RUNS)]
    notes = [note for note in notes if not note.endswith("draws ended in a divergence")]
    return f"yes: {notes[0]}" if notes else "yes"


def _first_clause(message):
    """The first clause, without names of sites."""
    unnamed = re.sub(r" '[^']*'", "", re.sub(r"of site '[^']*'", "of a site", str(message)))
    return re.split(r"[:;] |, (?:so that|but) ", unnamed)[0]


def _check(name, methods):
    found = {method: _cell(name, method) for method in methods}
    known = _read()
    if WRITES:
        FILE.write_text(_rendered({**known, name: known.get(name, {}) | found}))
    else:
        assert found == {method: known[name].get(method) for method in methods}


# The document


def _rendered(table):
    cells = [table.get(n, {}).get(m, "") for ms in TABLES.values() for n in PROGRAMS for m in ms]
    reasons = list(dict.fromkeys(cell.split(": ", 1)[1] for cell in cells if ": " in cell))

    def numbered(cell):
        word, separator, reason = cell.partition(": ")
        return f"{word} ({1 + reasons.index(reason)})" if separator else word

    page = FILE.read_text().partition("\n## ")[0]
    for title, methods in TABLES.items():
        rows = [["program", *methods], ["---"] * (1 + len(methods))]
        for name in PROGRAMS:
            rows.append([name, *(numbered(table.get(name, {}).get(m, "")) for m in methods)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        page += f"\n## {title}\n\n"
        for row in rows:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            page += f"| {' | '.join(padded)} |\n"
    lines = (f"{1 + number}. {reason}\n" for number, reason in enumerate(reasons))
    return page + "\n## Notes\n\n" + "".join(lines)


def _read():
    """The cells of the document: program -> method -> what ``_cell`` returned."""
    text = FILE.read_text()
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    table, methods = {}, []
    for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE):
        name, *cells = (cell.strip() for cell in line.split(" | "))
        if name == "program":
            methods = cells
        elif name != "---":
            values = (re.sub(r" \((\d+)\)", lambda n: f": {reasons[n[1]]}", c) for c in cells)
            table.setdefault(name, {}).update(zip(methods, values, strict=True))
    return table


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_cells_are_those_of_the_document(name):
    _check(name, [method for method in METHODS if method not in SLOW])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, method", list(itertools.product(PROGRAMS, SLOW)))
def test_slow_cells_are_those_of_the_document(name, method):
    _check(name, [method])


def test_the_document_is_that_of_its_cells():
    table = _read()
    assert FILE.read_text() == _rendered(table)
    assert all(table[name][method] for name in PROGRAMS for method in METHODS)
