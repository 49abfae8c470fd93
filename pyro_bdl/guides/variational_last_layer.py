"""A last layer with a Gaussian posterior whose expected log likelihood needs no draws."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_bdl.curvature.jacobian.jacobian import Jacobian
from pyro_bdl.curvature.structures.base import Precision, Whitened, whole_rows
from pyro_bdl.errors import UnsupportedProgramError, warn
from pyro_bdl.guides.kl import expected_log_prior
from pyro_bdl.guides.laplace import subset_of
from pyro_bdl.guides.last_layer import check_one_product
from pyro_bdl.guides.normal import NormalGuide
from pyro_bdl.guides.output_quadrature import Head, Ways, add_jensen, read_head, ways_of
from pyro_bdl.program.gaussian_prior import StoredPrecision
from pyro_bdl.program.linear_ops.last_layer import LastLayer, Term, functions_in
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, placeholder_for_observed, record
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.autograd import is_transformed
from pyro_bdl.utils.module_state import evaluation_mode, vmappable
from pyro_bdl.utils.random_state import own_randomness
from pyro_bdl.utils.validation import one_of, real_number

STRUCTURES, FEATURES = ("dense", "matrix-normal"), ("point", "mean-field")


class AutoVariationalLastLayer(NormalGuide):
    """A Gaussian over the last layer's weights, with the features trained by the same bound.

    Let W (K, H) be the weights and biases of the last layer, phi its inputs with a one. Under q(W)
    the outputs z = W phi of a datum are Gaussian, and this package's ELBOs take E[log p(y | z)]
    without draws where each observed number depends on one output: exactly for a Normal with a
    location affine in it; by 20 points of Gauss-Hermite quadrature for other distributions, for a
    noise that is an output too, and for outputs that pass exp, softplus or a declared ``link``. For
    classes it is the bound of Jensen's inequality (Harrison, Willes & Snoek 2024, "Variational
    Bayesian last layers"). Other programs, estimators and Pyro's ELBOs take draws; ``quadrature``
    tells, and a warning says why where a program needs them.

    With fixed features, all data and Normal observations the optimum is the exact posterior.

    :param model: a Pyro program with continuous latents.
    :param structure: "dense" for W_k ~ N(m_k, L_k L_k'), independent outputs, K H^2 numbers;
        "matrix-normal" for W ~ MN(M, A A', B B'), K^2 + H^2 numbers.
    :param features: all other latents are "point"s (unconstrained, at the mode), or "mean-field"
        Normals.
    :param subset: the layer, by default the program's last product with weights and its bias.
    :param link: a function, or several, that outputs pass on their way to a parameter, and that
        acts on each number alone, such as ``torch.sigmoid``.
    :param init_scale: the standard deviations at the start, in unconstrained units.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises ValueError: for an unknown ``structure`` or ``features``, or a bad ``init_scale``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.VARIATIONAL_LAST_LAYER,)

    def __init__(
        self,
        model: Callable,
        *,
        structure: str = "dense",
        features: str = "point",
        subset: Any = "last-layer",
        link: Callable | Iterable[Callable] = (),
        init_scale: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__(model, **options)
        self.structure = one_of(structure, "structure", STRUCTURES)
        self.features = one_of(features, "features", FEATURES)
        self.init_scale = real_number(init_scale, "init_scale")
        self.selection = subset
        self.functions = functions_in(link)
        self.head: Head | None = None

    def options(self) -> dict[str, Any]:
        return {
            "structure": self.structure, "features": self.features, "subset": self.selection,
        }  # fmt: skip

    def create_parameters(self, start: Tensor) -> None:
        layout = self.require_layout()
        self.loc = nn.Parameter(start.clone())
        self.sites: tuple[str, ...] = ()
        where = self._read_layer(start)
        self.sizes = where.shape
        chosen, every = where.flatten(), torch.arange(layout.size, device=start.device)
        rest = every[~torch.isin(every, chosen)] if self.features == "mean-field" else every[:0]
        indices = torch.cat([chosen, rest]).sort().values
        self.subset = Subset(layout, None if len(indices) == layout.size else indices.cpu())
        order = torch.searchsorted(indices, torch.cat([chosen, rest]))
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inverse", order.argsort(), persistent=False)
        if where.numel():
            outputs, inputs = where.shape
            separate = (outputs,) if self.structure == "dense" else ()
            eye = torch.eye(inputs, dtype=start.dtype, device=start.device)
            self.column = self._factor(self.init_scale * eye.repeat(*separate, 1, 1))
            if not separate:
                self.row = self._factor(torch.eye(outputs, dtype=start.dtype, device=start.device))
        if len(rest):
            scale = start.new_full((len(rest),), self.init_scale)
            self.scale = PyroParam(scale, constraints.softplus_positive)

    @staticmethod
    def _factor(value: Tensor) -> PyroParam:
        return PyroParam(value, constraints.softplus_lower_cholesky)

    # The layer

    def _read_layer(self, start: Tensor) -> Tensor:
        """The positions of W (K, H) in the vector; none where the program has no last layer."""
        args, kwargs = self.example_rows
        nothing = torch.empty(0, 0, dtype=torch.long, device=start.device)
        layout, model = self.require_layout(), self.program_model
        try:
            with own_randomness():
                sites = subset_of(self, self.selection, args, kwargs).sites
                values = layout.constrain(start)[0]
                values |= {name: values[name].detach().requires_grad_() for name in sites}
                seen = self._tracker({name: values[name] for name in sites})
                with torch.enable_grad(), evaluation_mode(self.program_modules), seen:
                    run = record(model, values, args, kwargs, draw=placeholder_for_observed)
            check_one_product(seen, sites)
            terms = seen.layers[0].terms
            if terms[0].op.output_dim != -1 or len({len(term.where) for term in terms}) != 1:
                raise UnsupportedProgramError("the layer is not one product of rows with a matrix")
            if any(layout.latents[name].transform is not None for name in sites):
                raise UnsupportedProgramError("the layer's weights are not over the reals")
        except ValueError as error:
            self._warn(f"has no last layer, so that all latents are {self.features}s: {error}")
            return nothing
        self.sites = tuple(sites)
        self.has_bias = len(terms) > 1
        self._take_head(run, seen)
        shifted = [term.where + layout.slices[term.site].start for term in terms]
        return torch.cat(shifted, 1)

    def _tracker(
        self, latents: Mapping[str, Tensor], change: Callable[[Term], Tensor] | None = None
    ) -> LastLayer:
        return LastLayer(latents, change, self.functions)

    def _take_head(self, run: Run, seen: LastLayer) -> None:
        """Take the head of a run, with gradients, or draws where it has none."""
        self.head = None
        try:
            self.head = head = read_head(run, seen)
        except (UnsupportedProgramError, NotImplementedError) as error:
            self._warn(f"takes the expected log likelihood at draws: {error}")
            return
        points, weights = head.points()
        like = self.loc
        for name, value in {
            "points": points, "weights": weights, "first": head.first, "second": head.second,
        }.items():  # fmt: skip
            self.register_buffer(name, value.to(like), persistent=False)
        self.register_buffer("partner", head.partner.to(like.device), persistent=False)

    def _warn(self, what: str) -> None:
        if what not in self.warned_of:
            self.warned_of.add(what)
            warn(f"{type(self).__name__} {what}", "last-layer-draws")

    def expected_log_likelihood(
        self,
        latents: Mapping[str, Tensor],
        run_at: Callable[[Mapping[str, Tensor]], Run],
        log_likelihood: Callable[[Run], Any],
    ) -> tuple[Any, Run]:
        """E[log p(y | w)] over the last layer, at a draw of the other latents."""
        inside: dict[str, Tensor] = dict(latents)
        if self.sites:
            means = self.require_layout().unflatten(self.parameter("loc"))
            inside |= {name: means[name] for name in self.sites}
        while self.head is not None:
            total, run, ways = self._at_points(self.head, inside, run_at, log_likelihood)
            if ways == self.head.ways:
                for name in self.sites:
                    run.latents[name] = run.latents[name]._replace(value=latents[name])
                return total, run
            # the program takes the outputs in another way now
            values = dict(inside)
            if not is_transformed():
                values |= {n: values[n].detach().requires_grad_() for n in self.sites}
            with torch.enable_grad(), self._tracker({n: values[n] for n in self.sites}) as seen:
                run = run_at(values)
            self._take_head(run, seen)
        return super().expected_log_likelihood(latents, run_at, log_likelihood)

    def _at_points(
        self,
        head: Head,
        inside: Mapping[str, Tensor],
        run_at: Callable[[Mapping[str, Tensor]], Run],
        log_likelihood: Callable[[Run], Any],
    ) -> tuple[Any, Run, Ways]:
        """The mean over the points of a head, a run, and its ways from z to the parameters."""
        column, mix = self.parameter("column"), self._mix()
        rows = None if self.structure == "dense" else self.parameter("row").square().sum(-1)
        runs: list[tuple[Run, Ways]] = []

        def at(point: Tensor) -> Any:
            variance: list[Tensor] = []

            def noise(term: Term) -> Tensor:
                variance[:] = [self._variance(term.inputs, column, rows)]
                smallest = torch.finfo(variance[0].dtype).tiny
                return variance[0].clamp_min(smallest).sqrt() * (mix @ point)

            seen = self._tracker({name: inside[name] for name in self.sites}, noise)
            with seen:
                run = run_at(inside)
            ways = ways_of(run, seen)
            if head.classes and ways == head.ways:
                add_jensen(run, head.classes, seen.output, variance[0].view_as(seen.output))
            runs[:] = [(run, ways)]
            return log_likelihood(run)

        if len(self.points) == 1:
            total = at(self.points[0])
        else:
            with vmappable():
                values = torch.vmap(at, randomness="same")(self.points)
            total = values @ self.weights.to(values)
        return total, *runs[0]

    def _variance(self, inputs: Any, column: Tensor, rows: Tensor | None) -> Tensor:
        """v (R, K) of the outputs at inputs (..., in)."""
        phi = inputs.reshape(-1, inputs.shape[-1]).to(column)
        if self.has_bias:
            phi = torch.cat([phi, phi.new_ones(len(phi), 1)], 1)
        spread = (phi @ column).square().sum(-1)
        return spread.mT if rows is None else spread[:, None] * rows

    def _mix(self) -> Tensor:
        """The outputs' noise in units of its standard deviation from points e, (K, 2)."""
        if self.structure == "dense":
            return torch.stack([self.first, self.second], 1)
        rows = nn.functional.normalize(self.parameter("row"), dim=1)
        pairs = self.first * (self.partner != torch.arange(len(rows), device=rows.device))
        shared = pairs * (rows * rows[self.partner]).sum(1)
        own = self.first * (1.0 - shared.square()).clamp_min(0.0).sqrt()
        return torch.stack([own, shared + self.second], 1)

    # The distribution

    @property
    def quadrature(self) -> str:
        """How E[log p(y | z)] is taken: "exact", by "points", by the "bound" of Jensen, or by
        "draws" of the layer, which are unbiased."""
        return "draws" if self.head is None else self.head.rule

    @property
    def linearized(self) -> bool:
        """True if the outputs are linear in all that q does not fix, so that the linearized
        predictive is exact."""
        return self.features == "point" and self.head is not None and self.head.linear

    def location(self) -> Tensor:
        return self.parameter("loc")

    def _tensors(self) -> list[Tensor]:
        empty = {"column": (0, 0, 0), "row": (0, 0), "scale": (0,)}
        loc = self.parameter("loc")
        return [
            self.parameter(name) if hasattr(self, name) else loc.new_empty(shape)
            for name, shape in empty.items()
        ]

    @property
    def precision(self) -> "LayerPrecision":
        return LayerPrecision(self.order, self.inverse, *self._tensors())

    def stored_precision(self) -> StoredPrecision:
        return StoredPrecision(LayerPrecision, self.order, self.inverse, *self._tensors())

    def kl(self, vector: Tensor, log_det: Tensor, run: Run) -> Tensor:
        """KL(q || p) in nats; priors that are no Normals are evaluated at the draw."""
        layout, loc = self.require_layout(), self.location()
        log_prior = expected_log_prior(layout, loc, self.variances(), run.priors)
        return -self.entropy(vector, log_det) - log_prior


class LayerPrecision(Precision):
    """The precision of a layer's weights W (K, H) and of independent numbers, in any order.

    :param order: the places of W, row after row, and of the other numbers, (p,); ``inverse``: the
        inverse permutation.
    :param column: L_k (K, H, H) of independent rows, or B (H, H).
    :param row: A (K, K) beside B, else empty.
    :param scale: standard deviations of the other numbers.
    """

    def __init__(
        self, order: Tensor, inverse: Tensor, column: Tensor, row: Tensor, scale: Tensor
    ) -> None:
        self.order, self.inverse = order, inverse
        self.column, self.row, self.scale = column, row, scale
        self.size, self.separate = len(order), column.dim() == 3
        self.shape = len(column if self.separate else row), column.shape[-1]

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W (..., K, H) and the other numbers of x (..., p)."""
        sizes = [self.size - len(self.scale), len(self.scale)]
        layer, rest = x.index_select(-1, self.order).split(sizes, -1)
        return layer.unflatten(-1, self.shape), rest

    def _joined(self, layer: Tensor, rest: Tensor) -> Tensor:
        return torch.cat([layer.flatten(-2), rest], -1).index_select(-1, self.inverse)

    def _times(self, layer: Tensor, *, transposed: bool = False) -> Tensor:
        """R W, or R' W, for the root R of the layer's covariance R R'."""
        column, row = (self.column.mT, self.row.mT) if transposed else (self.column, self.row)
        if self.separate:
            return (column @ layer[..., None])[..., 0]
        return row @ layer @ column.mT

    def logdet(self) -> Tensor:
        columns = self.column.diagonal(dim1=-2, dim2=-1).log().sum()
        total = self.scale.log().sum() + columns * (1 if self.separate else self.shape[0])
        if not self.separate:
            total = total + self.shape[1] * self.row.diagonal().log().sum()
        return -2.0 * total

    def sample(self, num_samples: int) -> Tensor:
        like = self.scale
        noise = torch.randn(num_samples, self.size, dtype=like.dtype, device=like.device)
        layer, rest = self._split(noise)
        return self._joined(self._times(layer), self.scale * rest)

    def quadratic(self, x: Tensor) -> Tensor:
        solved = torch.linalg.solve_triangular
        layer, rest = self._split(x)
        if self.separate:
            white = solved(self.column, layer[..., None], upper=False)[..., 0]
        else:
            white = solved(self.column, solved(self.row, layer, upper=False).mT, upper=False)
        return white.square().sum((-2, -1)) + (rest / self.scale).square().sum(-1)

    def solve(self, x: Tensor) -> Tensor:
        layer, rest = self._split(x)
        layer = self._times(self._times(layer, transposed=True))
        return self._joined(layer, self.scale.square() * rest)

    def variances(self) -> Tensor:
        layer = self.column.square().sum(-1)
        if not self.separate:
            layer = torch.outer(self.row.square().sum(-1), layer)
        return self._joined(layer, self.scale.square())

    def whitened(self, jacobian: Jacobian) -> list[Whitened]:
        rows = jacobian.rows()
        tensors = (tensor.to(rows) for tensor in (self.column, self.row, self.scale))
        root = LayerPrecision(self.order, self.inverse, *tensors)
        layer, rest = root._split(rows)
        values = root._joined(root._times(layer, transposed=True), root.scale * rest)
        return [whole_rows(jacobian, values)]
