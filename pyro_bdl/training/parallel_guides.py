"""One guide trained several times at once, by ``vmap`` over its parameters."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.distributions import transform_to
from torch.utils._pytree import tree_map
from tqdm import tqdm

from pyro_bdl.curvature.hyperparameters import ReadParameters, read_at_center
from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.program.batches import device_of_rows, leading_size
from pyro_bdl.program.observed_arguments import Targets
from pyro_bdl.training.minibatches import Minibatches
from pyro_bdl.utils.module_state import vmappable
from pyro_bdl.utils.progress import hidden
from pyro_bdl.utils.validation import check_temperature

_REFRESH = 0.5  # seconds
_Values = Mapping[str, Tensor]


class Copies:
    """D copies of a guide's parameters, each trained for its own objective.

    Adam treats every number separately, so that the copies do not influence each other.

    :param guide: a guide with parameters (after ``guide.prototype``). Each copy starts from their
        values; the guide is not changed.
    :param count: D.
    :raises ValueError: for latents in a subsampled plate, or a guide without its own parameters.
    """

    def __init__(self, guide: Guide, count: int) -> None:
        guide.require_layout()
        if guide.subsampled:
            raise ValueError(
                f"the latent site '{min(guide.subsampled)}' is in a subsampled plate: several "
                "trainings at once need all data in one call"
            )
        self.guide = guide
        self._transforms = {
            name: transform_to(constraint)
            for name, (constraint, _) in guide._pyro_params.items()
            if f"{name}_unconstrained" in guide._parameters
        }
        self._free = {}
        for name, parameter in guide._parameters.items():
            if parameter is not None:
                start = parameter.detach().expand(count, *parameter.shape).clone()
                self._free[name] = start.requires_grad_(parameter.requires_grad)
        if not any(value.requires_grad for value in self._free.values()):
            raise ValueError(
                f"{type(guide).__name__} has no parameters itself to train several times "
                "(those of a mixture are its members', an approximation has none): give a guide "
                "that is trained by its ELBO, such as AutoMeanField"
            )

    def _constrained(self, free: _Values) -> dict[str, Tensor]:
        found = {}
        for name, value in free.items():
            plain = name.removesuffix("_unconstrained")
            transform = self._transforms.get(plain)
            found[plain] = value if transform is None else transform(value)
        return found

    def _descend(
        self,
        losses_of: Callable[[Any], Tensor],
        parts: Iterator[Any],
        *,
        steps: int,
        learning_rate: float,
        progress: bool | None,
        label: str = "guides",
    ) -> Tensor:
        """Minimize D losses by Adam with a cosine schedule.

        :param losses_of: the losses (D,) of a part of the data.
        :param parts: the part of each step.
        :param label: the description of the progress bar.
        :returns: the losses of each step, (steps, D).
        """
        trained = [value for value in self._free.values() if value.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        losses = []
        steps_shown = tqdm(
            range(steps),
            disable=hidden(progress),
            desc=label,
            leave=False,
            mininterval=_REFRESH,
            delay=1,
        )
        with pyro.validation_enabled(False), vmappable():
            for _ in steps_shown:
                each = losses_of(next(parts))
                optimizer.zero_grad()
                each.sum().backward()
                optimizer.step()
                schedule.step()
                losses.append(each.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def put(self, index: int, guide: Guide) -> None:
        """Give a copy's parameters to another guide of the same program and family."""
        for name, value in self._free.items():
            guide._parameters[name].copy_(value[index])  # type: ignore[union-attr]

    @torch.no_grad()
    def sample_latents(self, num_samples: int) -> dict[str, Tensor]:
        """Draws of each copy, site -> (D, num_samples, *shape)."""

        def draw(free: dict[str, Tensor]) -> dict[str, Tensor]:
            with self.guide.holding(self._constrained(free)):
                return self.guide.sample_latents(num_samples)

        return torch.vmap(draw, randomness="different")(self._free)


class Together(Copies):
    """A guide's parameters for each of D data sets, which differ in their targets.

    Each data set has its own ELBO and its own optimization; only the program's inputs are shared.

    :param model: a Pyro program; its own parameters, if any, are not trained.
    :param guide: see ``Copies``.
    :param targets: the arguments of the program that are replaced.
    :param values: observed site -> (D, ...), the data sets.
    :raises ValueError: see ``Copies``.
    """

    def __init__(self, model: Callable, guide: Guide, targets: Targets, values: _Values) -> None:
        super().__init__(guide, len(next(iter(values.values()))))
        self.model, self.targets = model, targets
        self.values = dict(values)

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
            with self.guide.holding(self._constrained(free)):
                likelihood, kl, _ = elbo.flat_terms(self.model, self.guide, args, kwargs, None)
            return kl - likelihood

        together = torch.vmap(loss, randomness="different")
        return self._descend(
            lambda _: together(self._free, self.values),
            itertools.repeat(None),
            steps=steps,
            learning_rate=learning_rate,
            progress=progress,
        )


class AtTemperatures(Copies):
    """A guide's parameters at each of D temperatures, for the same data.

    :param model: a Pyro program; its own parameters, if any, are not trained.
    :param guide: see ``Copies``.
    :param temperatures: eta of each copy.
    :raises ValueError: see ``Copies``; for a temperature that is not positive.
    """

    def __init__(self, model: Callable, guide: Guide, temperatures: Sequence[float]) -> None:
        super().__init__(guide, len(temperatures))
        self.model = model
        self.temperatures = [check_temperature(eta) for eta in temperatures]

    def train(
        self,
        parts: Iterator[tuple[Any, ...]],
        *,
        steps: int,
        learning_rate: float = 0.01,
        num_particles: int = 1,
        estimator: str | None = None,
        progress: bool | None = None,
    ) -> Tensor:
        """Maximize the D tempered ELBOs by Adam with a cosine schedule.

        :param parts: yields the program's arguments for each step.
        :param learning_rate: Adam's initial learning rate, which falls to zero along half a cosine.
        :param num_particles: draws per step and temperature.
        :param estimator: see :class:`pyro_bdl.elbo.TemperedTrace_ELBO`.
        :returns: -L(eta) of each step, (steps, D), in nats.
        """
        elbo = TemperedTraceMeanField_ELBO(num_particles=num_particles, estimator=estimator)
        like = next(iter(self._free.values()))
        etas = torch.tensor(self.temperatures, dtype=like.dtype, device=like.device)

        def losses_of(args: tuple[Any, ...]) -> Tensor:
            def loss(free: dict[str, Tensor], eta: Tensor) -> Tensor:
                estimator = elbo.estimator
                if estimator is not None:
                    estimator.about(args, {}, frozenset())
                with self.guide.holding(self._constrained(free)):
                    terms = elbo.flat_terms(self.model, self.guide, args, {}, estimator)
                    likelihood, kl, _ = terms
                return eta * kl - likelihood

            return torch.vmap(loss, randomness="different")(self._free, etas)

        return self._descend(
            losses_of, parts, steps=steps, learning_rate=learning_rate, progress=progress
        )


class OnOwnData(Copies):
    """Guides of one family, each with inputs and targets of its own, such as the folds of a
    cross-validation.

    :param models: the program of each data set, alike. If they have ``num_data``, this is the
        number of their rows.
    :param guides: one for each data set, each after ``prototype``; they start from their own values
        and are not changed.
    :param data: ``(x, y)`` of each, of about equal length.
    :param fixed: whether the programs' own parameters, such as prior scales, keep their values.
    :raises UnsupportedProgramError: for programs with parameters of their own that are not fixed,
        or that are not ``PyroParam``s.
    :raises ValueError: see ``Copies``.
    """

    def __init__(
        self,
        models: Sequence[Callable],
        guides: Sequence[Guide],
        data: Sequence[tuple[Any, Tensor]],
        *,
        fixed: bool = False,
    ) -> None:
        super().__init__(guides[0], len(guides))
        self.model, self.data = models[0], list(data)
        self._own = self._read(models, guides) if fixed else {}
        count = sum(p.requires_grad for p in getattr(models[0], "parameters", tuple)())
        if count != len(self._own):
            raise UnsupportedProgramError(
                "the program has parameters of its own, which several trainings at once cannot "
                "share: train one after another"
            )
        for guide in guides[1:]:
            guide.require_layout()
        for name, value in self._free.items():
            own = torch.stack([guide._parameters[name].detach() for guide in guides])  # type: ignore[union-attr]
            self._free[name] = own.requires_grad_(value.requires_grad)

    def _read(self, models: Sequence[Callable], guides: Sequence[Guide]) -> dict[str, Tensor]:
        """The values of the programs' parameters, by their names in the first, (D, ...)."""
        found = [
            read_at_center(model, guide, pair, {}).parameters
            for model, guide, pair in zip(models, guides, self.data, strict=True)
        ]
        values = [[each.value.detach() for each in of_one.values()] for of_one in found]
        return dict(zip(found[0], map(torch.stack, zip(*values, strict=True)), strict=True))

    def train(
        self,
        *,
        steps: int,
        learning_rate: float = 0.01,
        temperature: float = 1.0,
        num_particles: int = 1,
        estimator: str | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
        label: str = "folds",
    ) -> Tensor:
        """Maximize the D tempered ELBOs by Adam with a cosine schedule.

        A step takes B rows of each data set, by default as many as the smallest has. The log
        likelihood of data set d with N_d rows is scaled by N_d / B. A larger one leaves out N_d - B
        of its rows at random in each step.

        :returns: the negative ELBO of each step, (steps, D), in nats.
        :raises ValueError: if a loss is not finite.
        """
        elbo = TemperedTraceMeanField_ELBO(num_particles=num_particles, estimator=estimator)
        sizes = [leading_size(x) for x, _ in self.data]
        size = min(sizes) if batch_size is None else min(batch_size, *sizes)
        like = next(iter(self._free.values()))
        stated = getattr(self.model, "num_data", None)
        weights = torch.tensor(sizes, dtype=like.dtype, device=like.device) / (stated or size)

        def losses_of(part: Any) -> Tensor:
            def loss(free: _Values, own: _Values, args: tuple[Any, ...], weight: Tensor) -> Tensor:
                if elbo.estimator is not None:
                    elbo.estimator.about(args, {}, frozenset())
                with self.guide.holding(self._constrained(free)), ReadParameters(own):
                    terms = elbo.flat_terms(self.model, self.guide, args, {}, elbo.estimator)
                return check_temperature(temperature) * terms[1] - weight * terms[0]

            return torch.vmap(loss, randomness="different")(self._free, self._own, part, weights)

        losses = self._descend(
            losses_of,
            self._parts(sizes, size),
            steps=steps,
            learning_rate=learning_rate,
            progress=progress,
            label=label,
        )
        bad = (~losses.isfinite()).any(0).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"the loss on data set {bad[0]}, counted from 0, became NaN or inf")
        return losses

    def _parts(self, sizes: Sequence[int], size: int) -> Iterator[tuple[Any, ...]]:
        """B rows of every data set, stacked (D, B, ...), for each step."""
        device = device_of_rows(self.data[0][0])
        batches = [Minibatches(rows, size, device=device) for rows in sizes]
        whole = None
        while True:
            if whole is None:
                parts = [own.of(x, y) for own, (x, y) in zip(batches, self.data, strict=True)]
                stacked = tree_map(lambda *leaves: torch.stack(leaves), *parts)
                whole = stacked if max(sizes) == size else None
            else:
                stacked = whole
            yield stacked
