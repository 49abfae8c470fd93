"""Several fits of one shape in one loop of JAX are the same fits alone."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.trainings import FAMILIES, data, program

import pyro_bdl as bdl
from pyro_bdl.errors import BdlWarning, FailedStepError
from pyro_bdl.training import jax_steps
from pyro_bdl.utils.random_state import continued, torch_states

pytestmark = pytest.mark.usefixtures("double")


def fit_of(seed, family, rows, program=program, **options):
    """Steps of a fit with data, starts and random numbers of its own, and torch's states for it."""
    torch.manual_seed(seed)
    model = program()
    args = rows(seed)
    guide = family(model).prototype(*args)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(temperature=lambda step: 1.0 + step / 100)
    elbo.begin_training()
    objective = elbo(model, guide)
    optimizer = torch.optim.Adam(objective.parameters(), lr=0.02)
    steps = jax_steps.JaxDescent(
        objective, optimizer, args, options.pop("size", 16), steps=60, stride=25,
        rates=lambda step: [0.02 / (1 + step)], **options,
    )  # fmt: skip
    return steps, torch_states()


def numbers_of(steps):
    values = [*steps.parameters, *steps.optimizer.state.values()]
    return [steps.stacked_losses(), torch.tensor(steps.skipped), *values]


def alone_and_together(*made, **options):
    """The numbers of fits one after another, and those of the same fits at once."""
    alone = [fit_of(seed, *made, **options) for seed in range(3)]
    for steps, states in alone:
        with continued(states):
            number = 0
            while number < 60:
                number = steps.advance(number)
    several = [fit_of(seed, *made, **options) for seed in range(3)]
    together = jax_steps.Together(*zip(*several, strict=True))
    number = 0
    while number < 60:
        number = together.advance(number)
    return [[numbers_of(steps) for steps, _ in fits] for fits in (alone, several)]


def rows_of_seed(seed):
    x, y = data()
    return x, y + seed


@pytest.mark.parametrize("name", ["AutoMeanField", "AutoMCDropout", "learned rates"])
def test_fits_together_are_those_alone(name):
    """With their own data, starts, minibatches and noise."""
    alone, together = alone_and_together(FAMILIES[name], rows_of_seed)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(together[0][0], together[1][0])


def divided(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
    with pyro.plate("data", 20, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(w / x[:, 0], 0.3), obs=y)


def rows_to_divide_by(seed):
    """The second fit has a row whose likelihood is not finite."""
    x = torch.linspace(1.0, 2.0, 20)[:, None]
    x[7 * seed :, 0] *= 0.0 if seed == 1 else 1.0
    x[8 * seed :, 0] = 1.0
    return x, torch.ones(20)


def test_a_fit_leaves_out_its_step_while_the_others_go_on():
    made = bdl.guides.AutoMeanField, rows_to_divide_by, lambda: divided
    with pytest.warns(BdlWarning, match="the step is left out"):
        alone, together = alone_and_together(*made, size=4, on_nonfinite="skip")
    assert [len(skipped) for _, skipped, *_ in together] == [0, 12, 0]  # once in each pass
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_the_fit_that_fails_is_named():
    fits = [fit_of(s, bdl.guides.AutoMeanField, rows_to_divide_by, lambda: divided) for s in (0, 1)]
    with pytest.raises(FailedStepError) as error:
        jax_steps.Together(*zip(*fits, strict=True)).advance(0)
    assert error.value.__notes__ == ["(in fit 1)"]


def test_fits_of_other_shapes_are_not_taken_together():
    fits = [fit_of(0, bdl.guides.AutoMeanField, rows_of_seed, size=size)[0] for size in (16, 20)]
    with pytest.raises(bdl.errors.UnsupportedProgramError, match="more than their numbers"):
        jax_steps.Together(fits, [{}, {}])
