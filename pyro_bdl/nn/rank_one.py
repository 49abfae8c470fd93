"""Rank-one factors: few latents for each weight matrix, which itself is a parameter."""

from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bdl.adapters import with_layers
from pyro_bdl.distributions.copies import without_validation
from pyro_bdl.nn.bayesian import BayesianModule, fitted
from pyro_bdl.priors import Normal, Prior, PriorFunction, arguments_of, check_prior, is_constant
from pyro_bdl.program.trace import prior_factor
from pyro_bdl.scales import Scale, checked
from pyro_bdl.utils.names import Names

_TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | _TRANSPOSED
_NO_BATCH = torch.Size()
_UNIT = Normal(1.0)
_SPREAD = 0.1  # of new factors, where the prior's scale is no number


class RankOne(nn.Module):
    """A dense or convolution layer with the weight W o (r s'): z = ((x o s) W') o r + b.

    ``s`` has a number for each input unit or channel, ``r`` one for each output; both start at one,
    and ``reset_parameters`` draws them around it. With several r and s, under ``vmap``, the product
    with W is one for all. W is ``base.weight``; the layer's bias b is ``bias`` here.

    :param base: the layer, which loses its bias.
    :param spread: the sd of new factors.
    """

    def __init__(self, base: Any, spread: float) -> None:
        super().__init__()
        self.base, self.spread = base, spread
        inputs, outputs = "in_features", "out_features"
        if not isinstance(base, nn.Linear):
            inputs, outputs = "in_channels", "out_channels"
        self.s = nn.Parameter(base.weight.new_ones(getattr(base, inputs)))
        self.r = nn.Parameter(base.weight.new_ones(getattr(base, outputs)))
        self.bias = base.bias
        base.bias = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def along_units(vector: Tensor) -> Tensor:
            return vector.reshape(-1, *[1] * (self.base.weight.dim() - 2))

        z = self.base(x * along_units(self.s), *args, **kwargs) * along_units(self.r)
        return z if self.bias is None else z + along_units(self.bias)

    @property
    def weight(self) -> Tensor:
        """W o (r s'), for modules that read their layers' weights."""
        return self.product(self.r, self.s)

    def product(self, r: Tensor, s: Tensor) -> Tensor:
        """W o (r s')."""
        first, second = r, s
        if isinstance(self.base, _TRANSPOSED):
            first, second = second, first
        groups = getattr(self.base, "groups", 1)
        columns = second.reshape(groups, -1).repeat_interleave(len(first) // groups, 0)
        factors = first[:, None] * columns
        weight: Any = self.base.weight
        return weight * factors.reshape(*factors.shape, *[1] * (weight.dim() - 2))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for vector in (self.r, self.s):
            vector.normal_(1.0, self.spread)


class _AroundOne(Prior):
    """r, s ~ Normal(1, scale^2); other parameters have no prior."""

    def __init__(self, scale: Scale) -> None:
        self.scale = checked(scale, "scale")

    def __call__(self, name: str, module: nn.Module, parameter: Tensor) -> Distribution | None:
        if not isinstance(module, RankOne) or parameter.dim() != 1 or name.endswith("bias"):
            return None
        ones = torch.ones_like(parameter.detach())
        return dist.Normal(ones, self._value("scale", parameter))


class RankOneNetwork(BayesianModule):
    """A network of ``rank_one``: its other parameters count by their density under a prior."""

    def __init__(self, net: nn.Module, scale: Scale, weight_prior: PriorFunction | None, name: str):
        self.weight_prior = weight_prior
        self._decays: dict[tuple, Any] = {}
        super().__init__(net, _AroundOne(scale), name=name)

    def _sample(self, *batch: Any) -> dict[str, Tensor]:
        values = super()._sample(*batch)
        if self.weight_prior is not None:
            terms = [self._decay(key, values[key]) for key in self.learnable if key in values]
            prior_factor(f"{self.site_prefix}weights", torch.stack(terms).sum())
        return values

    def products(self, draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of the plain network at draws of the factors, name -> (S, *shape).

        :param draws: the factors by site, (S, ...).
        """
        values = {name: draws[f"{self.site_prefix}{name}"] for name in self.sites}
        count = len(values[self.sites[0]])
        result = {}
        for name, parameter in self.network.named_parameters():
            path = name.removesuffix("base.weight")
            if f"{path}r" in values and path != name:
                layer: Any = self.network.get_submodule(path.removesuffix("."))
                products = torch.vmap(layer.product)
                result[f"{path}weight"] = products(values[f"{path}r"], values[f"{path}s"])
            else:
                result[name] = parameter.expand(count, *parameter.shape)
        return result

    def _decay(self, name: str, value: Tensor) -> Tensor:
        """log p(W), a scalar."""
        key = name, value.dtype, value.device, arguments_of(self.weight_prior)
        if key not in self._decays:
            prior: Any = self.weight_prior
            found = prior(name, self._places[name][0][0], value.detach())
            self._decays[key] = without_validation(fitted(found, name, value.detach(), _NO_BATCH))
        return self._decays[key].log_prob(value)


def rank_one(
    net: nn.Module,
    scale: Scale = 0.1,
    targets: Names = "*",
    *,
    prior: PriorFunction | None = _UNIT,
    name: str = "",
) -> RankOneNetwork:
    """A copy of ``net`` as a PyroModule that samples rank-one factors of its weights.

    Each chosen weight matrix or kernel W becomes W o (r s') with r, s ~ Normal(1, scale^2), one
    number for each output and input (Dusenberry et al. 2020). W, the biases and all other layers
    are parameters that training moves with the guide; their ``log p`` under ``prior`` joins the log
    prior as the factor ``weights``, so that they are at their mode given q(r, s). Several sets
    of factors by ``AutoEnsemble`` are BatchEnsemble (Wen et al. 2020); a ``MixtureGuide`` is a
    mixture of them.

    :param net: any network; it is not changed.
    :param scale: of the factors' prior, and the sd of an ensemble's starting points.
    :param targets: which of the dense and convolution layers: a pattern of their names (shell
        wildcards), several, or a function of the name. All by default.
    :param prior: of the parameters, one of ``pyro_bdl.priors`` with fixed numbers; it is their
        weight decay, |W|^2 / (2 t^2) of ``Normal(t)``. Normal(1.0) by default; None for no decay.
    :param name: as of ``bayesianize``.
    :raises ValueError: where no layer is chosen, or for a prior with hyperparameters.
    :raises TypeError: for a network of ``bayesianize``.
    """
    if prior is not None:
        check_prior(prior, "prior")
        if not is_constant(prior):
            raise ValueError(
                "the prior of parameters must be one of bdl.priors with fixed numbers, such as "
                "Normal(1.0): the weights under it are no latents"
            )
    spread = float(scale) if isinstance(scale, int | float) else _SPREAD
    layers = with_layers(
        net,
        targets,
        lambda layer: RankOne(layer, spread).train(layer.training),
        lambda part: isinstance(part, _LAYERS),
        kind="dense and convolution",
    )
    return RankOneNetwork(layers, scale, prior, name)
