"""The columns of a comparison's table: what each number is, and in which units."""

from dataclasses import replace

from pyro_bdl.utils.tables import Column


def columns(task: str, reference: str | None) -> list[Column]:
    """What the table shows for ``"regression"`` or ``"classification"``, in order.

    :param reference: heading of the reference's columns, None without one.
    """
    numbers = task == "regression"
    return _grouped(
        {
            "": _COST,
            "test data": _NUMBER_SCORES if numbers else _CLASS_SCORES,
            f"distance to {reference}": _NUMBER_DISTANCES if numbers else _CLASS_DISTANCES,
            "leave one out": _LOO if reference is None else (*_LOO, _LOO_DIFFERENCE),
            "Markov chains": _CHAINS,
        },
        reference,
    )


def details(task: str, reference: str | None) -> list[Column]:
    """Further columns, in the order of their groups."""
    numbers = task == "regression"
    return _grouped(
        {
            "costs": _FURTHER_COSTS,
            "calibration": _NUMBER_CALIBRATION if numbers else _CLASS_CALIBRATION,
            "uncertainty": _NUMBER_UNCERTAINTY if numbers else _CLASS_UNCERTAINTY,
            f"distance to {reference}": _FURTHER_DISTANCES,
            f"sd ratio to {reference}": _REGIONS,
            "leave one out": _FURTHER_LOO,
        },
        reference,
    )


def _grouped(groups: dict[str, tuple[Column, ...]], reference: str | None) -> list[Column]:
    return [
        replace(column, group=group)
        for group, members in groups.items()
        if reference is not None or not group.endswith(" to None")
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
    error="sd_ratio_se",
    help="The function's sd, averaged over the test points, divided by the reference's, with its "
    "Monte Carlo error; less than 1 is overconfident.",
)
_NUMBER_DISTANCES = (
    Column(
        "mean_error",
        "mean",
        error="mean_error_se",
        help="Difference of the function's means, root mean square over the test points, in units "
        "of the target, with its Monte Carlo error.",
    ),
    Column(
        "sd_error",
        "sd",
        error="sd_error_se",
        help="Difference of the function's sds, root mean square over the test points, in units "
        "of the target, with its Monte Carlo error.",
    ),
    Column(
        "wasserstein",
        "W1",
        error="wasserstein_se",
        help="Wasserstein-1 distance of the function's distributions, averaged over the test "
        "points, in units of the target, with its Monte Carlo error. The last line holds one half "
        "of the reference's draws against the other: a smaller distance cannot be told from none.",
    ),
    _SD_RATIO,
)
_CLASS_DISTANCES = (
    Column(
        "agreement",
        "agree",
        style="percent",
        error="agreement_se",
        help="Share of the test points at which the same class is the most probable, with its "
        "Monte Carlo error. The last line holds one half of the reference's draws against the "
        "other: no better can be seen.",
    ),
    Column(
        "total_variation",
        "TV",
        error="total_variation_se",
        help="Total variation distance of the predicted distributions, from 0 (equal) to 1, with "
        "its Monte Carlo error.",
    ),
    Column(
        "sd_error",
        "sd",
        error="sd_error_se",
        help="Difference of the class probabilities' sds over the posterior, root mean square, "
        "with its Monte Carlo error.",
    ),
    Column(
        "wasserstein",
        "W1",
        error="wasserstein_se",
        help="Wasserstein-1 distance of the class probabilities' distributions over the "
        "posterior, averaged over test points and classes, with its Monte Carlo error.",
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

_LOO = (
    Column(
        "elpd_loo",
        "elpd",
        digits=4,
        error="elpd_loo_se",
        help="Expected log predictive density of the training data, each left out in turn by "
        "PSIS-LOO, summed, in nats as the program sees them, with its standard error over the "
        "data; larger is better.",
    ),
    Column(
        "high_k",
        "high k",
        help="Training data whose k-hat is too high for PSIS-LOO to be relied on.",
    ),
    Column(
        "loo_by",
        "by",
        style="text",
        help="What the draws were taken for: draws of the posterior from Markov chains; draws of a "
        "guide, mended by p / q; a guide's draws, or a linear model's, as they are (plain). What "
        "was fitted to all data, such as the features of a last layer, is left as it is by the "
        "plain ones: they are too good.",
    ),
)
_LOO_DIFFERENCE = Column(
    "elpd_diff",
    "difference",
    error="elpd_diff_se",
    help="elpd minus the reference's, with the standard error of the difference.",
)
_FURTHER_LOO = (Column("p_loo", "p", help="Effective number of parameters by PSIS-LOO."),)
_FURTHER_COSTS = (
    Column(
        "draw_seconds",
        "s / draw",
        help="Wall-clock time of one predictive draw at all test points.",
    ),
    Column(
        "numbers",
        "numbers",
        help="How many numbers the posterior consists of: variational parameters, or all draws.",
    ),
    Column("memory", "MiB", help="Most memory that the fit took beyond what was in use before."),
)
_NUMBER_CALIBRATION = (
    Column(
        "coverage_50",
        "in 50 %",
        style="percent",
        help="Share of the targets inside the central 50 % interval; less is overconfident.",
    ),
    Column(
        "coverage_from",
        "90 % from",
        style="percent",
        help="The coverage of the 90 % interval is less than this once in forty times where the "
        "targets follow from one of the posterior's own functions: then the interval is right.",
    ),
    Column(
        "coverage_to",
        "90 % to",
        style="percent",
        help="And more than this once in forty times.",
    ),
    Column(
        "coverage_95",
        "in 95 %",
        style="percent",
        help="Share of the targets inside the central 95 % interval; less is overconfident.",
    ),
    Column(
        "pit",
        "PIT",
        help="Kolmogorov-Smirnov distance of the probability integral transforms from uniform; of "
        "N independent targets and a calibrated posterior above 1.36 / sqrt(N) once in twenty "
        "times.",
    ),
)
_CLASS_CALIBRATION = (
    Column(
        "ace",
        "adaptive ECE",
        style="percent",
        help="Calibration error in 15 bins that hold equally many test points.",
    ),
)
_AUROC = Column(
    "auroc",
    "AUROC",
    help="Probability that the predictive uncertainty is higher at an input from elsewhere than at "
    "a test input; 0.5 cannot tell them apart.",
)
_AUROC_EPISTEMIC = Column(
    "auroc_epistemic", "epist. AUROC", help="The same by the epistemic part of the uncertainty."
)
_NUMBER_UNCERTAINTY = (
    Column(
        "aleatoric",
        "aleatoric",
        help="The sd of the noise, root mean square over the test points, in units of the target.",
    ),
    Column(
        "epistemic",
        "epistemic",
        help="The sd of the mean prediction over the posterior, root mean square over the test "
        "points, in units of the target. The squares of both parts add up to the variance.",
    ),
    _AUROC,
    _AUROC_EPISTEMIC,
)
_CLASS_UNCERTAINTY = (
    Column(
        "aleatoric",
        "aleatoric",
        help="Mean entropy of the classes given the weights, in nats.",
    ),
    Column(
        "epistemic",
        "epistemic",
        help="Mutual information of class and weights, in nats; both add up to the entropy.",
    ),
    _AUROC,
    _AUROC_EPISTEMIC,
)
_FURTHER_DISTANCES = (
    Column(
        "wasserstein2",
        "W2",
        error="wasserstein2_se",
        help="Wasserstein-2 distance of the function's distributions, root mean square over the "
        "test points, in the function's units.",
    ),
    Column(
        "energy",
        "energy",
        error="energy_se",
        help="Energy distance of the functions at all test points together, unbiased, in the "
        "function's units; by chance below 0 where there is none.",
    ),
    Column(
        "mmd",
        "MMD²",
        error="mmd_se",
        help="Squared maximum mean discrepancy of the functions at all test points together, "
        "unbiased; Gaussian kernel, as wide as the median distance of the reference's draws.",
    ),
    Column(
        "kl",
        "KL",
        error="kl_se",
        help="KL divergence from the reference's predictive distribution, in nats per test point; "
        "of numbers between the Normals with their means and variances.",
    ),
    Column(
        "khat_high",
        "k > 0.7",
        style="percent",
        help="Share of the test points at which k-hat of the function's distribution against the "
        "reference's is above 0.7: at a common mean the sd is less than about half.",
    ),
)
_REGIONS = (
    Column(
        "sd_ratio_near",
        "near",
        help="sd ratio at the test inputs near training inputs.",
    ),
    Column(
        "sd_ratio_between",
        "between",
        help="sd ratio at the test inputs between training inputs, far from all of them.",
    ),
    Column(
        "sd_ratio_beyond",
        "beyond",
        help="sd ratio at the test inputs beyond the training inputs, far from all of them.",
    ),
)
