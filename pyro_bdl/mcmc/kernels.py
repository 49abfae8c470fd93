"""The kernels of ``mcmc.sample``, each with its own options."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from pyro_bdl.utils import bibliography
from pyro_bdl.utils.validation import real_number, whole_number

if TYPE_CHECKING:
    from pyro_bdl.mcmc.chains import Plan
    from pyro_bdl.mcmc.run import Transition

LONGEST = 2 * np.pi  # of HMC's drawn lengths: once around a Normal in its own metric


def _metric(value: Any, name: str) -> np.ndarray:
    metric = torch.as_tensor(value, device="cpu").detach().numpy()
    variances = metric if metric.ndim < 2 else metric.diagonal()
    if not (np.isfinite(metric).all() and (variances > 0).all()):
        raise ValueError(f"{name} must hold finite numbers, and positive variances")
    if metric.ndim == 2 and not _is_covariance(metric.astype(np.float64)):
        raise ValueError(f"{name} must be symmetric and positive definite, as a covariance is")
    return metric


def _is_covariance(matrix: np.ndarray) -> bool:
    if (
        len(matrix) != len(matrix.T)
        or np.abs(matrix - matrix.T).max() > 1e-3 * np.abs(matrix).max()
    ):
        return False
    try:
        np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return True


class Options:
    """A frozen dataclass whose fields are checked, and turned into numbers, by their names."""

    papers: ClassVar[tuple[str, ...]] = ()
    name: ClassVar[str]
    checks: ClassVar[dict[str, Callable[[Any, str], Any]]] = {
        "step_size": real_number,
        "trajectory_length": real_number,
        "energy_variance": real_number,
        "target_accept": partial(real_number, interval="(0, 1)"),
        "max_tree_depth": whole_number,
        "thinning": whole_number,
        "max_steps": whole_number,
        "inverse_mass": _metric,
    }

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None and field.name in self.checks:
                object.__setattr__(self, field.name, self.checks[field.name](value, field.name))

    def options(self) -> dict[str, Any]:
        """The options by name; a metric is left out, and a function is its text."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        values.pop("inverse_mass", None)
        return {name: repr(v) if callable(v) else v for name, v in values.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Kernel(Options):
    """Base class of the kernels, with the options that all have.

    :param step_size: the step size, then not adapted; in units of the metric.
    :param inverse_mass: the metric, then not adapted: an estimate of the variances (P,) or the
        covariance (P, P) of the unconstrained latents, such as ``guide.variances()``.
    :param low_rank: adapt the correlations of up to 64 directions besides the scale of each number.
    :raises ValueError: for an option outside its range; TypeError for one that is no number.
    """

    library: ClassVar[str] = "jax"
    step_size: float | None = None
    inverse_mass: Any = None
    low_rank: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_rank and (self.inverse_mass is not None or getattr(self, "dense_mass", False)):
            raise ValueError(
                "low_rank=True is a metric of its own: leave out inverse_mass and dense_mass"
            )

    def check_size(self, size: int) -> None:
        """Check that the metric is of P numbers."""
        metric = self.inverse_mass
        if metric is not None and metric.shape not in ((size,), (size, size)):
            raise ValueError(
                f"inverse_mass must have shape ({size},) or ({size}, {size}), got {metric.shape}"
            )

    def transition(self, log_density: Callable, plan: "Plan", size: int) -> "Transition":
        """The kernel in JAX, without the option ``low_rank``.

        :param log_density: vector (P,) -> scalar, in JAX.
        :param size: P.
        """
        raise NotImplementedError

    def with_metric(self, log_density: Callable, plan: "Plan", size: int) -> "Transition":
        """``transition`` in the metric of all options."""
        if not self.low_rank:
            return self.transition(log_density, plan, size)
        from pyro_bdl.mcmc import low_rank

        return low_rank.transition(self, log_density, plan, size)


@dataclass(frozen=True, eq=False, kw_only=True)
class Hamiltonian(Kernel):
    """The options that HMC and NUTS share.

    :param target_accept: the acceptance probability that the step size is adapted to.
    :param dense_mass: adapt a full mass matrix (P x P) instead of its diagonal.
    """

    library: ClassVar[str] = "numpyro"
    target_accept: float = 0.8
    dense_mass: bool = False

    def shared_options(self) -> dict[str, Any]:
        """The arguments that Pyro's and NumPyro's HMC and NUTS share."""
        reach = {
            name: getattr(self, name, None) for name in ("max_tree_depth", "trajectory_length")
        }
        return {name: value for name, value in reach.items() if value is not None} | {
            "target_accept_prob": self.target_accept,
            "step_size": self.step_size or 1.0,
            "adapt_step_size": self.step_size is None,
            "adapt_mass_matrix": self.inverse_mass is None,
        }

    def transition(self, log_density: Callable, plan: "Plan", size: int) -> "Transition":
        from pyro_bdl.mcmc.numpyro_kernels import transition

        return transition(log_density, self, plan)


@dataclass(frozen=True, eq=False, kw_only=True)
class NUTS(Hamiltonian):
    """The no-U-turn sampler (Hoffman & Gelman 2014), exact.

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> kernel = bdl.mcmc.NUTS(max_tree_depth=5)
        >>> samples = bdl.mcmc.sample(model, x, y, kernel=kernel, num_warmup=50, num_samples=50)
        >>> int(samples.stats["num_steps"].max()) <= 2**5
        True

    :param max_tree_depth: at most 2^depth gradients for each draw.
    :param target_accept: the acceptance probability that the step size is adapted to.
    :param dense_mass: adapt a full mass matrix (P x P) instead of its diagonal.
    :param step_size: the step size, then not adapted; in units of the metric.
    :param inverse_mass: the metric, then not adapted: an estimate of the variances (P,) or the
        covariance (P, P) of the unconstrained latents, such as ``guide.variances()``.
    :param low_rank: adapt the correlations of up to 64 directions too, from draws and gradients of
        the warm-up (Seyboldt, Carlson & Carpenter 2026): for posteriors whose correlations make
        trajectories long. It costs up to 256 P multiplications a gradient.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.NUTS,)
    name: ClassVar[str] = "nuts"
    max_tree_depth: int = 10


@dataclass(frozen=True, eq=False, kw_only=True)
class HMC(Hamiltonian):
    """Hamiltonian Monte Carlo (Neal 2011), exact.

    :param trajectory_length: step size times number of steps; None draws it in each iteration,
        uniformly up to 2 pi: a fixed length near a period of the posterior, which is 2 pi along a
        Normal in its own metric, ends where it began.
    :param max_steps: at most so many steps in an iteration, of a gradient each; where the step
        size would need more, the trajectory is shorter.
    :param target_accept: the acceptance probability that the step size is adapted to.
    :param dense_mass: adapt a full mass matrix (P x P) instead of its diagonal.
    :param step_size: the step size, then not adapted; in units of the metric.
    :param inverse_mass: the metric, then not adapted; see ``NUTS``.
    :param low_rank: adapt the correlations of up to 64 directions too; see ``NUTS``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.HMC,)
    name: ClassVar[str] = "hmc"
    trajectory_length: float | None = None
    max_steps: int = 256


@dataclass(frozen=True, eq=False, kw_only=True)
class MCLMC(Kernel):
    """Microcanonical Langevin dynamics (Robnik & Seljak 2024), without a Metropolis step, for
    posteriors of many numbers.

    :param energy_variance: the target for the variance of a step's energy error per dimension, in
        nats^2. A larger one means longer steps and more bias. A step with an error above 5 sqrt(P
        energy_variance) is divided into smaller ones; at the kinks of a network the variance is
        then up to 3 times the target.
    :param thinning: steps in an iteration; each takes two gradients, and more where it is divided.
    :param step_size: the step size, then not adapted; in units of the metric.
    :param inverse_mass: the metric, then not adapted; see ``NUTS``.
    :param low_rank: adapt the correlations of up to 64 directions too; see ``NUTS``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.MCLMC,)
    name: ClassVar[str] = "mclmc"
    energy_variance: float = 5e-4
    thinning: int = 20

    def transition(self, log_density: Callable, plan: "Plan", size: int) -> "Transition":
        from pyro_bdl.mcmc.microcanonical.langevin import Langevin

        return Langevin(log_density, self, plan, size).transition()


@dataclass(frozen=True, eq=False, kw_only=True)
class MAMS(Kernel):
    """Microcanonical dynamics with a Metropolis step (Robnik, Cohn-Gordon & Seljak 2025), exact.

    :param target_accept: the acceptance probability that the step size is adapted to.
    :param max_steps: at most so many steps in each iteration on average, of two gradients each.
    :param step_size: the step size, then not adapted; in units of the metric.
    :param inverse_mass: the metric, then not adapted; see ``NUTS``.
    :param low_rank: adapt the correlations of up to 64 directions too; see ``NUTS``.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.MAMS,)
    name: ClassVar[str] = "mams"
    target_accept: float = 0.9
    max_steps: int = 1024

    def transition(self, log_density: Callable, plan: "Plan", size: int) -> "Transition":
        from pyro_bdl.mcmc.microcanonical.adjusted import Adjusted

        return Adjusted(log_density, self, plan, size).transition()


KERNELS: dict[str, type[Kernel]] = {kind.name: kind for kind in (NUTS, HMC, MCLMC, MAMS)}


def as_kernel(kernel: str | Kernel) -> Kernel:
    """The kernel of a name, with its defaults.

    :raises ValueError: for another name.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in KERNELS:
        raise ValueError(
            f"kernel must be one of {', '.join(KERNELS)}, or an object such as mcmc.NUTS(), got "
            f"{kernel!r}"
        )
    return KERNELS[kernel]()
