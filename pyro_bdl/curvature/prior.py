"""The precision that the prior contributes at a point: minus the Hessian of its log density."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pyro_bdl.distributions.copies import masks_of
from pyro_bdl.distributions.families import name_of
from pyro_bdl.distributions.matrix_normal import MatrixNormal
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import warn
from pyro_bdl.program.gaussian_prior import JointBlock, JointSite
from pyro_bdl.program.layout import Layout
from pyro_bdl.program.subset import Subset
from pyro_bdl.program.trace import Run, Site, placeholder_for_observed, record
from pyro_bdl.utils.autograd import reaches
from pyro_bdl.utils.collectives import Ranks
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double


class PriorPrecision(NamedTuple):
    """Minus the Hessian of log p(T(u)) + log |det dT/du| in the subset's p numbers: a diagonal, and
    a dense matrix over an index set; or a root of such a matrix, of the same form.

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
        inside, block = self._dense_within(positions)
        return result if block is None else result.index_put((inside[:, None], inside), block)

    def couples(self, positions: Any) -> bool:
        """Return whether the matrix over some of the numbers has off-diagonal entries."""
        _, block = self._dense_within(positions)
        return block is not None and bool((block - block.diagonal().diag()).any())

    def _dense_within(self, positions: Any) -> tuple[Any, Tensor | None]:
        """Return which of some numbers the dense matrix covers (q,), and its block (q, q)."""
        if self.indices is None or self.dense is None:
            return None, None
        table = torch.full_like(self.diagonal, -1, dtype=torch.long)
        table[self.indices] = torch.arange(len(self.indices), device=table.device)
        where = table[positions]
        inside = (where >= 0).nonzero()[:, 0]
        return inside, self.dense[where[inside][:, None], where[inside]]

    def divided(self, number: Tensor) -> "PriorPrecision":
        """The matrix divided by a number."""
        dense = None if self.dense is None else self.dense / number
        return self._replace(diagonal=self.diagonal / number, dense=dense, uniform={})

    def added_to(self, matrix: Tensor) -> Tensor:
        """Return a matrix (p, p) plus this matrix."""
        every, diagonal = torch.arange(len(matrix), device=matrix.device), self.diagonal.to(matrix)
        if self.indices is not None and self.dense is not None:
            indices = self.indices.to(matrix.device)
            diagonal = diagonal.index_fill(0, indices, 0.0)
            where = indices[:, None], indices
            matrix = matrix.index_put(where, self.dense.to(matrix), accumulate=True)
        return matrix.index_put((every, every), diagonal, accumulate=True)

    def times(self, x: Tensor) -> Tensor:
        """The matrix times x (..., p)."""
        return self._on(x, torch.mul, torch.matmul)

    def rmatvec(self, x: Tensor) -> Tensor:
        """The matrix's transpose times x (..., p)."""
        return self._on(x, torch.mul, lambda dense, columns: dense.mT @ columns)

    # Roots

    @property
    def has_inverse(self) -> bool:
        """True if the matrix is positive definite, so that it has a ``root``."""
        inside = () if self.dense is None else torch.linalg.cholesky_ex(double(self.dense))[1:]
        return bool((self.diagonal > 0).all()) and not any(inside)

    def root(self, parts: Mapping[str, slice], purpose: str) -> "PriorPrecision":
        """A matrix R with R R' this matrix, in float64, with a Cholesky factor for the dense one.

        :param parts: the slices of the sites, to name one in errors.
        :param purpose: the words before "inverts the prior precision" in errors.
        :raises ValueError: if the matrix has no inverse, or is indefinite.
        """
        diagonal = double(self.diagonal)
        if not (diagonal > 0).all():
            lowest = int(diagonal.detach().argmin())
            site = next(name for name, part in parts.items() if part.start <= lowest < part.stop)
            raise ValueError(
                f"{purpose} inverts the prior precision, which is {float(diagonal[lowest]):.3g} at "
                f"site '{site}': give this site a prior with a finite variance, or use "
                'structure="full"'
            )
        root = PriorPrecision(diagonal.sqrt(), uniform={})
        if self.indices is None or self.dense is None:
            return root
        tril, failed = torch.linalg.cholesky_ex(double(self.dense))
        if failed:
            inside = self.indices
            sites = [n for n, p in parts.items() if ((inside >= p.start) & (inside < p.stop)).any()]
            raise ValueError(
                f"{purpose} inverts the prior precision, which is indefinite over the sites "
                f"{', '.join(sites)}, as under a hyperprior: leave the hyperparameter's site out "
                'of the subset, or use structure="full"'
            )
        return root._replace(indices=self.indices.to(tril.device), dense=tril)

    def log_det(self) -> Tensor:
        """Return log det R R' of a root R."""
        own = 2.0 * self.diagonal.log()
        if self.indices is None or self.dense is None:
            return own.sum()
        inside = 2.0 * self.dense.diagonal().log().sum()
        return own.index_fill(0, self.indices, 0.0).sum() + inside

    def solve(self, x: Tensor) -> Tensor:
        """Return R^-1 x of a root R for x (..., p)."""
        return self._on(x, _divided, partial(torch.linalg.solve_triangular, upper=False))

    def solve_transposed(self, x: Tensor) -> Tensor:
        """Return R^-T x of a root R for x (..., p)."""
        return self._on(
            x, _divided, lambda tril, y: torch.linalg.solve_triangular(tril.mT, y, upper=True)
        )

    def _on(
        self,
        x: Tensor,
        of_diagonal: Callable[[Tensor, Tensor], Tensor],
        of_dense: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """A product with x (..., p), by those of the diagonal and of the dense matrix, for which
        the numbers are columns (r, N)."""
        result = of_diagonal(self.diagonal.to(x), x)
        if self.indices is None or self.dense is None:
            return result
        indices = self.indices.to(x.device)
        columns = x[..., indices].reshape(-1, len(self.dense)).mT
        inside = of_dense(self.dense.to(x), columns).mT.reshape(*x.shape[:-1], -1)
        return result.index_copy(-1, indices, inside)


def _divided(diagonal: Tensor, x: Tensor) -> Tensor:
    return x / diagonal


def run_at(
    model: Callable, subset: Subset, vector: Tensor, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[Run, dict[str, Tensor]]:
    """Run the program at a vector (P,); return the run and its unconstrained leaves by site, of
    which those in the subset take gradients."""
    leaves = subset.layout.unflatten(vector)
    for name in subset.parts:
        leaves[name] = leaves[name].clone().requires_grad_()
    with torch.enable_grad(), evaluation_mode(model):
        values = subset.layout.to_supports(leaves)
        return record(model, values, args, kwargs, draw=placeholder_for_observed), leaves


@torch.enable_grad()
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


class FactorStatements:
    """The factor statements of a pass over the data.

    A factor in a plate of its own data counts in every batch. One in no plate, or in a plate of the
    latents, is about the latents: it counts once. ``values`` are the latter's, ``new`` the factors
    that count for this batch.

    :param ranks: processes with the other data, of which the first counts factors of the latents.
    :param earlier: whether a pass over earlier data has counted them.
    """

    def __init__(self, ranks: Ranks | None = None, *, earlier: bool = False) -> None:
        self.values: dict[str, Tensor] = {}
        self.new: list[Site] = []
        self._proved: set[str] = set()  # to depend on no data
        self._counts = not earlier and (ranks is None or ranks.number == 0)

    def read(
        self,
        run: Run,
        hyperprior_names: Iterable[str],
        origins: Callable[[], Mapping[str, Collection[Tensor]]] | None = None,
    ) -> None:
        """Record the factors of a run.

        :param hyperprior_names: the names of the hyperpriors, which are not part of the likelihood.
        :param origins: returns for each factor the data that it is computed from; it is asked
            once, for data after the first ones.
        :raises ValueError: if a factor that counts once depends on the data of its batch.
        """
        hyperprior_names, of_latents, self.new = set(hyperprior_names), set(), []
        for latent in run.latents.values():
            of_latents |= {plate for plate, _ in latent.plates}
        for name, site in run.factors.items():
            if name in hyperprior_names:
                continue
            if any(plate not in of_latents for plate, _ in site.plates):
                self.new.append(site)
                continue
            value = site.log_prob().detach()
            if self._counts and name not in self.values:
                self.new.append(site)
            elif origins is not None and name not in self._proved:
                if origins()[name]:
                    _refuse_factor(name)
                self._proved.add(name)
            if not torch.allclose(self.values.setdefault(name, value), value, equal_nan=True):
                _refuse_factor(name)


def _refuse_factor(name: str) -> NoReturn:
    raise ValueError(
        f"the factor '{name}' is in no plate of the data, so that it counts once, but it depends "
        "on the data of its batch: put it in the plate of the data"
    )


def prior_precision(
    run: Run,
    leaves: Mapping[str, Tensor],
    subset: Subset,
    *,
    create_graph: bool = False,
    dense_up_to: int = 2048,
) -> PriorPrecision:
    """The prior precision at the point of a run.

    Independent Normals and joint Gaussians have theirs; of the remaining log density it is minus
    the Hessian. If that is not concave (heavy tails, a Laplace density), 1 / variance of the prior
    is used instead, with a warning that names the site.

    :param run: the program run at ``leaves``, with their graph (``run_at``).
    :param create_graph: keep it differentiable in the program's parameters.
    :param dense_up_to: latents with a joint prior that get a matrix; of more, the diagonal.
    """
    layout = subset.layout
    like = next(iter(leaves.values()))
    like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    closed = _closed_precisions(run, layout, leaves)
    groups = _known_gaussians(run, layout, dense_up_to)
    rest = layout.latents.keys() - closed.keys()
    rest -= {name for names, _, _ in groups for name in names}
    total = _log_density(run, leaves, layout, rest)
    moved = {n for n, leaf in leaves.items() if n not in rest and reaches(total, [leaf])}
    joined = [names for names, _, _ in groups if not moved.isdisjoint(names)]
    if joined:
        groups = [group for group in groups if group[0] not in joined]
        rest |= {name for names in joined for name in names}
        total = _log_density(run, leaves, layout, rest)
    pieces = {name: precision.reshape(-1) for name, precision in closed.items()}
    for names, diagonal, _ in groups:
        sizes = [layout.latents[name].size for name in names]
        pieces |= dict(zip(names, diagonal.split(sizes), strict=True))
    matrices = [(names, matrix.to(like)) for names, _, matrix in groups if matrix is not None]
    inputs = [name for name in layout.latents if name in rest | moved and name in subset.parts]
    is_quadratic = not inputs and len(matrices) == len(groups)
    coupled = {name for names, _, matrix in groups if matrix is None for name in names}

    def separate(number: int) -> bool:
        """By the statements: a density of single numbers, which no other one depends on."""
        name = inputs[number]
        transform = layout.latents[name].transform
        single = not base_distribution(run.latents[name].distribution).event_shape
        if not single or (transform is not None and transform.domain.event_dim > 0):
            return False
        return not reaches(_log_density(run, leaves, layout, rest - {name}), [leaves[name]])

    if inputs:
        leaves_of_inputs = [leaves[name] for name in inputs]
        dense, diagonals = _curved(total, leaves_of_inputs, create_graph, dense_up_to, separate)
        for name, diagonal in zip(inputs, diagonals, strict=True):
            added = pieces[name].to(diagonal) + diagonal if name in pieces else diagonal
            shape = layout.latents[name].unconstrained_shape
            pieces[name] = _concave(name, added, run.latents[name], shape)
        if dense is not None:
            own = torch.cat([pieces[name] for name in inputs])
            dense = dense + torch.diag(own - dense.diagonal())
            matrices.append((inputs, dense.to(like)))
        elif len(inputs) > 1 or len(diagonals[0]) > 1:
            coupled |= {n for number, n in enumerate(inputs) if not separate(number)}
    _warn_of_couplings(sorted(coupled, key=list(layout.latents).index), layout, dense_up_to)
    diagonal = subset.of_sites(pieces[name].to(like) for name in subset.parts)
    uniform = {
        name: precision.reshape(-1)[0].to(like) for name, precision in closed.items()
        if name not in moved and is_one_number(precision)
    }  # fmt: skip
    prior = PriorPrecision(diagonal, uniform=uniform, quadratic=is_quadratic)
    if matrices:
        nowhere = torch.full((layout.size,), -1, device=like.device)
        places = subset.put(nowhere, torch.arange(subset.size, device=like.device))
        indices = torch.cat([places[layout.slices[n]] for names, _ in matrices for n in names])
        inside = (indices >= 0).nonzero()[:, 0]
        whole = torch.block_diag(*(matrix for _, matrix in matrices))
        if len(inside):
            whole = whole[inside[:, None], inside]
            prior = prior._replace(indices=indices[inside], dense=whole)
    if create_graph:
        return prior
    dense = None if prior.dense is None else prior.dense.detach()
    return prior._replace(diagonal=prior.diagonal.detach(), dense=dense)


def _warn_of_couplings(sites: Sequence[str], layout: Layout, dense_up_to: int) -> None:
    """Warn that of a large prior which couples numbers the diagonal alone counts."""
    numbers = sum(layout.latents[name].size for name in sites)
    if numbers > 1:
        warn(
            f"the prior couples the {numbers} numbers of {', '.join(map(repr, sites[:3]))}"
            f"{' and others' if len(sites) > 3 else ''}, more than the {dense_up_to} that get a "
            "matrix: only the diagonal of its precision counts",
            "large-priors",
        )


def _known_gaussians(
    run: Run, layout: Layout, dense_up_to: int
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


def _curved(
    total: Tensor,
    inputs: list[Tensor],
    create_graph: bool,
    dense_up_to: int,
    separate: Callable[[int], bool],
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Minus the Hessian of a scalar, where it is small, and its diagonal for each input.

    :param separate: whether the scalar is a sum over the entries of an input, by its number.
    """
    sizes = [leaf.numel() for leaf in inputs]
    options: Any = {"retain_graph": True, "materialize_grads": True}
    gradients: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in inputs]
    if total.requires_grad:
        gradients = torch.autograd.grad(total, inputs, create_graph=True, **options)
    if sum(sizes) > dense_up_to:
        pairs = enumerate(zip(gradients, inputs, strict=True))
        return None, [-_own_diagonal(*pair, create_graph, separate(n)) for n, pair in pairs]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    units = torch.eye(len(flat), dtype=flat.dtype, device=flat.device)
    dense = torch.zeros_like(units)
    if flat.requires_grad:
        rows = torch.autograd.grad(
            flat, inputs, units, is_grads_batched=True, create_graph=create_graph, **options
        )
        dense = -torch.cat([row.reshape(len(flat), -1) for row in rows], 1)
    return dense, dense.diagonal().split(sizes)


def _own_diagonal(gradient: Tensor, leaf: Tensor, create_graph: bool, separate: bool) -> Tensor:
    """The diagonal of the matrix d gradient / d leaf, (m,); the matrix times ones, where it is
    diagonal since the entries are ``separate``."""

    def product(vector: Tensor) -> Tensor:
        (result,) = torch.autograd.grad(
            gradient, leaf, vector, retain_graph=True, create_graph=create_graph,
            materialize_grads=True,
        )  # fmt: skip
        return result.reshape(-1)

    if not gradient.requires_grad:
        return torch.zeros_like(leaf).reshape(-1)
    if separate:
        return product(torch.ones_like(leaf))
    entries = []
    for i in range(leaf.numel()):
        unit = torch.zeros_like(leaf)
        unit.view(-1)[i] = 1.0
        entries.append(product(unit)[i])
    return torch.stack(entries)


def independent_normal(site: Site, transform: Any, leaves: Mapping[str, Tensor]) -> Any:
    """The Normal of a site with independent Normals that depend on no other latent; else None."""
    base: Any = base_distribution(site.distribution)
    if transform is not None or name_of(base) != "Normal":
        return None
    if site.mask is not None or masks_of(site.distribution):
        return None
    for tensor in (base.loc, base.scale):
        if reaches(tensor, leaves.values()):
            return None
    return base


def _closed_precisions(run: Run, layout: Layout, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The precisions of sites with independent Normals, scale / sd^2, and of flat densities over
    the reals, 0, with the sites' shapes."""
    result = {}
    for name, site in run.latents.items():
        transform, normal = layout.latents[name].transform, None
        if site.mask is False and transform is None:
            precision = site.value.new_zeros(())
        elif (normal := independent_normal(site, transform, leaves)) is not None:
            sd = normal.scale.reshape(-1)[0] if is_one_number(normal.scale) else normal.scale
            precision = site.scale / sd.square()
        else:
            continue
        result[name] = precision.expand(site.value.shape)
    return result


def is_one_number(values: Tensor) -> bool:
    """Return whether a tensor is one number in memory, expanded."""
    steps = zip(values.shape, values.stride(), strict=True)
    return values.numel() > 0 and all(size == 1 or step == 0 for size, step in steps)


@torch.enable_grad()
def _log_density(
    run: Run, leaves: Mapping[str, Tensor], layout: Layout, names: Collection[str]
) -> Tensor:
    """log p(T(u)) + log |det dT/du| of some sites, with the prior's factors, a scalar in nats."""
    total = next(iter(leaves.values())).new_zeros(())
    for term in run.prior_factors.values():
        total = total + term.log_prob().sum()
    for name, site in run.latents.items():
        if name not in names:
            continue
        total, transform = total + site.log_prob().sum(), layout.latents[name].transform
        if transform is not None:
            total = total + transform.log_abs_det_jacobian(leaves[name], site.value).sum()
    return total


def log_prior(run: Run, leaves: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """log p(T(u)) + log |det dT/du| of all sites, with the prior's factors, a scalar in nats.

    :param run: the program run at ``leaves``.
    """
    return _log_density(run, leaves, layout, layout.latents)


def slope_of_prior(run: Run, leaves: Mapping[str, Tensor], subset: Subset) -> Tensor:
    """The gradient of ``log_prior`` in the subset, (p,)."""
    total, own = log_prior(run, leaves, subset.layout), [leaves[name] for name in subset.parts]
    found: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in own]
    if total.requires_grad:  # others may read the run too
        found = torch.autograd.grad(total, own, retain_graph=True, materialize_grads=True)
    return subset.of_sites(found)


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
