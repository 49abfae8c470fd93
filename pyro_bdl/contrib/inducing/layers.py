"""Layers of a program on inducing inputs: which there are, and the law of their weights."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_bdl.curvature.jacobian.affine_uses import unfolding
from pyro_bdl.distributions.copies import on_device_of
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.estimators.product import DataProduct, Operand, data_product
from pyro_bdl.program.linear_ops.last_layer import LastLayer
from pyro_bdl.program.linear_ops.recognize import AffineOp, recognize
from pyro_bdl.program.linear_ops.tracker import Tag, Tracker
from pyro_bdl.program.trace import Site, sum_out_discrete
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.trees import tree_map


class Conditional:
    """Q(b) of columns b_o ~ N(0, I) given pseudo-data r_o = A b_o + N(0, I), over groups.

    Q(b_o) = N(C A' r_o, C) with C = (I + A'A)^-1. The smaller of I + A'A and I + AA' is factored.

    :param rows: A, (groups, rows, columns).
    :param targets: r, (groups, rows, outputs).
    """

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.rows, self.targets = rows, targets
        self.by_rows = rows.shape[-2] < rows.shape[-1]
        gram = rows @ rows.mT if self.by_rows else rows.mT @ rows
        self.one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        self.factor = torch.linalg.cholesky(gram + self.one)

    def _solved(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right, self.factor)

    @cached_property
    def mean(self) -> Tensor:
        """E[b], (groups, columns, outputs)."""
        if self.by_rows:
            return self.rows.mT @ self._solved(self.targets)
        return self._solved(self.rows.mT @ self.targets)

    def draw(self, noise: Tensor, pseudo_noise: Tensor) -> Tensor:
        """b, (groups, columns, outputs), from Normal numbers of the shapes of b and, with fewer
        rows than columns, of r: b = e + A' (I + AA')^-1 (r - A e - e'), by Matheron's rule."""
        if self.by_rows:
            misfit = self.targets - self.rows @ noise - pseudo_noise.view_as(self.targets)
            return noise + self.rows.mT @ self._solved(misfit)
        offset = torch.linalg.solve_triangular(self.factor.mT, noise, upper=True)
        return self.mean + offset

    def log_ratio(self, b: Tensor) -> Tensor:
        """log Q(b) - log N(b; 0, I), a scalar: by Bayes' rule the pseudo-data's log likelihood
        minus their log evidence."""
        best = (self.targets - self.rows @ self.mean).square().sum() + self.mean.square().sum()
        misfit = (self.targets - self.rows @ b).square().sum()
        return 0.5 * (best - misfit) + self._half_log_det()

    def kl(self) -> Tensor:
        """KL(Q || N(0, I)), a scalar."""
        inverse = torch.linalg.solve_triangular(self.factor, self.one, upper=False)
        trace = inverse.square().sum() - self.factor.shape[:-1].numel()
        moved = self.targets.shape[-1] * trace + self.mean.square().sum()
        return 0.5 * moved + self._half_log_det()

    def _half_log_det(self) -> Tensor:
        logs = self.factor.diagonal(dim1=-2, dim2=-1).log().sum()
        return self.targets.shape[-1] * logs


class InducingLayer(NamedTuple):
    """A linear operation whose weights are conditioned on its inputs at the inducing inputs.

    :param sites: its weight and, where that is a latent with a Normal prior, its bias.
    :param is_shared: whether the prior's scales, and so Q's covariance, are those of all outputs.
    :param rows: the number of pseudo-data, inducing inputs times positions; ``outputs`` of outputs,
        ``columns`` of the weights of one, the bias included.
    """

    sites: tuple[str, ...]
    is_shared: bool
    rows: int
    outputs: int
    columns: int

    @property
    def noise(self) -> tuple[int, int]:
        """How many standard Normal numbers a draw takes: for weights, and for pseudo-data."""
        by_rows = self.rows < self.columns
        return self.outputs * self.columns, self.outputs * self.rows * by_rows


class LayerAtInputs(NamedTuple):
    """A layer at some latents: its inputs (groups, rows, columns), its weights (groups, outputs of
    one, columns)."""

    layer: InducingLayer
    features: Tensor
    matrix: Tensor

    def outcomes(self) -> Tensor:
        """Its outputs, (rows, outputs)."""
        return (self.features @ self.matrix.mT).movedim(0, 1).flatten(1).detach()


def find_layers(seen: LastLayer, priors: Mapping[str, Site]) -> dict[str, LayerAtInputs]:
    """The layers of a run, by their weight: operations that are the first use of all of a latent.

    :param seen: the run's operations, on latents that take gradients.
    :param priors: the latents' statements.
    :raises UnsupportedProgramError: for a layer without a Normal prior.
    """
    layers = {}

    def operand(value: Any) -> Operand:
        tag = seen.tag(value) if seen.is_latent(value) else None
        return Operand(value, tag, None if tag is None else priors[tag.site].distribution)

    for layer in seen.layers:
        op, first = layer.terms[0].op, {term.site for term in layer.terms if term.is_first}
        product = data_product(op, operand)
        # a single image has no axis of rows
        has_rows = op.kind != "convolution" or op.input_dim == 1
        if product is None or not has_rows or not _is_whole(product.weight, first):
            continue
        bias, parts = product.bias, [product.weight]
        if bias is not None and _is_whole(bias, first) and bias.normal is not None:
            parts.append(bias)
        sites = tuple(part.tag.site for part in parts if part.tag is not None)
        for site, part in zip(sites, parts, strict=True):
            if part.normal is None or is_changed(priors[site]):
                raise UnsupportedProgramError(
                    f"AutoInducing conditions Normal priors, and the weights '{site}' have another "
                    f"({type(part.base).__name__}): give them a Normal of any scale, or take "
                    "another guide"
                )
        features = _features(op, product, with_one=len(parts) > 1)
        matrix = _matrix([part.value for part in parts], product.groups)
        is_shared = all(_is_shared(part.scale, product.groups) for part in parts)
        _, rows, columns = features.shape
        own = InducingLayer(sites, is_shared, rows, matrix[..., 0].numel(), columns)
        layers[sites[0]] = LayerAtInputs(own, features, matrix)
    return layers


def _is_whole(operand: Operand, first: Collection[str]) -> bool:
    """Return whether an operand holds all numbers of a latent that had no use before."""
    tag = operand.tag
    return tag is not None and tag.site in first and tag.tensor.numel() == tag.root.numel()


class SampledLayer(NamedTuple):
    """A layer of a pass: Q, and the weights as b = (w - m) / s of their prior N(m, s^2)."""

    conditional: Conditional
    b: Tensor
    scale: Tensor

    def log_density(self) -> Tensor:
        """log Q of the weights, a scalar."""
        prior = dist.Normal(torch.zeros_like(self.b), 1.0).log_prob(self.b).sum()
        return self.conditional.log_ratio(self.b) + prior - self.scale.log().sum()


class InducingForward(Tracker):
    """A run on the inducing inputs, in which a layer's weights get their value where it computes.

    :param layers: by their weight.
    :param targets: of each layer, (rows, outputs); ``precisions`` (rows,).
    :param given: the layers' latents, to weigh them; None to draw them.
    :param noise: of each layer's draw, as ``InducingLayer.noise`` says; None where they are given.
    """

    def __init__(
        self,
        layers: Mapping[str, InducingLayer],
        targets: Mapping[str, Tensor],
        precisions: Mapping[str, Tensor],
        *,
        given: Mapping[str, Tensor] | None = None,
        noise: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.targets, self.precisions = layers, targets, precisions
        self.given, self.noise = given or {}, noise or {}
        self.weights = {site: name for name, layer in layers.items() for site in layer.sites}
        self.priors: dict[str, Any] = {}
        self.values: dict[str, Tensor] = {}
        self.drawn: list[SampledLayer] = []

    def sample(self, msg: Any) -> None:
        """Let a layer's latent wait for its operation; sum a discrete site out."""
        name = msg["name"]
        if name not in self.weights:
            sum_out_discrete(msg)
            return
        value = self.given.get(name)
        if value is None:
            value = self.targets[self.weights[name]].new_zeros(msg["fn"].shape())
        msg["value"], msg["done"] = value, True
        self.priors[name] = on_device_of(msg["fn"], value)
        self.track(name, value)

    def _operand(self, value: Any) -> Operand:
        tag = self.tag(value)
        return Operand(value, tag, None if tag is None else self.priors[tag.site])

    def operate(self, func: Any, args: tuple, kwargs: dict, tagged: list[Tag]) -> Any:
        if any(tag.site not in self.values for tag in tagged):
            op = recognize(func, args, kwargs, self.is_latent)
            product = data_product(op, self._operand)
            if op is not None and product is not None and product.weight.tag is not None:
                site = product.weight.tag.site
                if site in self.layers and site not in self.values:
                    self._meet(site, op, product)

        def present(leaf: Any) -> Any:
            tag = self.tag(leaf)
            if tag is None or tag.site not in self.values:
                return leaf
            return tag.of(self.values[tag.site])

        return func(*tree_map(present, args), **tree_map(present, kwargs))

    def _meet(self, site: str, op: AffineOp, product: DataProduct) -> None:
        """Draw or take a layer's weights."""
        layer, parts = self.layers[site], [product.weight]
        if len(layer.sites) > 1 and product.bias is not None:
            parts.append(product.bias)
        features = double(_features(op, product, with_one=len(parts) > 1))
        loc = double(_matrix([part.loc for part in parts], product.groups))
        scale = double(_matrix([part.scale for part in parts], product.groups))
        shape = loc.shape
        targets = double(self.targets[site]).unflatten(1, shape[:2]).movedim(0, 1)
        if not layer.is_shared:  # each output is a group
            features = features.repeat_interleave(shape[1], 0)
            loc, scale = (value.reshape(-1, 1, shape[2]) for value in (loc, scale))
            targets = targets.mT.reshape(-1, layer.rows, 1)
        root = double(self.precisions[site]).sqrt()[:, None]
        q = Conditional(root * features * scale[:, :1], root * (targets - features @ loc.mT))
        if self.given:
            matrix = double(_matrix([part.value for part in parts], product.groups))
            b = ((matrix.view_as(loc) - loc) / scale).mT
            self.values |= {name: self.given[name] for name in layer.sites}
        else:
            noise = double(self.noise[site])
            first, last = noise.split(layer.noise)
            b = q.draw(first.view(len(loc), layer.columns, -1), last)
            matrix = (loc + scale * b.mT).view(shape).to(self.noise[site])
            sizes = [shape[2] - len(parts) + 1, 1][: len(parts)]
            for part, values in zip(parts, matrix.split(sizes, -1), strict=True):
                self._put(part, values)
        self.drawn.append(SampledLayer(q, b, scale))

    def _put(self, part: Operand, values: Tensor) -> None:
        """Set a latent to values in the order in which its operation takes them."""
        assert part.tag is not None
        root, flat = part.tag.root, values.reshape(-1)
        places = torch.arange(root.numel(), device=root.device).view(root.shape)
        places = part.shaped(part.tag.of(places)).reshape(-1)
        value = torch.zeros_like(flat).scatter(0, places, flat)
        self.values[part.tag.site] = value.view(root.shape)


def is_changed(site: Site) -> bool:
    """Return whether a handler scales or masks a site's density."""
    return site.mask is not None or not isinstance(site.scale, int | float) or site.scale != 1.0


def _features(op: AffineOp, product: DataProduct, *, with_one: bool) -> Tensor:
    """The inputs of a product's outputs, (groups, rows, columns); a convolution's rows are its
    positions in each image."""
    if op.kind == "convolution":
        rows = unfolding(op)(product.inputs).flatten(0, 1).movedim(0, 1)
    else:
        rows = product.inputs.reshape(1, -1, product.inputs.shape[-1])
    return torch.cat([rows, torch.ones_like(rows[..., :1])], -1) if with_one else rows


def _matrix(parts: list[Any], groups: int) -> Tensor:
    """A weight and a bias, as the operation takes them, as (groups, outputs of one, columns)."""
    outputs = len(parts[0]) // groups
    return torch.cat([part.reshape(groups, outputs, -1) for part in parts], -1)


def _is_shared(scale: Any, groups: int) -> bool:
    """Return whether a prior's scales are the same for all outputs, now and later."""
    if scale.stride(0) == 0:
        return True
    grouped = scale.unflatten(0, (groups, -1))
    return not scale.requires_grad and bool((grouped == grouped[:, :1]).all())
