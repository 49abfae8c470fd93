"""The columns of a comparison's table: what each number is, and in which units."""

from dataclasses import replace

from pyro_bdl.table import Column


def columns(task: str, reference: str | None) -> list[Column]:
    """The columns for ``"regression"`` or ``"classification"``, in order."""
    numbers = task == "regression"
    groups = {
        "": _COST,
        "test data": _NUMBER_SCORES if numbers else _CLASS_SCORES,
        f"distance to {reference}": _NUMBER_DISTANCES if numbers else _CLASS_DISTANCES,
        "Markov chains": _CHAINS,
    }
    return [
        replace(column, group=group)
        for group, members in groups.items()
        if reference is not None or members not in (_NUMBER_DISTANCES, _CLASS_DISTANCES)
        for column in members
    ]


_COST = (
    Column("posterior", "posterior", style="text"),
    Column("seconds", "seconds", help="Wall-clock time of the fit."),
    Column(
        "elbo",
        "ELBO",
        digits=4,
        help="Evidence lower bound at temperature 1, in nats, on the training data as the program "
        "sees them; larger is better.",
    ),
    Column(
        "log_evidence",
        "log evid.",
        digits=4,
        help="Log evidence of a Laplace approximation, in nats, at its own prior scale; of a part "
        "of the weights, given the others. Larger is better.",
    ),
)
_NLPD = Column(
    "nlpd",
    "NLPD",
    help="Negative log predictive density per datum, in nats; smaller is better.",
)
_NUMBER_SCORES = (
    Column("rmse", "RMSE", help="Root mean square error of the mean, in units of the target."),
    _NLPD,
    Column(
        "crps",
        "CRPS",
        help="Continuous ranked probability score, in units of the target; smaller is better.",
    ),
    Column(
        "coverage",
        "in 90 %",
        style="percent",
        help="Share of the targets inside the central 90 % interval; less is overconfident.",
    ),
)
_CLASS_SCORES = (
    Column("accuracy", "accuracy", style="percent", help="Share of the classes predicted right."),
    _NLPD,
    Column("brier", "Brier", help="Squared error of the class probabilities, from 0 (best) to 2."),
    Column(
        "ece",
        "ECE",
        style="percent",
        help="Expected calibration error, in 15 bins: how far confidence is from accuracy.",
    ),
)
_SD_RATIO = Column(
    "sd_ratio",
    "sd ratio",
    help="The function's sd, averaged over the test points, divided by the reference's; less than "
    "1 is overconfident.",
)
_NUMBER_DISTANCES = (
    Column(
        "mean_error",
        "mean",
        help="Difference of the function's means, root mean square over the test points, in units "
        "of the target.",
    ),
    Column(
        "sd_error",
        "sd",
        help="Difference of the function's sds, root mean square over the test points, in units "
        "of the target.",
    ),
    Column(
        "wasserstein",
        "W1",
        help="Wasserstein-1 distance of the function's distributions, averaged over the test "
        "points, in units of the target. The last line holds one half of the reference's draws "
        "against the other: a smaller distance cannot be told from none.",
    ),
    _SD_RATIO,
)
_CLASS_DISTANCES = (
    Column(
        "agreement",
        "agree",
        style="percent",
        help="Share of the test points at which the same class is the most probable. The last "
        "line holds one half of the reference's draws against the other: no better can be seen.",
    ),
    Column(
        "total_variation",
        "TV",
        help="Total variation distance of the predicted distributions, from 0 (equal) to 1.",
    ),
    Column(
        "sd_error",
        "sd",
        help="Difference of the class probabilities' sds over the posterior, root mean square.",
    ),
    Column(
        "wasserstein",
        "W1",
        help="Wasserstein-1 distance of the class probabilities' distributions over the "
        "posterior, averaged over test points and classes.",
    ),
    _SD_RATIO,
)
_CHAINS = (
    Column(
        "rhat",
        "R-hat",
        digits=4,
        help="Largest R-hat of the function at the test points; above 1.01 the chains disagree.",
    ),
    Column(
        "ess_min",
        "min ESS",
        help="Smallest effective sample size of the function at the test points, in draws.",
    ),
    Column(
        "ess_median",
        "ESS",
        help="Median effective sample size of the function at the test points, in draws.",
    ),
    Column("divergences", "div.", help="Draws at which the integrator diverged."),
)
