"""One guide trained for several data sets at once, by ``vmap`` over its parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.observed_arguments import TargetArguments
from pyro_bdl.training.descent import Descent
from pyro_bdl.training.svi import cosine, in_backend
from pyro_bdl.utils.module_state import vmappable
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.random_state import seeded, torch_states

_Values = Mapping[str, Tensor]


class GuidesOfTargets:
    """A guide's parameters for each of D data sets, which differ in their targets.

    Each data set has its own ELBO and its own optimization; only the program's inputs are shared.
    Adam treats every number separately, so that the copies do not influence each other.

    :param model: a Pyro program; its own parameters, if any, are not trained.
    :param guide: a guide with parameters (after ``guide.prototype``). Each copy starts from their
        values; the guide is not changed.
    :param targets: the arguments of the program that are replaced.
    :param values: observed site -> (D, ...), the data sets.
    :raises ValueError: for latents in a subsampled plate, or a guide without its own parameters.
    """

    def __init__(
        self, model: Callable, guide: Guide, targets: TargetArguments, values: _Values
    ) -> None:
        self.model, self.guide, self.targets = model, guide, targets
        self.values = dict(values)
        self.count = len(next(iter(self.values.values())))
        guide.require_layout()
        if guide.subsampled:
            raise ValueError(
                f"the latent site '{min(guide.subsampled)}' is in a subsampled plate: several "
                "trainings at once need all data in one call"
            )
        self._transforms = {
            name: transform_to(constraint)
            for name, (constraint, _) in guide._pyro_params.items()
            if f"{name}_unconstrained" in guide._parameters
        }
        self._free = {}
        for name, parameter in guide.named_parameters(recurse=False):
            start = parameter.detach().expand(self.count, *parameter.shape).clone()
            self._free[name] = start.requires_grad_(parameter.requires_grad)
        if not any(value.requires_grad for value in self._free.values()):
            raise ValueError(
                f"{type(guide).__name__} has no parameters itself to train several times "
                "(those of a mixture are its members', an approximation has none): give a guide "
                "that is trained by its ELBO, such as AutoMeanField"
            )

    def _constrained(self, free: _Values) -> dict[str, Tensor]:
        result = {}
        for name, value in free.items():
            plain = name.removesuffix("_unconstrained")
            transform = self._transforms.get(plain)
            result[plain] = value if transform is None else transform(value)
        return result

    def train(
        self,
        *,
        steps: int = 2000,
        learning_rate: float = 0.02,
        num_particles: int = 4,
        backend: str = "auto",
        progress: bool | None = None,
    ) -> Tensor:
        """Maximize the D ELBOs by Adam with a cosine schedule.

        :param learning_rate: Adam's initial learning rate, which falls to zero along half a cosine.
        :param num_particles: draws per step and data set.
        :param backend: as of ``training.train``.
        :returns: the negative ELBO of each step, (steps, D), in nats.
        :raises FailedStepError: for a loss or gradient that is not finite.
        """
        from pyro_bdl.training.jax_steps import JaxDescent  # JAX is imported where it is used

        elbo = TemperedTraceMeanField_ELBO(num_particles=num_particles)
        trained = [value for value in self.guide.parameters(recurse=False) if value.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=learning_rate)
        args, kwargs = self._arguments(0)
        descent = Descent(elbo(self.model, self.guide), optimizer, args, leading_size(args))
        parts = (part for part in self.guide.modules() if isinstance(part, Guide))
        if kwargs or any(part.numbers() for part in parts):  # one guide would count all steps
            backend = "torch"
        descent = in_backend(
            descent, backend, "the guides' training", steps=steps,
            rates=partial(cosine, [learning_rate], steps),
        )  # fmt: skip
        if isinstance(descent, JaxDescent):
            return self._in_jax(descent, steps, progress)
        return self._in_torch(elbo, steps, learning_rate, progress)

    def _arguments(self, i: int) -> tuple[tuple, dict]:
        return self.targets.with_values({name: value[i] for name, value in self.values.items()})

    def _in_jax(self, descent: Any, steps: int, progress: bool | None) -> Tensor:
        """The training of all copies in one compiled loop."""
        from pyro_bdl.training.jax_steps import Together

        names = {id(value): name for name, value in self.guide.named_parameters(recurse=False)}
        seed = int(torch.randint(2**31, (), device="cpu"))
        fits, states = [], []
        for i in range(self.count):
            own = [self._free[names[id(value)]].detach()[i] for value in descent.parameters]
            fits.append(descent.at(own, self._arguments(i)[0]))
            with seeded(seed + i):
                states.append(torch_states())
        together = Together(fits, states)
        for number in progress_bar(range(0, steps, together.stride), "guides", progress):
            together.advance(number)
        return torch.stack([fit.stacked_losses() for fit in fits], -1)

    def _in_torch(
        self, elbo: TemperedTraceMeanField_ELBO, steps: int, rate: float, progress: bool | None
    ) -> Tensor:
        """The training of all copies by torch's ``vmap``."""

        def loss(free: dict[str, Tensor], values: dict[str, Tensor]) -> Tensor:
            args, kwargs = self.targets.with_values(values)
            with self.guide.at_parameters(self._constrained(free)):
                terms = elbo.flat_terms(self.model, self.guide, args, kwargs, None)
            return terms.kl - terms.log_likelihood

        losses_of = torch.vmap(loss, randomness="different")
        trained = [value for value in self._free.values() if value.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        history = []
        with pyro.validation_enabled(False), vmappable():
            for _ in progress_bar(range(steps), "guides", progress):
                losses = losses_of(self._free, self.values)
                optimizer.zero_grad()
                losses.sum().backward()
                optimizer.step()
                schedule.step()
                history.append(losses.detach())
        return torch.stack(history)

    @torch.no_grad()
    def sample_latents(self, num_samples: int) -> dict[str, Tensor]:
        """Draws of each copy, site -> (D, num_samples, *shape)."""

        def draw(free: dict[str, Tensor]) -> dict[str, Tensor]:
            with self.guide.at_parameters(self._constrained(free)):
                return self.guide.sample_latents(num_samples)

        return torch.vmap(draw, randomness="different")(self._free)
