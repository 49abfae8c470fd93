"""Simulation-based calibration: checks that inference is correct on data simulated from the
prior."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_bdl.distributions.moments import observation_mean
from pyro_bdl.errors import warn
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.draws import as_posterior, check_guide, latent_draws
from pyro_bdl.program.observed_arguments import TargetArguments
from pyro_bdl.program.program import Program
from pyro_bdl.program.samples import Samples
from pyro_bdl.program.trace import placeholder_for_observed, record
from pyro_bdl.program.vmap import Draws, map_draws
from pyro_bdl.training.several_targets import GuidesOfTargets
from pyro_bdl.utils.jobs import Job, processes, results_of
from pyro_bdl.utils.module_state import evaluation_mode
from pyro_bdl.utils.precision import double
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import whole_number

if TYPE_CHECKING:
    import pandas as pd

_FEW_LATENTS = 20
_FEW_POINTS = 10
# A p-value below which a histogram is called uneven, and how often one of many may be by chance.
_DOUBTFUL, _BY_CHANCE = 0.01, 0.05
# The median fall of the guides' losses, in nats, in the second half of training without warning.
_SETTLED = 0.5
Quantities = Callable[[Draws], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Calibration:
    """Ranks of the truth among posterior draws, over data sets simulated from the prior.

    If inference is exact, the rank of each quantity is uniform on 0, ..., L.

    :param ranks: ``(R, Q)``, the number of the L draws below the truth, for R simulations.
    :param num_draws: L.
    :param names: the names of the Q quantities.
    """

    ranks: Tensor
    num_draws: int
    names: tuple[str, ...]

    @property
    def probabilities(self) -> Tensor:
        """(rank + 1/2) / (L + 1), ``(R, Q)``: the posterior probability of a value below the
        truth."""
        return (self.ranks + 0.5) / (self.num_draws + 1)

    def counts(self, bins: int | None = None) -> Tensor:
        """Histograms of the ranks, ``(Q, bins)``; the widths of bins differ by at most one rank.

        :raises ValueError: for no bins, or more bins than ranks.
        """
        return self._binned(self.ranks, bins)

    def widths(self, bins: int | None = None) -> Tensor:
        """The number of the L + 1 ranks in each bin, ``(bins,)``."""
        return self._binned(torch.arange(self.num_draws + 1, device="cpu"), bins)

    @property
    def bins(self) -> int:
        """The default number of bins: the largest, up to 20, that divides the number of ranks and
        expects at least five simulations per bin.

        If no number divides it, there is one bin for each rank, or bins of at least four ranks with
        widths that differ by one.
        """
        ranks, most = self.num_draws + 1, max(2, min(20, len(self.ranks) // 5))
        whole = [b for b in range(2, most + 1) if ranks % b == 0]
        if whole and 2 * whole[-1] >= most:
            return whole[-1]
        if ranks <= min(40, len(self.ranks) // 5):
            return ranks
        return max(2, min(most, ranks // 4))

    def band(self, level: float = 0.99, bins: int | None = None) -> tuple[int, int]:
        """Bounds of the count of any bin with probability ``level``, if the ranks are uniform.

        They are quantiles of Binomial(R, share of the ranks) (Talts et al. 2018, section 5.1): the
        lower one for the narrowest bin, the upper one for the widest bin.
        """
        from scipy import stats  # imported when needed, it takes long

        tail = (1 - level) / 2
        shares = double(self.widths(bins)) / (self.num_draws + 1)
        narrow, wide = (stats.binom(len(self.ranks), p.item()) for p in shares.aminmax())
        return int(narrow.ppf(tail)), int(wide.ppf(1 - tail))

    def _binned(self, ranks: Tensor, bins: int | None) -> Tensor:
        """How many of the ranks (R, ...) are in each bin, (..., bins)."""
        most = self.num_draws + 1  # possible ranks
        bins = whole_number(self.bins if bins is None else bins, "bins", most=most)
        return torch.nn.functional.one_hot(ranks * bins // (self.num_draws + 1), bins).sum(0)

    def uniformity(self) -> Tensor:
        """The p-value of a chi-squared test of each histogram, ``(Q,)``."""
        from scipy import stats  # imported when needed, it takes long

        expected = len(self.ranks) * double(self.widths()) / (self.num_draws + 1)
        rows, even = self.counts().tolist(), expected.tolist()
        return torch.tensor(
            [float(stats.chisquare(row, even).pvalue) for row in rows], device="cpu"
        )

    def symmetry(self) -> Tensor:
        """The p-value of Wilcoxon's signed-rank test of p - 1/2, ``(Q,)``; small if the posterior's
        center is biased.

        This is the question of variational simulation-based calibration (Yao et al. 2018, section
        3.2). Their Kolmogorov-Smirnov test of p against 1 - p treats these two as independent.
        """
        from scipy import stats  # imported when needed, it takes long

        columns = (double(self.probabilities.T) - 0.5).cpu().numpy()
        return torch.tensor([float(stats.wilcoxon(p).pvalue) for p in columns], device="cpu")

    def table(self) -> "pd.DataFrame":
        """A row for each quantity with its p-values and a verdict on its histogram.

        The verdicts are at p-values below 0.01, and of many quantities so much smaller that of
        correct inference at most one in twenty tables has a fault (Bonferroni).
        """
        import pandas as pd

        uniform, symmetric = self.uniformity().tolist(), self.symmetry().tolist()
        columns = zip(double(self.probabilities.T), uniform, symmetric, strict=True)
        limit = min(_DOUBTFUL, _BY_CHANCE / (2 * len(self.names)))
        verdicts = [_verdict(*column, limit) for column in columns]
        values = {"uniformity": uniform, "symmetry": symmetric, "verdict": verdicts}
        return pd.DataFrame(values, index=self.names)

    def __repr__(self) -> str:
        return self.table().to_string(float_format="{:.3g}".format)


def _verdict(probabilities: Tensor, uniformity: float, symmetry: float, limit: float) -> str:
    findings = []
    if symmetry < limit:
        findings.append("too low" if probabilities.mean() > 0.5 else "too high")
    if uniformity < limit:
        # 12 mean((u - 1/2)^2) of n uniform u is 1, with a variance of 12^2 / (180 n)
        error = 12 / (180 * len(probabilities)) ** 0.5
        excess = float(12 * (probabilities - 0.5).square().mean() - 1) / error
        if abs(excess) > 3:
            findings.append("too narrow" if excess > 0 else "too wide")
        elif not findings:
            findings.append("uneven")
    return ", ".join(findings) or "calibrated, as far as seen"


def simulation_based_calibration(
    model: Callable,
    inference: Callable[..., Any] | Guide,
    *args: Any,
    quantities: Quantities | None = None,
    num_simulations: int = 200,
    num_draws: int = 99,
    seed: int = 0,
    n_jobs: int | None = None,
    progress: bool | None = None,
    **training: Any,
) -> Calibration:
    """Draw latents w and targets y from the program, infer w from y, and rank the truth.

    For each simulation w ~ p(w) and y ~ p(y | w). If inference is exact, the rank of h(w) among h
    of L posterior draws is uniform for every function h (Talts et al. 2018, theorem 1). Ranks of a
    network's weights are meaningless, since its units can be permuted. By default h are therefore
    the values of the site ``f`` (or of the observation's mean) at up to ten inputs, and the latents
    themselves if they are at most twenty numbers.

    :param model: a program with proper priors, its targets among its arguments.
    :param inference: a function ``(model, *args) -> guide or Samples``; or an untrained guide,
        which is trained on all simulations at once by ``vmap``, from 1,000 steps on in JAX.
    :param training: options of the guide's training, see
        ``training.several_targets.GuidesOfTargets.train``.
    :param args: the program's arguments; keywords by ``functools.partial``. The targets among them
        are replaced by simulated targets of the same shape.
    :param quantities: h, a function from one draw of the latents (site -> value) to named numbers.
    :param num_simulations: R.
    :param num_draws: L. Of ``Samples`` this many draws are taken, evenly spaced; it should not
        exceed the effective sample size.
    :param seed: seed of the simulations; a function starts that of number i from ``seed + 1 + i``.
    :param n_jobs: fits of a function at once, in processes of joblib (-1 for as many as cores),
        with the same result; by default one after another, or as ``joblib.parallel_config`` says.
        The function must then be picklable.
    :raises ValueError: for fewer than 10 simulations, targets that are not arguments, too few
        draws, or draws that are NaN.
    :warns BdlWarning: if guides were still improving when their training ended.
    """
    num_simulations = whole_number(num_simulations, "num_simulations", least=10)
    num_draws, n_jobs = whole_number(num_draws, "num_draws", least=9), processes(n_jobs)
    with evaluation_mode(model, inference), seeded(seed):
        program = Program(model, *args)
        program.require_observed()
        targets = TargetArguments(program)
        targets.require_arguments()
        truths, data = simulate(program, targets, num_simulations)
        h = default_quantities(program, targets) if quantities is None else quantities
        true = _evaluated(h, truths)
        if isinstance(inference, Guide):
            inference.prototype(*program.args, **program.kwargs)
            check_guide(program.latents, inference)
            guides = GuidesOfTargets(model, inference, targets, data)
            _warn_unless_settled(guides.train(progress=progress, **training))
            drawn = guides.sample_latents(num_draws)
        elif training:
            raise TypeError(
                f"the option '{next(iter(training))}' is for training a guide: inference is a "
                "function, which has its own options"
            )

        draws: Iterable[Draws]
        if isinstance(inference, Guide):
            draws = ({n: value[i] for n, value in drawn.items()} for i in range(num_simulations))
        else:
            each = (
                targets.with_values({n: value[i] for n, value in data.items()})[0]
                for i in range(num_simulations)
            )
            jobs = (
                Job(f"simulation {i}", seed + 1 + i, (inference, model, num_draws, simulated))
                for i, simulated in enumerate(each)
            )
            draws = results_of(_inferred, jobs, "simulations", n_jobs=n_jobs, progress=progress)
        ranks = [_ranks(h, true, of_one, i) for i, of_one in enumerate(draws)]
    return Calibration(torch.stack(ranks), num_draws, tuple(true))


@torch.no_grad()
def simulate(program: Program, targets: TargetArguments, count: int) -> tuple[Draws, Draws]:
    """Latents from the prior, site -> (count, *shape), and targets drawn given them."""
    args, kwargs = targets.removed()
    runs = [record(program.model, {}, args, kwargs) for _ in range(count)]
    latents = [one.latents for one in runs]  # observed sites too: without targets

    def stacked(name: str) -> Tensor:
        return torch.stack([one[name].value for one in latents])

    return (
        {name: stacked(name).to(latent.device) for name, latent in program.latents.items()},
        {name: stacked(name) for name in targets.observed},
    )


def default_quantities(program: Program, targets: TargetArguments) -> Quantities:
    """The default h: the function at up to ten inputs, and the latents if they are few."""
    args, kwargs = targets.removed()

    def evaluate(draw: Draws) -> dict[str, Tensor]:
        run = record(program.model, draw, args, kwargs, draw=placeholder_for_observed)
        function = run.deterministic.get("f")
        numbers: dict[str, Tensor] = {}
        if function is not None:
            numbers |= _numbers("f", function, _FEW_POINTS)
        else:
            for name, site in run.observed.items():
                numbers |= _numbers(
                    f"mean of {name}", observation_mean(site.distribution), _FEW_POINTS
                )
        if program.size <= _FEW_LATENTS:
            for name, latent in program.latents.items():
                numbers |= _numbers(name, draw[name], latent.shape.numel())
        return numbers

    return evaluate


def _numbers(name: str, value: Tensor, most: int) -> dict[str, Tensor]:
    flat = value.reshape(-1)
    if len(flat) == 1:
        return {name: flat[0]}
    chosen = list(range(len(flat)))
    if len(flat) > most:
        chosen = [(i * (len(flat) - 1)) // (most - 1) for i in range(most)]
    return {f"{name}[{i}]": flat[i] for i in chosen}


@torch.no_grad()
def _evaluated(h: Quantities, draws: Draws) -> dict[str, Tensor]:
    return map_draws(lambda draw: dict(h(draw)), draws)


def _ranks(h: Quantities, true: Mapping[str, Tensor], draws: Draws, simulation: int) -> Tensor:
    """The rank of each truth.

    Among draws that equal the truth the rank is chosen at random, which keeps the ranks of discrete
    quantities uniform.

    Source: Modrak et al. (2023), Simulation-based calibration checking for Bayesian computation.
    """
    drawn, ranks = _evaluated(h, draws), []
    for name in true:
        values, truth = drawn[name], true[name][simulation]
        if values.isnan().any():
            raise ValueError(f"draws of '{name}' are NaN in simulation {simulation}")
        ties = int((values == truth).sum())
        chosen = int(torch.randint(ties + 1, (), device="cpu")) if ties else 0
        ranks.append((values < truth).sum() + chosen)
    return torch.stack(ranks)


def _warn_unless_settled(losses: Tensor) -> None:
    """Warn if the guides' training has not converged.

    :param losses: ``(steps, D)``, from training with a falling learning rate.
    """
    tenth = max(1, len(losses) // 10)
    middle = losses[len(losses) // 2 - tenth : len(losses) // 2 + 1].mean(0)
    fall = (middle - losses[-tenth:].mean(0)).median().item()
    if not fall <= _SETTLED:
        warn(
            f"the guides' losses still fell by {fall:.2g} nats (median) in the second half of "
            f"their training of {len(losses)} steps: the ranks may show unfinished training and "
            "not the guide's family; give it more steps, such as "
            f"steps={5 * len(losses)}",
            "unfinished-training",
        )


def _inferred(inference: Callable[..., Any], model: Callable, num_draws: int, args: tuple) -> Draws:
    """Draws of the posterior that a function infers from one simulation's data."""
    with evaluation_mode(model):
        return _draws_of(as_posterior(inference(model, *args), model, args), num_draws, args)


def _draws_of(posterior: Any, num_draws: int, args: Sequence[Any]) -> Draws:
    if isinstance(posterior, Samples):
        total = posterior.num_chains * posterior.num_draws
        if total < num_draws:
            raise ValueError(
                f"the posterior has {total} draws, fewer than the num_draws={num_draws} asked for"
            )
    return latent_draws(posterior, num_draws, *args)
