"""Variational inference with global inducing points."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn
from torch.distributions import Normal

from pyro_bdl.contrib.inducing.layers import (
    InducingForward,
    InducingLayer,
    LayerAtInputs,
    find_layers,
    is_changed,
)
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.family import DRAWS
from pyro_bdl.guides.kl import diagonal_normal_kl
from pyro_bdl.guides.output_quadrature import tags_of
from pyro_bdl.program.batches import Batch, has_rows, leading_size, select_rows
from pyro_bdl.program.layout import Latent, Layout, marginal
from pyro_bdl.program.linear_ops.last_layer import LastLayer, Path
from pyro_bdl.program.trace import Run, record
from pyro_bdl.program.vmap import DrawMap
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.trees import tree_flatten, tree_unflatten
from pyro_bdl.utils.validation import real_number, whole_number

_NUMBERS = 2**22  # of noise that ``variances`` holds at a time


class AutoInducing(Guide):
    """q(w) = prod_l Q(W_l | U_l), each layer's weights given its inputs U_l at M inducing inputs.

    The rows phi of U_l, with a 1 for the bias, pseudo-outputs v and precisions Lambda of each row
    condition the prior N(m, S) of each output's weights as data of a linear regression do,

        Q(w_o | U) = N(m + C phi' Lambda (v_o - phi m), C),   C = (phi' Lambda phi + S^-1)^-1,

    so that weights are correlated within and across layers, and wide layers do not fall back to
    the prior at temperature 1. Layers are dense and convolutional ones with Normal priors, weights
    with their bias, each at its first use; the other latents are mean-field. A step adds two passes
    over the inducing inputs, and O(min(M, width)^3) for each layer. Sources: Ober & Aitchison 2021;
    Matheron's rule for draws.

    :param model: a Pyro program called with data, whose tensors have a row for each datum.
    :param num_inducing: M; at most the rows of the first call, of which they are a random part.
        Inputs that are real numbers are parameters, others and targets are fixed.
    :param init_precision: Lambda at the start, in units of 1 / mean square of the layer's outputs.
    :param init_scale: of the other latents, see ``AutoMeanField``; so are ``options``.
    :raises ValueError: for numbers that are not positive; UnsupportedProgramError, at the first
        run, for a prior at a layer's weights that is not Normal, or latents in a plate of data.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.INDUCING,)

    def __init__(
        self,
        model: Callable,
        *,
        num_inducing: int = 50,
        init_precision: float = 0.01,
        init_scale: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.num_inducing = whole_number(num_inducing, "num_inducing")
        self.init_precision = real_number(init_precision, "init_precision")
        self.init_scale = real_number(init_scale, "init_scale")
        self.layers: dict[str, InducingLayer] = {}  # by their weight
        self._first: Batch = (), {}
        self._map = DrawMap()

    def options(self) -> dict[str, Any]:
        return {"num_inducing": self.num_inducing}

    # Structure

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        self._first = args, kwargs
        try:
            super()._setup_prototype(*args, **kwargs)
        finally:
            self._first = (), {}

    def create_parameters(self, start: Tensor) -> None:
        layout, count = self.require_layout(), leading_size(self._first)
        self._take_rows(count)
        of_data = {name for name, f in self._prototype_frames.items() if f.size == count}
        local = self.subsampled | {
            name for name, latent in layout.latents.items() if of_data & set(latent.plates)
        }
        values = {n: v for n, v in layout.constrain(start)[0].items() if n not in local}
        with torch.enable_grad():
            layers, run, seen = self._survey(values)
        if layers and local:
            raise UnsupportedProgramError(
                f"the site '{min(local)}' has values for each datum, and AutoInducing runs the "
                "program on inducing inputs: give it to AutoAmortized(model, encoders, "
                "guide=AutoInducing), or integrate it out (handlers.integrate)"
            )
        self.layers = {site: found.layer for site, found in layers.items()}
        layered = {site for layer in self.layers.values() for site in layer.sites}
        rest = [latent for name, latent in layout.latents.items() if name not in layered]
        self.rest = Layout(rest)
        loc = layout.take(start, list(self.rest.latents)) if rest else start[:0]
        self.loc = nn.Parameter(loc.clone())
        scale = torch.full_like(loc, self.init_scale)
        self.scale = PyroParam(scale, constraints.softplus_positive)
        if self.layers:
            pseudo = {site: self._start_of(found) for site, found in layers.items()}
            pseudo |= self._data(run, seen, count)
            targets, precisions = zip(*pseudo.values(), strict=True)
            self.targets = nn.Parameter(torch.cat([v.reshape(-1) for v in targets]).to(start))
            self.log_precision = nn.Parameter(torch.cat(precisions).log().to(start))

    def _take_rows(self, count: int) -> None:
        """Keep the rows of the first data whose inputs are the inducing ones.

        :param count: of the rows of the first data.
        """
        batch, number = self._first, min(count, self.num_inducing)
        if self._loaded is not None and "rows" in self._loaded:
            number = len(self._loaded["rows"])
        rows = torch.arange(number, device="cpu") % max(1, count)
        if number < count:
            rows = torch.randperm(count, device="cpu")[:number]
        if has_rows(batch, count):
            batch = select_rows(batch, rows)
        for name in [n for n in (*self._parameters, *self._buffers) if n.startswith("inducing_")]:
            delattr(self, name)  # of a first run that went wrong
        self.register_buffer("rows", rows)
        leaves, self._structure = tree_flatten(batch)
        self._others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.register_buffer(f"inducing_{number}", leaf.detach().clone())

    def _arguments(self) -> Batch:
        """The program's arguments at the inducing inputs."""
        leaves = [
            self.parameter(f"inducing_{number}") if other is None else other[0]
            for number, other in enumerate(self._others)
        ]
        return tree_unflatten(leaves, self._structure)

    def _survey(self, values: dict[str, Tensor]) -> tuple[dict[str, LayerAtInputs], Run, LastLayer]:
        """The layers at some latents, and a run with its operations; inputs that they depend on
        become parameters."""
        model, (args, kwargs) = self.program_model, self._arguments()
        inputs = {n: b for n, b in self.named_buffers(recurse=False) if n.startswith("inducing_")}
        real = {name: leaf for name, leaf in inputs.items() if leaf.is_floating_point()}
        for leaf in real.values():
            leaf.requires_grad_()
        leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
        with evaluation_mode(self.program_modules):
            with LastLayer(leaves) as seen:
                run = record(model, leaves, args, kwargs)
            layers = find_layers(seen, run.latents)
        for name, leaf in real.items():
            if any(reaches(found.features, [leaf]) for found in layers.values()):
                delattr(self, name)
                setattr(self, name, nn.Parameter(leaf.detach()))
            else:
                leaf.requires_grad_(False)
        return layers, run, seen

    def _start_of(self, found: LayerAtInputs) -> tuple[Tensor, Tensor]:
        """A layer's pseudo-outputs (rows, outputs), its own, and their precisions (rows,)."""
        outcomes = found.outcomes()
        power = outcomes.square().mean()
        power = torch.where(power > 0, power, torch.ones_like(power))
        return outcomes, (self.init_precision / power).expand(len(outcomes))

    def _data(self, run: Run, seen: LastLayer, count: int) -> dict[str, tuple[Tensor, Tensor]]:
        """For each layer whose output is the location of a Normal observation, the data as
        pseudo-outputs (rows, outputs), with the noise's precision for each of ``count`` rows."""
        found = {}
        for site in run.observed.values():
            normal: Any = base_distribution(site.distribution)
            tag = tags_of(site, seen).get("loc")
            if tag is None or tag.path is not Path.SAME or seen.left is not None:
                continue
            if not isinstance(normal, Normal) or site.mask is not None:
                continue
            for own in seen.layers:
                layer = self.layers.get(own.sites[0])
                if own.output is not tag.root or layer is None or layer.sites != own.sites:
                    continue
                index, numbers = (
                    tag.index().reshape(-1),
                    torch.arange(tag.root.numel(), device="cpu"),
                )
                if site.value is None or not torch.equal(index.sort().values.cpu(), numbers):
                    continue
                places = own.as_rows(index.argsort().view(tag.root.shape))
                noise = normal.scale.detach().expand(site.value.shape).reshape(-1)[places]
                share = max(site.subsampling, count / len(self.rows))
                precisions = share * noise.pow(-2).mean(1)
                found[own.sites[0]] = site.value.reshape(-1)[places], precisions
        return found

    # Draws and densities

    def _pass(self, values: Mapping[str, Tensor], noise: Tensor | None = None) -> InducingForward:
        """Run the program on the inducing inputs, with the layers' latents given, or drawn."""
        rest = {name: value for name, value in values.items() if name in self.rest.latents}
        given = {name: value for name, value in values.items() if name not in rest}
        layers, numbers = self.layers, {}
        targets, precisions = self.parameter("targets"), self.parameter("log_precision").exp()
        if noise is not None:
            numbers = _parts(noise, {site: sum(layer.noise) for site, layer in layers.items()})
        parts = _parts(targets, {site: l.rows * l.outputs for site, l in layers.items()})
        found = InducingForward(
            layers,
            {site: part.view(layers[site].rows, -1) for site, part in parts.items()},
            _parts(precisions, {site: layer.rows for site, layer in layers.items()}),
            given=given,
            noise=numbers,
        )
        args, kwargs = self._arguments()
        with evaluation_mode(self.program_modules), found:
            record(self.program_model, rest, args, kwargs, draw=found.sample)
        return found

    @property
    def _noise_size(self) -> int:
        return self.rest.size + sum(sum(layer.noise) for layer in self.layers.values())

    def _vectors(self, noise: Tensor) -> Tensor:
        """Draws (S, P) from standard Normal numbers (S, numbers)."""
        loc, scale = self.parameter("loc"), self.parameter("scale")
        if not self.layers:
            return torch.addcmul(loc, scale, noise)

        def draw(part: dict[str, Tensor]) -> Tensor:
            first, others = part["noise"].tensor_split([len(loc)])
            rest = self.rest.unflatten(loc + scale * first)
            drawn = self._pass(self.rest.to_supports(rest), others).values
            return self.require_layout().flatten({**rest, **drawn})

        return self._map(draw, {"noise": noise})

    def sample_vectors(self, num_samples: int) -> Tensor:
        like, size = self.parameter("loc"), (num_samples, self._noise_size)
        return self._vectors(torch.randn(size, dtype=like.dtype, device=like.device))

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        if vector.dim() > 1:  # several, with the passes over the inducing inputs at once
            every = {"vector": vector.flatten(0, -2), "log_det": log_det.reshape(-1)}
            return self._map(lambda one: self.log_density(**one), every).view(log_det.shape)
        layout, total = self.require_layout(), -log_det
        if self.rest.latents:
            q = dist.Normal(self.parameter("loc"), self.parameter("scale"))
            total = total + q.log_prob(layout.take(vector, list(self.rest.latents))).sum()
        if self.layers:
            for layer in self._pass(layout.constrain(vector)[0]).drawn:
                total = total + layer.log_density().to(vector)
        return total

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        """KL(q || p) in nats: of each layer in closed form given the draw of those before it, of
        the other latents as in mean-field guides."""
        layered = [site for layer in self.layers.values() for site in layer.sites]
        if any(is_changed(run.latents[site]) for site in layered):
            return super().kl(vector, log_det, run)
        values, total = self.require_layout().constrain(vector)[0], vector.new_zeros(())
        for site in run.prior_factors.values():
            total = total - site.log_prob().sum()
        if self.rest.latents:
            loc, scale = self.parameter("loc"), self.parameter("scale")
            priors = {name: run.latents[name] for name in self.rest.latents}
            total = total + diagonal_normal_kl(self.rest, loc, scale, priors)
        if self.layers:
            for layer in self._pass(values).drawn:
                total = total + layer.conditional.kl().to(vector)
        return total

    @property
    def normal_marginals(self) -> bool:  # type: ignore[override]
        """True for a program without layers, where the guide is mean-field."""
        return not self.layers

    def site_vectors(self) -> tuple[Tensor, ...] | None:
        return None if self.layers else (self.parameter("loc"), self.parameter("scale"))

    def site_distribution(self, latent: Latent, *parts: Tensor) -> dist.TorchDistribution:
        return marginal(latent, *parts)

    def location(self) -> Tensor:
        """The means of each layer's weights given the means of those before."""
        return self._vectors(self.parameter("loc").new_zeros(1, self._noise_size))[0]

    @torch.no_grad()
    def variances(self) -> Tensor:
        """The marginal variances; with layers of 4096 draws, the same each time on a device."""
        if not self.layers:
            return self.parameter("scale").square()
        center = self.location()
        total, squares = torch.zeros_like(center), torch.zeros_like(center)
        most = max(1, _NUMBERS // self._noise_size)
        with seeded(0):
            for start in range(0, DRAWS, most):
                offsets = self.sample_vectors(min(most, DRAWS - start)) - center
                total, squares = total + offsets.sum(0), squares + offsets.square().sum(0)
        return (squares - total.square() / DRAWS) / (DRAWS - 1)

    def vector_quantiles(self, levels: Tensor) -> Tensor:
        with seeded(0):
            return super().vector_quantiles(levels)


def _parts(values: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Consecutive parts of a vector, by name."""
    return dict(zip(sizes, values.split(list(sizes.values())), strict=True))
