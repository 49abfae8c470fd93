"""``compare``: posteriors of one program side by side, and their distances to a reference."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.evaluate import Evaluation, evaluate_in
from pyro_bdl.comparison.leave_one_out import KFold
from pyro_bdl.comparison.observe import PredictiveDraws
from pyro_bdl.comparison.setting import Setting
from pyro_bdl.comparison.table import Comparison, compare_evaluations
from pyro_bdl.errors import UnusableDrawsError
from pyro_bdl.program.rows import rows_of
from pyro_bdl.utils.validation import require


def compare(
    model: Callable,
    posteriors: Mapping[str, Any],
    *test: Any,
    reference: str | None = "nuts",
    train: tuple[Any, ...] | None = None,
    ood: Any = None,
    num_samples: int = 1000,
    batch_norm_data: Any = None,
    costs: Mapping[str, Costs] | None = None,
    left_out: Mapping[str, KFold] | None = None,
    units: tuple[float, float] = (1.0, 0.0),
    observed: str | Collection[str] | None = None,
    latents: str | Collection[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Comparison:
    """Score posteriors of a program on test data, and measure their distance to a reference.

    Distances are in function space, between draws at up to 1000 of the test inputs, each with its
    Monte Carlo error. The draws are of the site ``f``, or of the observation's mean if there is no
    such site, or of the class probabilities. The last row of the table compares two halves of the
    reference's draws: a smaller distance may be zero. The same seed gives the same
    table, but for times.

    If the program observes one joint distribution over all rows, NLPD is the joint one, divided by
    the number of rows. All other scores use each row's marginal distribution, and there is no
    leave-one-out. If also the mean of this distribution does not depend on the latents, as for a
    Gaussian process whose function is integrated out, distances are between draws of the target,
    and R-hat and ESS are those of its log density.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLaplaceGGN(model)
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> posteriors = {"MAP": guide, "Laplace": guide.laplace_approximation((x, y))}
        >>> comparison = bdl.compare(model, posteriors, x, y, reference="Laplace")
        >>> list(comparison.table.index)  # print(comparison) shows it all
        ['Laplace', 'MAP', 'Laplace, half to half']

    :param model: a Pyro program, called with ``*test`` and, to predict, with None for the targets.
        All data run at once where its rows need each other, as the nodes of a graph: it says so by
        an attribute, ``model.rows = "together"``, or a Laplace approximation among the posteriors.
        The numbers of several observed sites are scored together, each given the data before it:
        see :mod:`pyro_bdl.comparison.kind`. Give them like units.
    :param posteriors: name to guide (Pyro's own guides too), ``Samples``, an ``MCMC`` of Pyro or
        NumPyro, a dict of draws, or ``PredictiveDraws`` if only predictions are known. A posterior
        of another program, such as one with another noise or prior, is given with it,
        ``(program, posterior)``, and scored under it. A list holds several runs of one method, such
        as guides of other training seeds: its numbers are means over them, and the errors hold
        their differences, which are not in the number of a single run.
    :param test: the test inputs and, last, the targets, each ``(N, ...)``, or dicts of tensors. A
        program of targets alone gets these. In their place a loader or a list of batches, which
        are held in memory together, as ``train`` and ``ood`` may be too. Targets that the program's
        masks leave out count in no score, and a note says how many there are; nor does a
        ``pyro.factor``.
    :param reference: name of the posterior with which the others are compared; None for no
        reference.
    :param train: the inputs and, last, the targets that the posteriors were fitted to. They are
        used for leave-one-out, for the prior sensitivity of named latents of chains, and to sort
        test inputs into near, between and beyond the training inputs.
    :param ood: out-of-distribution inputs, to score how well the uncertainty separates them from
        the test inputs.
    :param num_samples: draws of each guide, at least 2, and of an ensemble so many less that each
        member comes as often; of ``Samples`` all draws are used.
    :param batch_norm_data: the training data, ``(x, y)`` or an iterable of batches, for networks
        with BatchNorm: each draw gets its own running statistics, as in ``Predictive``. The linear
        model of a Laplace approximation keeps the network's statistics.
    :param costs: name to ``Costs``: time and memory of the fit, ELBO and evidence, if known.
    :param left_out: name to the result of ``k_fold``, which is shown in place of PSIS-LOO.
    :param units: (scale, shift): the target in its own units is ``y * scale + shift``; a regression
        is reported in its own units.
    :param observed: names of the observed sites that are scored, as ("y", "z"); all by default.
    :param latents: names of the latent sites that are compared too; by default those that are no
        weights of a network, of which at most 1000 numbers. A posterior with one that is far from
        the reference's is far, and ``Comparison.latents`` has all of them.
    :param seed: seed of the guides' draws and the noise of predictions.
    :param progress: show bars, in terminals and notebooks, for what takes longer than a second.
    :raises TypeError: for a value that is not a posterior, or data that are not tensors.
    :raises UnusableDrawsError: if draws of a posterior, or their predictions, are NaN or infinite;
        the error names the posterior and counts the draws.
    :raises ValueError: for no posterior, an unknown reference, no observed site, a posterior of
        another program (the error lists the sites that do not match), or data that do not fit or
        are not finite.
    """
    require(posteriors, Mapping, "posteriors must be a mapping from names to guides or Samples")
    if not posteriors:
        raise ValueError("posteriors is empty: give at least one guide or Samples by name")
    names = ", ".join(map(repr, posteriors))
    costs, left_out = costs or {}, left_out or {}
    by_name = (("costs", costs), ("left_out", left_out))
    for what, name in (
        ("reference", reference),
        *((w, n) for w, names_ in by_name for n in names_),
    ):
        if name is not None and name not in posteriors:
            raise ValueError(
                f"{what} {name!r} is not among the posteriors ({names}): name one of them, or say "
                f"{what}=None"
            )
    runs = {name: q if isinstance(q, list) else [q] for name, q in posteriors.items()}
    said = (rows_of(model, q) for several in runs.values() for q in several)
    rows = "together" if "together" in said else None
    read = partial(
        Setting.read, test=test, train=train, ood=ood, units=units, num_samples=num_samples,
        batch_norm_data=batch_norm_data, sites=observed, latents=latents, rows=rows,
        seed=seed, progress=progress,
    )  # fmt: skip
    plain = [q for several in runs.values() for q in several if not isinstance(q, tuple)]
    setting: Setting | None = None
    if plain:
        setting = read(model, next((q for q in plain if not isinstance(q, PredictiveDraws)), None))
    evaluations: dict[str, list[Evaluation]] = {name: [] for name in runs}
    for name, posterior in ((name, run) for name, several in runs.items() for run in several):
        try:
            its = setting
            if isinstance(posterior, tuple):
                program, posterior = _program_and_posterior(posterior)
                its = read(program, posterior)
            assert its is not None
            spent = costs.get(name, Costs())
            evaluations[name].append(evaluate_in(its, posterior, spent, left_out.get(name)))
        except UnusableDrawsError as error:
            raise UnusableDrawsError(f"posterior {name!r}: {error}", name) from error
        except (TypeError, ValueError) as error:
            raise type(error)(f"posterior {name!r}: {error}") from error
    return compare_evaluations(evaluations, reference, progress=progress)


def _program_and_posterior(pair: tuple) -> tuple[Callable, Any]:
    """A posterior with its own program.

    :raises TypeError: for another tuple.
    """
    if len(pair) != 2 or not callable(pair[0]):
        raise TypeError(
            "a tuple among the posteriors is (program, posterior), the program that the posterior "
            f"is scored under first; got {len(pair)} parts"
        )
    program, posterior = pair
    return program, posterior
