"""Every guide, structure and kernel names its papers, and ``cite`` prints those of a posterior."""

import re

import pyro
import pytest
import torch
from test_registries import FAMILIES, GUIDES, ON_MINIBATCHES

import pyro_bdl as bdl
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.mcmc.kernels import KERNELS
from pyro_bdl.utils import bibliography

KINDS = [
    *FAMILIES.values(), GUIDES["AutoAmortized"], *STRUCTURES.values(), *KERNELS.values(),
    *ON_MINIBATCHES.values(),
]  # fmt: skip
PAPERS = {value for name, value in vars(bibliography).items() if name.isupper()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_names_its_own_papers(kind):
    papers = vars(kind)["papers"]  # not those of its base
    assert papers and set(papers) <= PAPERS


def test_every_paper_is_one_line_with_authors_year_and_title():
    pattern = r"[A-Z].+ \((19|20)\d\d\), [A-Z][^\n]{10,}"
    assert [paper for paper in PAPERS if not re.fullmatch(pattern, paper)] == []


@pytest.fixture
def model():
    net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return bdl.models.Regression(bdl.bayesianize(net), noise=0.1)


@pytest.fixture
def data():
    x = torch.linspace(-1, 1, 12)[:, None]
    return x, x[:, 0]


def test_a_laplace_approximation_names_its_structure(model, data):
    guide = bdl.guides.AutoLaplaceGGN(model, structure="ekfac").prototype(*data)
    posterior = guide.laplace_approximation(data, held_out=data)
    lines = bdl.cite(posterior).splitlines()
    assert lines[0].startswith("The pyro_bdl authors") and bdl.__version__ in lines[0]
    assert lines[1:] == [
        bibliography.PYRO, bibliography.LAPLACE, bibliography.LINEARIZED, bibliography.KFAC,
        bibliography.EKFAC,
    ]  # fmt: skip


def test_chains_name_kernel_and_backend():
    latents = {"weight": torch.randn(2, 3)}
    samples = bdl.Samples(latents, info={"kernel": "nuts", "backend": "numpyro"})
    assert bdl.cite(samples).splitlines()[2:] == [bibliography.NUTS, bibliography.NUMPYRO]
    samples = bdl.Samples(latents, info={"kernel": "sghmc", "backend": "torch"})
    assert bdl.cite(samples).splitlines()[2:] == [bibliography.SGHMC]


def test_parts_of_a_guide_are_named_once(model):
    both = pyro.infer.autoguide.AutoGuideList(model)
    for hidden, guide in (
        (["2.weight", "2.bias"], bdl.guides.AutoMeanField),
        (["0.weight", "0.bias"], bdl.guides.AutoLowRank),
    ):
        both.append(guide(pyro.poutine.block(model, hide=hidden)))
    assert bdl.cite(both).splitlines()[2:] == [
        bibliography.BAYES_BY_BACKPROP, bibliography.VARIATIONAL_INFERENCE,
        bibliography.FACTOR_COVARIANCE,
    ]  # fmt: skip
    theirs = pyro.infer.autoguide.AutoNormal(model)
    assert len(bdl.cite(theirs).splitlines()) == 2


def test_what_is_no_posterior_is_refused():
    with pytest.raises(TypeError, match="a posterior is a guide or Samples"):
        bdl.cite(3)
