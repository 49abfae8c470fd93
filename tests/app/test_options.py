"""Options: their defaults, posteriors by name, and --reference, a shipped posterior's network."""

import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl import posteriors
from pyro_bdl.app import run
from pyro_bdl.app.command import main


@pytest.fixture
def options(monkeypatch):
    """The options that the command makes of its arguments."""
    seen = []
    monkeypatch.setattr(run, "run", lambda options, line: seen.append(options) or 0)

    def parse(*arguments):
        assert main(["compare", *arguments]) == 0
        return seen[-1]

    return parse


def test_all_and_default_posteriors(options):
    everything = [entry.name for entry in posteriors.entries()]
    chosen = options().names()
    assert list(options("--guides", "all").names()) == everything
    assert options("--guides", "nuts, map").names() == ("nuts", "map")
    assert list(chosen) == [entry.name for entry in posteriors.entries() if entry.default]
    assert {"map", "mean-field", "laplace", "ensemble", "nuts"} < set(chosen) < set(everything)


def test_quick_and_given_options(options):
    usual = options().settings()
    assert (usual.chains, usual.warmup, usual.draws, usual.steps) == (4, 250, 300, None)
    quick = options("--quick", "--draws", "7").settings()
    assert (quick.chains, quick.warmup, quick.draws, quick.steps) == (2, 100, 7, 500)
    assert options("--hidden", "50,20").hidden == (50, 20)
    assert options("--dates", "a", "--dates", "b, c").dates == ["a", "b, c"]


def test_the_program_is_of_the_options_the_problem_or_the_reference(options):
    for given, words in (
        ([], "Linear(1, 50), Tanh, Linear(50, 1); FanIn(4)"),
        (["--prior-gain", "2", "--hidden", "3,2"], "Linear(3, 2), Tanh, Linear(2, 1); FanIn(2)"),
        (["--reference", "iris"], "Linear(4, 10), Tanh, Linear(10, 3); FanIn(1)"),
    ):
        chosen = options(*given)
        program = chosen.program(chosen.load())[1]
        assert words in f"{program['network']}; {program['prior of the weights']}"


def test_the_reference_brings_its_data_and_no_other_nuts(options):
    chosen = options("--reference", "iris")
    assert "nuts" not in chosen.names() and "map" in chosen.names()
    assert "iris" in chosen.load().source
    assert options("--reference", "iris", "--guides", "nuts").names() == ("nuts",)


@pytest.mark.parametrize(
    "given", ["--task regression", "--hidden 7", "--activation relu", "--likelihood student_t",
              "--prior-gain 2", "--folds 3"]
)  # fmt: skip
def test_other_data_or_another_network_beside_it_are_refused(given, options):
    with pytest.raises(ValueError, match=f"{given.split()[0]} has no effect with --reference"):
        options("--reference", "iris", *given.split()).load()


def test_draws_move_to_a_device():
    draws = bdl.references.load("diabetes").draws()
    assert torch.equal(draws.to("cpu").targets, draws.targets)
