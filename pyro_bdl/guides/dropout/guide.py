"""Monte Carlo dropout as variational inference: q(W) = M diag(eps), point masses elsewhere."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl.distributions.dropout_noise import (
    Annealed,
    BernoulliNoise,
    GaussianNoise,
    ImproperLogUniform,
    Noise,
    NoisyWeight,
    scale_free_kl,
)
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.dropout.layers import LayerReader, rates_of_layers
from pyro_bdl.guides.dropout.weights import (
    Weight,
    WeightReader,
    matching_rates,
    rates_by_pattern,
    reading_run,
)
from pyro_bdl.guides.kl import expected_log_prior
from pyro_bdl.guides.statements import point
from pyro_bdl.program.layout import Latent
from pyro_bdl.program.trace import Run
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.validation import one_of, require

MASKS = ("units", "weights")
_ALPHA = nn.AlphaDropout, nn.FeatureAlphaDropout
_DROPOUT = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, *_ALPHA


class AutoMCDropout(Guide):
    """Dropout: each draw multiplies the input units of the chosen weights by random factors.

    A draw of a weight with mean M (out, in) is M diag(eps), with one factor eps_i for each input
    unit: a feature of a product, a channel of a convolution, a row of an embedding, or an input
    feature of an attention projection or a recurrent cell. The factors are those of
    ``torch.nn.Dropout``: 0 with probability p, else 1 / (1 - p). M is therefore the mean weight,
    and equals the weight of a network trained with dropout layers. All other latents, including
    biases, are point masses at T(u). The parameter ``loc`` (P,) holds M and u, in unconstrained
    units.

    The guide has no log density for M (Gal & Ghahramani 2016, appendix 4.1). For Normal(0, s^2)
    priors the negative ELBO is, up to a constant,

        -E[log p(y | w)] + sum_i |M_i|^2 / (2 s^2 (1 - p)) + sum |b|^2 / (2 s^2),

    with M_i the weights of input unit i. Gal's keep-scaled M' = M / (1 - p) turns the second term
    into his (1 - p) |M'_i|^2 / (2 s^2). With ``learn_p`` the bound contains the entropies H(p) of
    all factors (Gal, Hron & Kendall 2017, equation 3). The paper divides the bound by N; here it is
    a sum over data.

    This bound has no maximum if the weights can interpolate the data and the noise scale is learned
    too. Point masses lose no entropy, so rates and scale fall to zero together, and N data gain N
    log(1 / scale). If there are few data for each weight, fix the rates or the scale, or give the
    noise a prior that vanishes at zero, such as ``LogNormal`` or ``InverseGamma``.

    A draw is one function: all calls of a module, all steps of a sequence and all data of a batch
    share the same factors.

    ``weights`` holds the input units of each dropped site, ``rates()`` returns its p, and
    ``mean_latents()`` returns all latents at their means.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> model = bdl.models.Regression(bdl.bayesianize(net), noise=0.1)
        >>> guide = bdl.guides.AutoMCDropout(model, p=0.2)
        >>> training = bdl.training.train(model, guide, x, y, steps=50)
        >>> guide.rates()
        {'2.weight': tensor(0.2000)}

    :param model: a Pyro program with continuous latents.
    :param p: the rate, in (0, 1); or a dict from names or patterns of sites to rates. A dict also
        chooses the sites; the first match counts. None: see ``from_dropout_layers``.
    :param sites: the weights with dropout: "hidden", the default, for weights whose inputs are
        hidden units, as with usual dropout layers; "all", which also drops the inputs of the
        network and rows of embeddings; or names and patterns with shell wildcards.
    :param learn_p: learn one rate for each site, starting at ``p``. The temperature of relaxed
        factors falls with the steps of this package's ELBOs.
    :param noise: the distribution of the factors, ``BernoulliNoise()`` or ``GaussianNoise()``, with
        variance p / (1 - p).
    :param mask: "units", or "weights" for a separate factor for every weight (DropConnect, Wan et
        al. 2013).
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises TypeError: for a rate that is not a number, sites that are not names, a noise of another
        class.
    :raises ValueError: for a rate outside (0, 1), an unknown mask; at the first run for a site that
        is not a weight.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.MC_DROPOUT, bibliography.CONCRETE_DROPOUT)
    saved_parts = (Noise, Annealed)
    weights: dict[str, Weight]
    steps: Tensor
    layers: tuple[nn.Module, ...] = ()  # dropout layers of the program that this guide replaces

    def __init__(
        self,
        model: Callable,
        *,
        p: float | Mapping[str, float] | None = 0.1,
        sites: str | Iterable[str] | None = None,
        learn_p: bool = False,
        noise: Noise | None = None,
        mask: str = "units",
        **options: Any,
    ) -> None:
        one_of(mask, "mask", MASKS)
        require(noise, Noise | None, "noise must be guides.BernoulliNoise() or GaussianNoise()")
        if p is None and (sites is not None or mask != "units"):
            raise ValueError("the dropout layers determine the sites and masks: leave these out")
        patterns = None if p is None else rates_by_pattern(p, sites)
        super().__init__(model, **options)
        self.learn_p, self.mask = learn_p, mask
        self.noise = BernoulliNoise() if noise is None else noise
        self._patterns = patterns

    @classmethod
    def from_dropout_layers(cls, model: Callable, **options: Any) -> "AutoMCDropout":
        """The guide that is equivalent to a network's dropout layers, with their rates.

        The program is run once to find which weights each layer's output feeds; the factors of two
        layers in a row multiply. A warning lists what a mask of weights cannot express: separate
        factors for every position (pixels, tokens) or every call of a module are replaced by shared
        ones, and dropout on a residual branch or on attention weights is left out. Whenever the
        guide draws, it puts the program's dropout layers into evaluation mode, so that nothing is
        dropped twice. They are copies: the network's own layers are not changed.

        :param model: a Pyro program, such as one around ``bayesianize(net)`` for a ``net`` with
            ``nn.Dropout`` layers.
        :param options: ``learn_p``, ``noise``, ``init_loc_fn`` and ``create_plates``.
        :raises ValueError: at the first run, where the program has no dropout layer, none that a
            mask of weights can say, or one that drops in evaluation mode too.
        """
        return cls(model, p=None, **options)

    # Structure

    def options(self) -> dict[str, Any]:
        rates = {name: float(rate) for name, rate in self.rates().items()}
        p = None if self._patterns is None else rates or 0.1
        return {"p": p, "learn_p": self.learn_p, "noise": self.noise, "mask": self.mask}

    def create_parameters(self, start: Tensor) -> None:
        model, layout = self.program_model, self.require_layout()
        reader, run = reading_run(
            LayerReader if self._patterns is None else WeightReader,
            model, layout, start, *self.example_rows, partial=self.subsampled,
        )  # fmt: skip
        if self._patterns is None:
            rates = rates_of_layers(reader, layout, model)
            modules = dict.fromkeys(layer.module for layer in reader.layers)
            self.layers = tuple(module for module in modules if module is not None)
        else:
            rates = matching_rates(reader.weights, layout, self._patterns)
            _warn_of_layers(model)
        if not rates:
            warn(
                "AutoMCDropout drops nothing, every latent is a point mass: no weight takes hidden "
                'units as its input; sites="all" drops the inputs of the network too',
                "dropout",
            )
        self.weights, factors = {}, []
        for name, latent in layout.latents.items():
            numbers = torch.arange(latent.size, device="cpu")
            if name in rates:
                weight = self.weights[name] = reader.weights[name].of_networks(latent)
                numbers = numbers if self.mask == "weights" else weight.units.flatten()
            factors.append(numbers)
        self.register_buffer("factors", torch.cat(factors).to(start.device), persistent=False)
        self._scale_free = self._log_uniform_sites(run)
        self.loc = nn.Parameter(start.clone())
        p = start.new_tensor(list(rates.values()))
        if self.learn_p and len(p):
            self.p = PyroParam(p, constraints.unit_interval)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long, device="cpu"))
        else:
            self.register_buffer("p", p, persistent=False)

    def _log_uniform_sites(self, run: Run) -> tuple[str, ...]:
        """The dropped sites whose prior is log-uniform."""
        found = []
        for name, site in run.latents.items():
            if not isinstance(base_distribution(site.distribution), ImproperLogUniform):
                continue
            if name not in self.weights or not isinstance(self.noise, GaussianNoise):
                raise ValueError(
                    f"the log-uniform prior of '{name}' needs noise=GaussianNoise() on it: a point "
                    "mass, or a factor of 0, would fall to w = 0, where the density is infinite"
                )
            found.append(name)
        return tuple(found)

    def _apply(self, function: Callable, recurse: bool = True) -> Any:
        steps = self._buffers.pop("steps", None)  # stays on the CPU, which reads it in every step
        try:
            return super()._apply(function, recurse)
        finally:
            if steps is not None:
                self._buffers["steps"] = steps

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "layers")

    def __deepcopy__(self, memo: dict[int, Any]) -> "AutoMCDropout":
        """Copy the guide; if the program was copied too, the new guide silences that copy's
        layers."""
        result = super().__deepcopy__(memo)
        result.layers = tuple(memo.get(id(layer), layer) for layer in self.layers)
        return result

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"layers": ()}

    # The guide

    def site_vectors(self) -> tuple[Tensor, ...]:
        """M and u, and the number of each entry's factor."""
        for layer in self.layers:
            layer.training = False
        return self.parameter("loc"), self.factors

    def site_distribution(self, latent: Latent, *parts: Tensor) -> Any:
        """The distribution of a dropped weight; the other latents are points."""
        if latent.name not in self.weights:
            return point(latent, parts[0])
        weight, number = self.weights[latent.name], list(self.weights).index(latent.name)
        count = latent.size if self.mask == "weights" else weight.num_units
        return NoisyWeight(
            parts[0], parts[1], self.parameter("p")[number], count, self.noise, self._scheduled(),
            scale_free=latent.name in self._scale_free,
            batch_dims=len(latent.shape) - latent.event_dim,
        )  # fmt: skip

    def _by_site(
        self, of_point: Callable[[Tensor], Tensor], of_weight: Callable[[NoisyWeight], Tensor]
    ) -> Tensor:
        """Numbers (..., P) from those of each site, (..., *shape)."""
        weights, parts = self._noisy_weights(), []
        for name, loc in self.require_layout().unflatten(self.parameter("loc")).items():
            part = of_weight(weights[name]) if name in weights else of_point(loc)
            parts.append(part.reshape(*part.shape[: part.dim() - loc.dim()], -1))
        return torch.cat(parts, -1)

    def _noisy_weights(self) -> dict[str, NoisyWeight]:
        layout = self.require_layout()
        loc, factors = (layout.unflatten(vector) for vector in self.site_vectors())
        return {
            name: self.site_distribution(layout.latents[name], loc[name], factors[name])
            for name in self.weights
        }

    @property
    def has_density(self) -> bool:
        return False

    @property
    def _learns(self) -> bool:
        """True where a rate is learned: the factors' temperature falls with the steps."""
        return self.learn_p and bool(self.weights)

    def numbers(self, ahead: int = 0) -> dict[str, float]:
        """The noise's scheduled number, where rates are learned."""
        return {"noise": self.noise.schedule(int(self.steps) + ahead)} if self._learns else {}

    def _scheduled(self) -> Callable[[], float | Tensor] | None:
        return partial(self.number, "noise") if self._learns else None

    def skip_steps(self, count: int) -> None:
        if self._learns:
            self.steps += count

    def sample_vectors(self, num_samples: int) -> Tensor:
        return self._by_site(
            lambda loc: loc.expand(num_samples, *loc.shape), lambda q: q.rsample((num_samples,))
        )

    def log_density(self, vector: Tensor, log_det: Tensor) -> Tensor:
        """Minus the entropy of the factors where p is learned, else 0."""
        return torch.zeros_like(log_det) - sum(
            q.entropy().sum() for q in self._noisy_weights().values()
        )

    def constant(self) -> AbstractContextManager:
        """Change nothing: this guide's log density has closed forms only, and so no score term."""
        return nullcontext()

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        """-H(eps) - E_q[log p(w)], in closed form for Normal and log-uniform priors."""
        expected = expected_log_prior(
            self.require_layout(), self.parameter("loc"), self.variances(), run.priors
        )
        total = -expected
        for name, q in self._noisy_weights().items():
            if not q.scale_free:
                total = total - q.entropy().sum()
                continue
            prior = run.latents[name]  # whose log density at the draw the expectation contains
            total = total + prior.log_prob().sum() + scale_free_kl(q.p, q.loc.numel())
        return total

    # Summaries

    def location(self) -> Tensor:
        """The vector (P,) of M and, for the other latents, u."""
        return self.parameter("loc")

    def mean_latents(self) -> dict[str, Tensor]:
        """The mean weights M and the values of the other latents, by site."""
        return self.require_layout().constrain(self.parameter("loc"))[0]

    def rates(self) -> dict[str, Tensor]:
        """The current rate p of each dropped site."""
        self.require_layout()
        return dict(zip(self.weights, self.parameter("p").detach().unbind(), strict=True))

    def variances(self) -> Tensor:
        """The marginal variances p / (1 - p) M^2 (P,), zero for point masses."""
        return self._by_site(torch.zeros_like, lambda q: q.variance)

    def vector_quantiles(self, levels: Tensor) -> Tensor:
        return self._by_site(
            lambda loc: loc.expand(len(levels), *loc.shape), lambda q: q.quantile(levels)
        )


def _warn_of_layers(model: Any) -> None:
    """Warn that a program's dropout layers drop units in addition to the guide."""
    for name, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, _DROPOUT) and part.training and part.p > 0:
            warn(
                f"the network's own {type(part).__name__}({part.p:g}) '{name}' drops in training "
                "too, on top of the guide's masks: take AutoMCDropout.from_dropout_layers(model), "
                "or set its p to 0",
                "dropout",
            )
            return
