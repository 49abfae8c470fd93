"""Expectation maximization of mixtures, against scikit-learn and on handwritten digits.

    python benchmarks/em.py --data mnist.npz --figure em.png

- A Gaussian mixture with full covariances against ``sklearn.mixture.GaussianMixture`` from the same
  start: the largest difference of the log likelihoods of all rounds (per datum) and of the
  responsibilities at the end, and the time of a round.
- A mixture of Bernoullis of ten components on binarized digits of MNIST (Bishop 2006, section
  9.3.3): the log likelihood, how pure the components are, and their means as pictures.
"""

import argparse
import json
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from harness import in_turns, machine, parser
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.distributions import constraints

from pyro_bdl.evidence import em


def gaussian_mixture(y: Tensor, start: Tensor) -> None:
    count, size = start.shape
    eye = torch.eye(size).expand(count, size, size).contiguous()
    weights = pyro.param("weights", torch.ones(count) / count, constraint=constraints.simplex)
    mu = pyro.param("mu", start.clone())
    sigma = pyro.param("sigma", eye, constraint=constraints.positive_definite)
    with pyro.plate("n", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.MultivariateNormal(mu[z], covariance_matrix=sigma[z]), obs=y)


def against_scikit_learn(options: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    centers = 3.0 * torch.randn(5, 4)
    rows = options.rows
    y = torch.cat([torch.randn(rows // 5, 4) @ torch.randn(4, 4) + center for center in centers])
    start = y[torch.randperm(len(y))[:5]]
    found = []

    def ours(rounds: int = options.rounds) -> None:
        pyro.clear_param_store()
        found.append(em(gaussian_mixture, y, start, rounds=rounds, tolerance=0.0))

    def theirs(rounds: int = options.rounds) -> GaussianMixture:
        mixture = GaussianMixture(
            5, max_iter=rounds, tol=0.0, reg_covar=0.0, weights_init=np.ones(5) / 5,
            means_init=start.numpy(), precisions_init=np.stack([np.eye(4)] * 5),
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it has not converged
            return mixture.fit(y.numpy())

    seconds = in_turns({"pyro_bdl": ours, "scikit-learn": theirs}, options.repeats)
    path = [theirs(rounds).score(y.numpy()) for rounds in range(1, options.rounds + 1)]
    ours_path = found[-1].log_likelihood[1:].numpy() / len(y)
    other = theirs().predict_proba(y.numpy())
    return {
        "rows": len(y),
        "rounds": options.rounds,
        "difference of log likelihoods": float(np.abs(ours_path - path).max()),
        "difference of responsibilities": float(
            np.abs(found[-1].responsibilities["z"].numpy() - other).max()
        ),
        "ms per round": 1e3 * seconds["pyro_bdl"] / options.rounds,
        "scikit-learn, ms per round": 1e3 * seconds["scikit-learn"] / options.rounds,
    }


def bernoulli_mixture(images: Tensor, start: Tensor) -> None:
    count = len(start)
    weights = pyro.param("weights", torch.ones(count) / count, constraint=constraints.simplex)
    means = pyro.param("means", start.clone(), constraint=constraints.unit_interval)
    with pyro.plate("n", len(images)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("images", dist.Bernoulli(means[z]).to_event(1), obs=images)


def digits(options: argparse.Namespace) -> dict[str, float]:
    """Ten Bernoulli components on digits; draws their means."""
    data = np.load(options.data)
    rows = options.digits
    images = torch.tensor(data["x_train"][:rows].reshape(rows, -1) / 255.0 > 0.5).double()
    labels = torch.tensor(data["y_train"][:rows]).long()
    torch.manual_seed(1)
    pyro.clear_param_store()
    start = 0.25 + 0.5 * torch.rand(10, images.shape[1])
    found = em(bernoulli_mixture, images, start, rounds=options.digit_rounds, tolerance=1e-6)
    chosen = found.responsibilities["z"].argmax(-1)
    counts = torch.zeros(10, 10).index_put_((chosen, labels), torch.ones(rows), accumulate=True)
    if options.figure:
        draw(found.parameters["means"], found.parameters["weights"], found.log_likelihood, options)
    path = found.log_likelihood / rows
    return {
        "digits": rows,
        "rounds": len(path) - 1,
        "log likelihood per digit at the start": float(path[0]),
        "log likelihood per digit": float(path[-1]),
        "smallest gain of a round": float(path.diff().min()),
        "share of digits in a component of their majority": float(
            counts.max(1).values.sum() / rows
        ),
    }


def draw(means: Tensor, weights: Tensor, path: Tensor, options: argparse.Namespace) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 5, figsize=(7.5, 3.4), layout="constrained")
    for axis, mean, weight in zip(axes.flat, means, weights, strict=True):
        axis.imshow(mean.reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(f"{100 * float(weight):.0f} %", fontsize=9)
        axis.set_axis_off()
    figure.suptitle("Ten Bernoulli components of binarized digits, and their weights", fontsize=11)
    figure.savefig(options.figure, dpi=150)


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--data", help="MNIST as .npz; without it the digits are left out")
    arguments.add_argument("--figure", help="where the components' pictures are written")
    arguments.add_argument("--rows", type=int, default=2000, help="of the Gaussian mixture")
    arguments.add_argument("--rounds", type=int, default=30, help="of the Gaussian mixture")
    arguments.add_argument("--digits", type=int, default=5000, help="digits (default %(default)s)")
    arguments.add_argument("--digit-rounds", type=int, default=60)
    arguments.add_argument("--quick", action="store_true", help="few rows, rounds and digits")
    options = arguments.parse_args()
    if options.quick:
        options.rows, options.rounds, options.repeats = 500, 10, 2
        options.digits, options.digit_rounds = 500, 15
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    result: dict = {"gaussian mixture": against_scikit_learn(options)}
    if options.data:
        result["bernoulli mixture"] = digits(options)
    if options.json:
        print(json.dumps({"machine": machine(), **result}))
        return
    print(machine())
    for name, figures in result.items():
        print(f"\n{name}")
        for key, value in figures.items():
            print(f"  {key:50s} {value:.6g}")


if __name__ == "__main__":
    main()
