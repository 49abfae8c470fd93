"""One guide trained for several data sets at once, by ``vmap`` over its parameters."""

from collections.abc import Callable, Mapping

import pyro
import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.observed_arguments import TargetArguments
from pyro_bdl.utils.module_state import vmappable
from pyro_bdl.utils.progress import shown

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
        count = len(next(iter(self.values.values())))
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
            start = parameter.detach().expand(count, *parameter.shape).clone()
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
        progress: bool | None = None,
    ) -> Tensor:
        """Maximize the D ELBOs by Adam with a cosine schedule.

        :param learning_rate: Adam's initial learning rate, which falls to zero along half a cosine.
        :param num_particles: draws per step and data set.
        :returns: the negative ELBO of each step, (steps, D), in nats.
        """
        elbo = TemperedTraceMeanField_ELBO(num_particles=num_particles)

        def loss(free: dict[str, Tensor], values: dict[str, Tensor]) -> Tensor:
            args, kwargs = self.targets.with_values(values)
            with self.guide.at_parameters(self._constrained(free)):
                terms = elbo.flat_terms(self.model, self.guide, args, kwargs, None)
            return terms.kl - terms.log_likelihood

        losses_of = torch.vmap(loss, randomness="different")
        trained = [value for value in self._free.values() if value.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        history = []
        with pyro.validation_enabled(False), vmappable():
            for _ in shown(range(steps), "guides", progress):
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
