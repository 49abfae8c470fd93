"""The precision that the prior contributes at a point: minus the Hessian of its log density."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_bdl.distributions.copies import masks_of
from pyro_bdl.distributions.matrix_normal import MatrixNormal
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import warn
from pyro_bdl.program.gaussian_prior import JointBlock, JointSite
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, Site, leave_open, record
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.random_state import fixed_normal


class PriorPrecision(NamedTuple):
    """Minus the Hessian of log p(T(u)) + log |det dT/du| in the subset's p numbers.

    :param diagonal: its diagonal (p,).
    :param indices: the numbers that other numbers' priors depend on, or whose own prior is no
        Normal, (r,); None if there are none, or too many for a dense matrix.
    :param dense: the matrix (r, r) over them.
    :param uniform: of sites all of whose entries have one number as their precision, this number.
    :param quadratic: whether the log density is a quadratic, so that this holds anywhere.
    """

    diagonal: Tensor
    indices: Tensor | None = None
    dense: Tensor | None = None
    uniform: Mapping[str, Tensor] = MappingProxyType({})
    quadratic: bool = False

    def within(self, positions: Any) -> Tensor:
        """The matrix (m, m) over some of the numbers.

        :param positions: their indices, or a slice.
        """
        result = torch.diag(self.diagonal[positions])
        found = self._dense_within(positions)
        if found is None:
            return result
        inside, block = found
        return result.index_put((inside[:, None], inside), block)

    def divided(self, number: Tensor) -> "PriorPrecision":
        """The matrix divided by a number."""
        dense = None if self.dense is None else self.dense / number
        diagonal = self.diagonal / number
        return PriorPrecision(diagonal, self.indices, dense, quadratic=self.quadratic)

    def couples(self, positions: Any) -> bool:
        """Return whether the matrix over some of the numbers has off-diagonal entries."""
        found = self._dense_within(positions)
        return found is not None and bool((found[1] - found[1].diagonal().diag()).any())

    def _dense_within(self, positions: Any) -> tuple[Tensor, Tensor] | None:
        """Return which of some numbers the dense matrix covers (q,), and its block (q, q)."""
        if self.indices is None or self.dense is None:
            return None
        table = torch.full_like(self.diagonal, -1, dtype=torch.long)
        table[self.indices] = torch.arange(len(self.indices), device=table.device)
        where = table[positions]
        inside = (where >= 0).nonzero()[:, 0]
        return inside, self.dense[where[inside][:, None], where[inside]]

    def times(self, vector: Tensor) -> Tensor:
        """The matrix times a vector (p,)."""
        if self.indices is None or self.dense is None:
            return self.diagonal.to(vector) * vector
        plain = self.diagonal.index_fill(0, self.indices, 0.0).to(vector) * vector
        return plain.index_add(0, self.indices, self.dense.to(vector) @ vector[self.indices])

    def added_to(self, matrix: Tensor) -> Tensor:
        """Return a matrix (p, p) plus this matrix."""
        every, diagonal = torch.arange(len(matrix), device=matrix.device), self.diagonal.to(matrix)
        if self.indices is None or self.dense is None:
            return matrix.index_put((every, every), diagonal, accumulate=True)
        plain = diagonal.index_fill(0, self.indices, 0.0)
        matrix = matrix.index_put((every, every), plain, accumulate=True)
        where = (self.indices[:, None].expand_as(self.dense), self.indices.expand_as(self.dense))
        return matrix.index_put(where, self.dense.to(matrix), accumulate=True)


class PriorRoot:
    """A matrix R with Lambda = R R', the prior precision, in float64.

    R is diagonal but for the numbers whose priors are coupled, where it is a Cholesky factor L.

    :param prior: Lambda.
    :param parts: the slices of the sites, to name one in errors.
    :param purpose: the words before "inverts the prior precision" in errors.
    :raises ValueError: if the prior precision has no inverse, or is indefinite.
    """

    def __init__(self, prior: PriorPrecision, parts: Mapping[str, slice], purpose: str) -> None:
        diagonal = prior.diagonal.double()
        if not (diagonal > 0).all():
            lowest = int(diagonal.detach().argmin())
            site = next(name for name, part in parts.items() if part.start <= lowest < part.stop)
            raise ValueError(
                f"{purpose} inverts the prior precision, which is {float(diagonal[lowest]):.3g} at "
                f"site '{site}': give this site a prior with a finite variance, or use "
                'structure="full"'
            )
        self.scale, self.indices = diagonal.sqrt(), prior.indices
        if prior.indices is None or prior.dense is None:
            self.indices = None
            return
        self.tril, failed = torch.linalg.cholesky_ex(prior.dense.double())
        if failed:
            sites = [
                name for name, part in parts.items()
                if ((prior.indices >= part.start) & (prior.indices < part.stop)).any()
            ]  # fmt: skip
            raise ValueError(
                f"{purpose} inverts the prior precision, which is indefinite over the sites "
                f"{', '.join(sites)}, as under a hyperprior: leave the hyperparameter's site out "
                'of the subset, or use structure="full"'
            )

    def log_det(self) -> Tensor:
        """Return log det Lambda."""
        if self.indices is None:
            return 2.0 * self.scale.log().sum()
        own = self.scale.log().index_fill(0, self.indices, 0.0).sum()
        return 2.0 * (own + self.tril.diagonal().log().sum())

    def solve(self, x: Tensor) -> Tensor:
        """Return R^-1 x for x (..., p)."""
        return self._replaced(
            x / self.scale,
            lambda tril: torch.linalg.solve_triangular(tril, self._inside(x), upper=False),
        )

    def solve_transposed(self, x: Tensor) -> Tensor:
        """Return R^-T x for x (..., p)."""
        return self._replaced(
            x / self.scale,
            lambda tril: torch.linalg.solve_triangular(tril.mT, self._inside(x), upper=True),
        )

    def times(self, x: Tensor) -> Tensor:
        """Return R x for x (..., p)."""
        return self._replaced(x * self.scale, lambda tril: tril @ self._inside(x))

    def transposed_times(self, x: Tensor) -> Tensor:
        """Return R' x for x (..., p)."""
        return self._replaced(x * self.scale, lambda tril: tril.mT @ self._inside(x))

    def _inside(self, x: Tensor) -> Tensor:
        """The coupled numbers of x (..., p) as columns (r, N)."""
        return x[..., self.indices].reshape(-1, len(self.tril)).mT

    def _replaced(self, x: Tensor, columns: Callable[[Tensor], Tensor]) -> Tensor:
        if self.indices is None:
            return x
        inside = columns(self.tril).mT.reshape(*x.shape[:-1], len(self.tril))
        return x.index_copy(-1, self.indices, inside)


def run_at(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Run, dict[str, Tensor]]:
    """Run the program at a vector (P,); return the run and its unconstrained leaves by site."""
    leaves = {n: v.clone().requires_grad_() for n, v in subset.layout.unflatten(vector).items()}
    with torch.enable_grad(), evaluation_mode(model):
        values = subset.layout.to_supports(leaves)
        return record(model, values, args, kwargs, draw=leave_open), leaves


def hyperpriors(run: Run, leaves: Mapping[str, Tensor]) -> dict[str, Site]:
    """The factors of a run that parameters move and no latent does, by name: densities of these
    parameters, and no part of the likelihood.

    :param leaves: the latents, with the graph of the run.
    """
    found = {}
    for name, site in (run.factors | run.prior_factors).items():
        value = site.log_prob()
        if value.requires_grad and not reaches(value, leaves.values()):
            found[name] = site
    return found


def prior_precision(
    run: Run,
    leaves: Mapping[str, Tensor],
    subset: Subset,
    *,
    create_graph: bool = False,
    dense_up_to: int = 2048,
) -> PriorPrecision:
    """The prior precision at the point of a run.

    If the log density is not concave there (heavy tails, a Laplace density), 1 / variance of the
    prior is used instead, with a warning that names the site.

    :param run: the program run at ``leaves``, with their graph (``run_at``).
    :param create_graph: keep it differentiable in the program's parameters.
    :param dense_up_to: latents with a joint prior that get a matrix; of more, the diagonal.
    """
    layout = subset.layout
    like = next(iter(leaves.values()))
    like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    pieces: dict[str, Tensor] = {}
    closed = {
        name: _normal_precision(site, layout.latents[name].transform, leaves)
        for name, site in run.latents.items()
    }
    weighed = _weighed(run, leaves)  # these have no closed form any more
    known = _known_gaussians(run, layout, dense_up_to)
    groups = [group for group in known if weighed.isdisjoint(group[0])]
    for names, spread, _ in groups:
        sizes = [layout.latents[name].size for name in names]
        pieces |= dict(zip(names, spread.split(sizes), strict=True))
    joint = {n for n, precision in closed.items() if precision is None and n not in pieces}
    joint |= weighed
    joint |= _parents(run, leaves, joint)
    for name, precision in closed.items():
        if name not in joint and precision is not None:
            flat = precision.reshape(-1)
            pieces[name] = flat if create_graph else flat.detach()
    rest = [name for name in layout.latents if name in joint and name in subset.parts]
    matrices = [(names, matrix.to(like)) for names, _, matrix in groups if matrix is not None]
    is_quadratic = not rest and len(matrices) == len(groups)
    if rest:
        fixed, dense = _differentiated(run, leaves, layout, rest, create_graph, dense_up_to)
        pieces |= dict(zip(rest, fixed, strict=True))
        if dense is not None:
            matrices.append((rest, dense.to(like)))
    diagonal = subset.of_sites(pieces[name].to(like) for name in subset.parts)
    uniform = {
        name: precision.reshape(-1)[0].to(like) for name, precision in closed.items()
        if precision is not None and name not in joint and is_one_number(precision)
    }  # fmt: skip
    prior = PriorPrecision(diagonal, uniform=uniform, quadratic=is_quadratic)
    if not matrices:
        return prior
    nowhere = torch.full((layout.size,), -1, device=like.device)
    places = subset.put(nowhere, torch.arange(subset.size, device=like.device))
    indices = torch.cat([places[layout.slices[name]] for names, _ in matrices for name in names])
    inside = (indices >= 0).nonzero()[:, 0]
    if not len(inside):
        return prior
    dense = torch.block_diag(*(matrix for _, matrix in matrices))[inside[:, None], inside]
    return prior._replace(indices=indices[inside], dense=dense)


def _known_gaussians(
    run: Run, layout: Any, dense_up_to: int
) -> list[tuple[list[str], Tensor, Tensor | None]]:
    """Groups of sites whose joint prior is a Gaussian with known precision: its diagonal and
    matrix.

    There is no matrix for large Gaussians, unless they are dense themselves.
    """
    result: list[tuple[list[str], Tensor, Tensor | None]] = []
    blocks: set[JointBlock] = set()
    for name in layout.latents:
        site = run.latents[name]
        prior: Any = site.distribution
        if isinstance(prior, JointSite) and prior.block not in blocks:
            block = prior.block
            blocks.add(block)
            dense = block.layout.size <= dense_up_to or block.precision.dense
            matrix = site.scale * block.precision_matrix() if dense else None
            diagonal = site.scale * block.precision_diagonal
            result.append(([latent.name for latent in block.latents], diagonal, matrix))
        elif isinstance(prior, MatrixNormal) and site.value.numel() <= dense_up_to:
            whole: Tensor = site.scale * prior.precision_matrix()
            result.append(([name], whole.diagonal(), whole))
    return result


def _differentiated(
    run: Run,
    leaves: Mapping[str, Tensor],
    layout: Any,
    names: list[str],
    create_graph: bool,
    dense_up_to: int,
) -> tuple[list[Tensor], Tensor | None]:
    """Differentiate the log prior of some sites twice: diagonals, and the matrix if it is small."""
    total = _log_density(run, leaves, layout)
    sizes = [layout.latents[name].size for name in names]
    inputs = [leaves[name] for name in names]
    gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in inputs]
    if total.requires_grad:
        gradients = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
    dense: Tensor | None = None
    parts: tuple[Tensor, ...]
    if sum(sizes) <= dense_up_to:
        dense = -_hessian(gradients, inputs, create_graph)
        parts = dense.diagonal().split(sizes)
    else:
        parts = tuple(
            -_own_diagonal(gradient, leaf, create_graph)
            for gradient, leaf in zip(gradients, inputs, strict=True)
        )
    fixed = [
        _concave(name, part, run.latents[name], layout.latents[name].unconstrained_shape)
        for name, part in zip(names, parts, strict=True)
    ]
    if dense is not None:
        dense = dense + torch.diag(torch.cat(fixed) - dense.diagonal())
    return fixed, dense


def independent_normal(site: Site, transform: Any, leaves: Mapping[str, Tensor]) -> Any:
    """The Normal of a site with independent Normals that depend on no other latent; else None."""
    base: Any = base_distribution(site.distribution)
    if transform is not None or type(base).__name__ != "Normal":
        return None
    if site.mask is not None or masks_of(site.distribution):
        return None
    for tensor in (base.loc, base.scale):
        if reaches(tensor, leaves.values()):
            return None
    return base


def _normal_precision(site: Site, transform: Any, leaves: Mapping[str, Tensor]) -> Tensor | None:
    """The precision of a site in closed form, with its shape; else None.

    It is scale / sd^2 for independent Normals and 0 for flat densities over the reals.
    """
    if site.mask is False and transform is None:
        return site.value.new_zeros(()).expand(site.value.shape)
    normal = independent_normal(site, transform, leaves)
    if normal is None:
        return None
    sd = normal.scale.reshape(-1)[0] if is_one_number(normal.scale) else normal.scale
    return (site.scale / sd.square()).expand(site.value.shape)


def is_one_number(values: Tensor) -> bool:
    """Return whether a tensor is one number in memory, expanded."""
    steps = zip(values.shape, values.stride(), strict=True)
    return values.numel() > 0 and all(size == 1 or step == 0 for size, step in steps)


def _weighed(run: Run, leaves: Mapping[str, Tensor]) -> set[str]:
    """The sites that a prior factor depends on."""
    terms = [site.log_prob().sum() for site in run.prior_factors.values()]
    return {name for name, leaf in leaves.items() if any(reaches(t, [leaf]) for t in terms)}


def _parents(run: Run, leaves: Mapping[str, Tensor], names: set[str]) -> set[str]:
    """The sites on which the priors of the named sites depend."""
    terms = [run.latents[name].log_prob().sum() for name in names]
    terms = [term for term in terms if term.requires_grad]
    if not terms:
        return set()
    total = torch.stack(terms).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {name for name, gradient in zip(leaves, found, strict=True) if gradient is not None}


@torch.enable_grad()
def _log_density(run: Run, leaves: Mapping[str, Tensor], layout: Any) -> Tensor:
    """log p(T(u)) + log |det dT/du| in nats, a scalar."""
    total = next(iter(leaves.values())).new_zeros(()) + run.log_prior()
    for name, site in run.latents.items():
        transform = layout.latents[name].transform
        if transform is not None:
            total = total + transform.log_abs_det_jacobian(leaves[name], site.value).sum()
    return total


def _own_diagonal(gradient: Tensor, leaf: Tensor, create_graph: bool) -> Tensor:
    """The diagonal of d gradient / d leaf, (m,)."""
    if not gradient.requires_grad:
        return torch.zeros_like(leaf).reshape(-1)

    def product(vector: Tensor) -> Tensor:
        (result,) = torch.autograd.grad(
            gradient, leaf, vector, retain_graph=True, create_graph=create_graph,
            materialize_grads=True,
        )  # fmt: skip
        return result

    diagonal = product(torch.ones_like(leaf))
    signs = fixed_normal(leaf).sign()
    if torch.allclose(signs * product(signs), diagonal, rtol=1e-4, atol=1e-6):
        return diagonal.reshape(-1)
    entries = []
    for i in range(leaf.numel()):  # the prior couples the entries of this site
        unit = torch.zeros_like(leaf)
        unit.view(-1)[i] = 1.0
        entries.append(product(unit).reshape(-1)[i])
    return torch.stack(entries)


def _hessian(gradients: Sequence[Tensor], inputs: list[Tensor], create_graph: bool) -> Tensor:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    units = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
    if not flat.requires_grad:
        return torch.zeros_like(units)
    rows = torch.autograd.grad(
        flat, inputs, units, is_grads_batched=True, materialize_grads=True, retain_graph=True,
        create_graph=create_graph,
    )  # fmt: skip
    return torch.cat([row.reshape(len(flat), -1) for row in rows], 1)


def _concave(name: str, diagonal: Tensor, site: Site, shape: torch.Size) -> Tensor:
    """The diagonal, with 1 / variance of the prior at entries that are not positive, and at least 0
    for flat priors.

    :param shape: of the unconstrained value.
    """
    flat = flat_entries(site, shape, diagonal.device)
    diagonal = torch.where(flat, diagonal.clamp(min=0.0), diagonal)
    bad = ~(diagonal.detach() > 0) & ~flat
    if not bad.any():
        return diagonal
    try:
        variance = site.distribution.variance.detach().expand(site.value.shape).reshape(-1)
    except NotImplementedError:
        variance = torch.full_like(diagonal, float("nan"))
    usable = torch.isfinite(variance) & (variance > 0)
    if variance.shape != diagonal.shape or not usable[bad].all():
        raise ValueError(
            f"the prior of site '{name}' has no positive curvature at the MAP in {int(bad.sum())} "
            "of its entries and no finite variance to replace it: use a Normal prior there, or "
            "pyro.deterministic for a value that is fixed"
        )
    warn(
        f"the log prior of site '{name}' is not concave at the MAP in {int(bad.sum())} of "
        f"{bad.numel()} entries; the prior's 1 / variance is used for its precision there",
        "log-prior",
        stacklevel=5,
    )
    return torch.where(bad, variance.reciprocal(), diagonal)


def flat_entries(site: Site, shape: torch.Size, device: torch.device) -> Tensor:
    """A flat mask of the unconstrained numbers whose prior the site's masks leave out."""
    result = torch.full(shape, site.mask is False, device=device)
    masks = masks_of(site.distribution)
    if isinstance(site.mask, Tensor):
        masks.append((site.mask, site.distribution.batch_shape))
    for mask, batch in masks:
        left_out = ~mask.to(device).bool().expand(batch)
        result = result | left_out.reshape((*batch, *(1,) * (len(shape) - len(batch))))
    return result.reshape(-1)
