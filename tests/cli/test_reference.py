"""The option --reference: data, network and draws of a shipped posterior."""

import pytest
import torch

import pyro_bdl as bdl
from pyro_bdl.cli import options as command


def options(*arguments):
    return command.parser(lambda _: 0).parse_args(["compare", *arguments])


def test_the_reference_brings_its_data_and_network_and_no_other_nuts():
    chosen = options("--reference", "iris")
    found = command.reference(chosen)
    assert chosen.hidden == "10" and chosen.activation == "tanh"
    assert "nuts" not in command.names(chosen.guides) and "map" in command.names(chosen.guides)
    assert command.gain(chosen) == 1.0 and "iris" in found.dataset.source
    assert command.reference(options()) is None
    kept = options("--reference", "iris", "--guides", "nuts")
    command.reference(kept)
    assert command.names(kept.guides) == ["nuts"]


def test_other_data_beside_it_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="--task has no effect with --reference"):
        command.reference(options("--reference", "iris", "--task", "regression"))
    with pytest.raises(ValueError, match="there is no reference 'tulip'"):
        command.reference(options("--reference", "tulip"))


@pytest.mark.parametrize(
    "given", ["--hidden 7", "--activation relu", "--noise robust", "--prior-gain 2"]
)
def test_another_network_beside_it_is_refused(given):
    with pytest.raises(ValueError, match=f"{given.split()[0]} has no effect with --reference"):
        command.reference(options("--reference", "iris", *given.split()))
    command.reference(options("--reference", "iris", "--hidden", "10", "--prior-gain", "1"))


def test_draws_move_to_a_device():
    draws = bdl.references.load("diabetes").draws()
    assert torch.equal(draws.to("cpu").targets, draws.targets)
