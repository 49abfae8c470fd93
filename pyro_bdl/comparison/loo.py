"""Leave-one-out of a program's posterior, with what mends the data where PSIS fails."""

from collections.abc import Callable
from typing import Any, Literal, cast

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_bdl.comparison.kind import Kind, Seen, observed
from pyro_bdl.comparison.leave_one_out import without_fold
from pyro_bdl.comparison.observe import Block, log_densities, observe
from pyro_bdl.comparison.setting import arguments_of
from pyro_bdl.diagnostics.loo import LOO, leave_out, left_out_columns, total
from pyro_bdl.diagnostics.moment_matching import Density, moment_matched
from pyro_bdl.diagnostics.psis import good_k, psis
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.draws import as_posterior, log_densities_of
from pyro_bdl.metrics import pit
from pyro_bdl.predictive.sampled import Predictive
from pyro_bdl.program.batches import leading_size
from pyro_bdl.program.program import Program
from pyro_bdl.program.rows import rows_of
from pyro_bdl.program.samples import Samples
from pyro_bdl.program.trace import Run
from pyro_bdl.utils.jobs import Job, processes, results_of
from pyro_bdl.utils.module_state import device_of, evaluation_mode
from pyro_bdl.utils.progress import progress_bar
from pyro_bdl.utils.random_state import checked_seed, seeded
from pyro_bdl.utils.validation import one_of, require

_FACTOR = "loo_mixture"


class _LooMixture(nn.Module):
    """A program with one more factor, of ``loo_mixture``."""

    def __init__(self, model: Callable, kind: Kind, seen: Seen | None) -> None:
        super().__init__()
        self.model, self.kind = model, kind
        self._seen = None if seen is None else seen.counts > 0

    def forward(self, *args: Any) -> Any:
        with poutine.trace() as traced:
            result = self.model(*args)
        run = Run()
        for node in traced.trace.nodes.values():
            if node["type"] == "sample" and not site_is_subsample(node):
                run.add(node)
        sites = {n: run.observed[n].unscaled_log_prob()[None] for n in self.kind.sites}
        density = self.kind.densities(sites)[0]
        if self.kind.is_scaled:
            density = density * self.kind.powers_in(run).to(density)
        if self._seen is not None:
            density = density[self._seen.to(density.device)]
        pyro.factor(_FACTOR, (-density).logsumexp(0))
        return result


def loo_mixture(model: Callable, *data: Any) -> nn.Module:
    """The program whose posterior is the mixture of those without one datum each, for ``loo``::

        p(w, y) sum_n 1 / p(y_n | w)

    A tempered program has the power of p(y_n | w) in both factors.

    Importance weights of its draws to each of the mixed posteriors are bounded, so that their
    variances are finite, whatever the number of latents and however influential the datum::

        mixture = bdl.loo_mixture(model, x, y)
        bdl.loo(mixture, bdl.mcmc.sample(mixture, x, y, num_chains=4), x, y)

    :param data: all the data, the targets last; they are left out one at a time.
    :raises UnsupportedProgramError: if no datum has a density of its own, or the program has
        discrete latents that are summed out.
    :raises ValueError: if masks leave out all data, or the program states more data than these.

    Source: Silva & Zanella (2023), Robust leave-one-out cross-validation for high-dimensional
    Bayesian models, equations 7 and 8.
    """
    args = arguments_of("data", data, model, device=device_of(model))
    program, run = Program.with_run(model, args, {})
    _check_all(run, "loo_mixture")
    if program.discrete:
        raise UnsupportedProgramError(
            f"loo_mixture has no densities of single data where discrete sites "
            f"({', '.join(program.discrete)}) are summed out: use loo, or k_fold"
        )
    kind, _, seen, *_ = observed(model, args, None, rows=rows_of(model))
    if kind.no_single:
        raise UnsupportedProgramError(f"{kind.no_single}: no datum can be left out")
    if seen is not None and not seen.numbers.any():
        raise ValueError("masks leave out all data, and there is none to be left out one at a time")
    return _LooMixture(model, kind, seen)


def _check_all(run: Run, name: str) -> None:
    """Check that a run has all the data that its plates state.

    :param name: what needs them, for the message.
    """
    for site, statement in run.observed.items():
        if statement.subsampling != 1:
            raise ValueError(
                f"{name} needs all the data, and the program states {statement.subsampling:.6g} "
                f"times as many at the site {site!r} (num_data, or a plate's size) as it is given "
                "or draws: pass all of them to a program that takes all"
            )


def loo(
    model: Callable,
    posterior: Any,
    *data: Any,
    method: Literal["psis", "moment_matching"] = "psis",
    refit: Callable[..., Any] | None = None,
    seed: int = 0,
    n_jobs: int | None = None,
    progress: bool | None = None,
) -> LOO:
    """Leave-one-out of a program from draws of chains, also where single data have a high k-hat.

    :param model: the program, or ``loo_mixture`` of it, where the draws are of that.
    :param posterior: ``Samples``, an MCMC after its run, or a dict of draws, given all the data.
    :param data: the inputs and, last, the targets, or in their place a loader or a list of batches.
    :param method: ``"psis"`` as ``diagnostics.loo``; ``"moment_matching"`` moves the draws, where
        k-hat is above ``good_k``, to the posterior without the datum (Paananen et al. 2021), by
        some ten to a hundred evaluations of the program at all draws for each such datum.
    :param refit: ``fit(*inputs, y)`` as of ``k_fold``, called without the row of each datum whose
        k-hat is still too high; it then is that of the mean of p(y_n | w) over the new draws, which
        an outlier can leave too high, and the new value is taken if it is lower.
    :param seed: of the predictions of ``LOO.pit``; the refit without row n starts from ``seed +
        n``; ``n_jobs`` as in ``k_fold``.
    :raises TypeError: for a guide, whose draws are not of the posterior.
    :raises UnsupportedProgramError: if no datum has a density of its own, or with ``refit`` rows
        hold several data.
    :warns BdlWarning: if a k-hat lies above ``good_k``.
    """
    one_of(method, "method", ("psis", "moment_matching"))
    seed, n_jobs = checked_seed(seed), processes(n_jobs)
    if isinstance(model, _LooMixture) and method != "psis":
        raise ValueError(f"method={method!r} is of draws of the posterior, not of loo_mixture")
    own = model.model if isinstance(model, _LooMixture) else model
    args = arguments_of("data", data, own, device=device_of(own))
    samples = as_posterior(posterior, model, args)
    advice = ": compare corrects a guide's draws by p / q, and k_fold fits it again"
    require(samples, Samples, "loo needs draws of the posterior from chains", advice)
    return total(*_columns(model, samples, args, method, refit, seed, n_jobs, progress))


@torch.no_grad()
def _columns(
    model: Callable,
    samples: Samples,
    args: tuple,
    method: str,
    refit: Callable[..., Any] | None,
    seed: int,
    n_jobs: int | None,
    progress: bool | None,
) -> tuple[Tensor, Tensor, float, Tensor | None]:
    """The columns of ``leave_out``, log p(y_n | draw) ``(chains, draws, N)``, the standard error
    over the draws of the refits, and the PITs."""
    count = samples.num_chains * samples.num_draws
    is_mixture = isinstance(model, _LooMixture)
    model = model.model if isinstance(model, _LooMixture) else model
    kind, y, seen, bounds, powers = observed(model, args, samples, draws=count, rows=rows_of(model))
    if kind.no_single:
        raise UnsupportedProgramError(f"{kind.no_single}: no datum can be left out")
    if _FACTOR in kind.factors:
        raise ValueError(
            "the program is loo_mixture under a handler: apply the handler first, as in "
            "loo_mixture(temper(model, T), x, y)"
        )
    parts, densities, transforms = [], [], []
    if powers is not None and seen is not None:
        powers = powers[(seen.counts > 0).to(powers.device)]
    predictive, mixed = Predictive(model, samples), torch.zeros((), device="cpu")
    for part, batch in kind.batches(args, count):
        parts.append((part, None if seen is None else seen.at(batch)))
    if is_mixture:  # log sum_n 1 / p(y_n | w)
        found = torch.cat([log_densities(predictive, kind, *part) for part in parts], 1)
        mixed = _powered(-found, powers).logsumexp(1, keepdim=True)
    start = 0
    with seeded(seed):
        for (part, of_part), (_, batch) in zip(parts, kind.batches(args, count), strict=True):
            ends = None if bounds is None else bounds[:, batch]
            block = observe(predictive, kind, part, y[batch], of_part, ends)
            densities.append(cast(Tensor, block.log_density))
            end = start + densities[-1].shape[1]
            of_block = None if powers is None else powers[start:end]
            transforms.append(_pit(block, mixed, samples.num_chains, of_block))
            start = end
    known = [value for value in transforms if value is not None]
    log_likelihood = torch.cat(densities, 1)
    draws = log_likelihood.unflatten(0, (samples.num_chains, samples.num_draws))
    columns = left_out_columns(draws, powers=powers)
    if is_mixture:
        ratios = _powered(-log_likelihood, powers) - mixed
        columns = leave_out(log_likelihood.T, ratios.T, 1.0, -mixed.T)
    limit, of_all = good_k(count), 4 + (len(columns) - 4) // 2  # with datum n from there on
    if method == "moment_matching":
        with evaluation_mode(model, samples):
            program, run = Program.with_run(model, args, {})
            _check_all(run, "moment matching")
            vectors = program.unconstrain(samples.flat())
            log_joint, _ = log_densities_of(program, None, samples)
            bad = (columns[2] > limit).nonzero().flatten().tolist()
            for n in progress_bar(bad, "moment matching", progress):
                of_datum = _density(model, program, kind, parts, densities, n)
                own = log_likelihood[:, n]
                power = 1.0 if powers is None else float(powers[n])
                column = moment_matched(vectors, log_joint, own, of_datum, power=power)
                if column is not None:
                    columns[0, n], columns[2:of_all, n] = column[0], column[2:of_all]
    variance = 0.0
    bad = (columns[2] > limit).nonzero().flatten().tolist()
    if refit is not None and bad:
        rows = leading_size(args)
        if not kind.by_rows or log_likelihood.shape[1] != rows:
            raise UnsupportedProgramError(
                f"refit leaves out rows, but the {rows} rows hold {log_likelihood.shape[1]} data "
                "that were seen: use k_fold"
            )
        every = torch.arange(rows, device=log_likelihood.device)
        jobs = (
            Job(f"the fit without row {n}", seed + n, (refit, args, every == n, count)) for n in bad
        )
        results = results_of(without_fold, jobs, "refits", n_jobs=n_jobs, progress=progress)
        for n, (left_out, over_draws, _, k) in zip(bad, results, strict=True):
            if not k[0] >= columns[2, n]:
                columns[0, n], columns[2, n] = left_out[0], k[0]
                columns[3, n], columns[4:of_all, n] = 0.0, left_out[0]  # by draws of its own
                variance += over_draws**2
    return columns, draws, variance**0.5, torch.cat(known) if known else None


def _powered(log_densities: Tensor, powers: Tensor | None) -> Tensor:
    """Log densities ``(S, N)`` times the powers of the data, ``(N,)``."""
    return log_densities if powers is None else log_densities * powers.to(log_densities.device)


def _pit(block: Block, mixed: Tensor, chains: int, powers: Tensor | None) -> Tensor | None:
    """The PITs of a batch's numbers without each of them; None of classes, and where a datum has
    several numbers.

    :param mixed: log sum_n 1 / p(y_n | w) of draws of the mixture, ``(S, 1)``; 0 of others.
    :param powers: of the batch's likelihoods, ``(n,)``.
    """
    density = cast(Tensor, block.log_density)
    if block.draws is None or block.y is None:
        return None
    draws = block.draws.flatten(1)
    ends = (block.y, block.y) if block.bounds is None else block.bounds
    low, end = (values.flatten() for values in ends)
    if block.seen is not None:
        cells = block.seen.flatten()
        draws, low, end = draws[:, cells], low[cells], end[cells]
    if draws.shape != density.shape:
        return None
    ratios = (_powered(-density, powers) - mixed.to(density)).unflatten(0, (chains, -1))
    weights = psis(ratios).log_weights.flatten(0, 1)
    return pit(draws, low, upper=end, log_weights=weights)


def _density(
    model: Callable,
    program: Program,
    kind: Kind,
    parts: list[tuple],
    densities: list[Tensor],
    n: int,
) -> Density:
    """The log joint, and the log likelihood of datum n by a run on its part of the data."""
    place = 0
    while n >= densities[place].shape[1]:
        n, place = n - densities[place].shape[1], place + 1

    def density(vectors: Tensor) -> tuple[Tensor, Tensor]:
        latents, _ = program.constrain(vectors)
        samples = Samples({site: value[None] for site, value in latents.items()})
        log_joint, _ = log_densities_of(program, None, samples)
        likelihood = kind.densities(Predictive(model, samples).log_likelihood(*parts[place][0]))
        seen = parts[place][1]
        if seen is not None:
            likelihood = likelihood[:, (seen.counts > 0).to(likelihood.device)]
        return log_joint, likelihood[:, n]

    return density
