"""Each kind of part has one registry; docstrings, pages and contract tests name all of it."""

import inspect
from pathlib import Path

import pytest

import pyro_bdl as bdl
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.guides.base import Guide
from pyro_bdl.mcmc.kernels import KERNELS
from pyro_bdl.mcmc.stochastic_gradient.kernels import StochasticKernel

ROOT = Path(__file__).parent.parent
GUIDES = {name: getattr(bdl.guides, name) for name in bdl.guides.__all__ if name != "Guide"}
FAMILIES = {n: kind for n, kind in GUIDES.items() if issubclass(kind, Guide)}
ON_MINIBATCHES = {kind.name: kind for kind in StochasticKernel.__subclasses__()}
RESULTS = {"LaplaceGuide"}  # of the methods of other guides


def page(name):
    return (ROOT / "docs" / "pages" / name).read_text()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f'"{name}"' for name in STRUCTURES], bdl.guides.AutoLaplaceGGN.__doc__),
        ([f'"{name}"' for name in STRUCTURES], page("concepts/curvature.md")),
        ([kind.__name__ for kind in STRUCTURES.values()], " ".join(bdl.curvature.__all__)),
        ([f'"{name}"' for name in KERNELS], inspect.getdoc(bdl.mcmc.sample)),
        ([f'"{name}"' for name in KERNELS], page("tasks/run_chains.md")),
        ([k.__name__ for k in (KERNELS | ON_MINIBATCHES).values()], " ".join(bdl.mcmc.__all__)),
        ([kind.__name__ for kind in ON_MINIBATCHES.values()], inspect.getdoc(bdl.mcmc.sgmcmc)),
        (sorted(FAMILIES.keys() - RESULTS), page("features.md")),
    ],
)
def test_all_of_a_kind_are_named(names, text):
    assert [name for name in names if name not in text] == []


def test_the_contract_tests_have_every_guide():
    contract = (ROOT / "tests" / "guides" / "conftest.py").read_text()
    contract = contract[contract.index("TRAINED = [") :]
    assert [name for name in FAMILIES.keys() - RESULTS if name not in contract] == []
