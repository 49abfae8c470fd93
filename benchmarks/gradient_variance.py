"""Variance of the ELBO's gradient: plain draws, local reparameterization and flipout.

A 784-100-100-10 ReLU network with a mean-field guide, one batch of 128. The variance is that of
the gradient of the expected log likelihood in the guide's parameters, summed over them, given the
batch: the KL is in closed form and adds none. Measured where training starts and after
``--train`` steps on batches, since the ratio depends on where: local noise removes the covariance
of the data of a batch, and leaves each datum's own variance. Times are of whole SVI steps.
"""

from pathlib import Path

import harness
import numpy
import pyro
import torch
from pyro.infer import SVI
from torch import nn

import pyro_bdl as bdl

BATCH = 128
ESTIMATORS = {"plain": None, "local": "local_reparameterization", "flipout": "flipout"}
NAMES = {"plain": "plain draws", "local": "local reparameterization", "flipout": "flipout"}


def read(path: Path | None, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 784) between 0 and 1 and their classes: MNIST, or ten noisy templates."""
    if path is not None:
        with numpy.load(path) as data:
            images, classes = data["x_train"], data["y_train"]
        x = torch.as_tensor(images, dtype=torch.float32).reshape(len(images), -1) / 255
        return x.to(device), torch.as_tensor(classes, dtype=torch.long, device=device)
    templates = torch.rand(10, 784).pow(4)  # as sparse as digits
    classes = torch.randint(0, 10, (20_000,))
    x = (templates[classes] + 0.2 * torch.randn(20_000, 784)).clamp(0, 1)
    return x.to(device), classes.to(device)


def program(num_data: int, device: str):
    """A classifier with the weights that this seed gives, and its mean-field guide's class."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    )
    bnn = bdl.bayesianize(net.to(device), bdl.priors.Normal(1.0))
    return bdl.models.Classification(bnn, num_data=num_data)


def elbo(name: str):
    return bdl.elbo.TemperedTraceMeanField_ELBO(estimator=ESTIMATORS[name])


def variance(model, guide, name: str, x, y, draws: int) -> float:
    """Sum over the parameters of the variance of the gradient, per datum squared."""
    objective = elbo(name)(model, guide)
    parameters = [p for p in guide.parameters() if p.requires_grad]
    total = squares = 0.0
    for _ in range(draws):
        gradients = torch.autograd.grad(objective(x, y), parameters)
        gradient = torch.cat([g.flatten() for g in gradients]).double() / model.num_data
        total, squares = total + gradient, squares + gradient.square()
    return float(((squares - total.square() / draws) / (draws - 1)).sum())


def variances(model, guide, x, y, draws: int, where: str) -> dict[str, float]:
    found = {name: variance(model, guide, name, x, y, draws) for name in ESTIMATORS}
    results = {f"{where}: variance, {NAMES[name]}": value for name, value in found.items()}
    for name in ("local", "flipout"):
        results[f"{where}: variance of {NAMES[name]} to plain, ratio"] = (
            found[name] / found["plain"]
        )
    return results


def times(x, y, num_data: int, options) -> dict[str, float]:
    """Milliseconds of a step, all estimators on programs and guides of their own."""
    sides = {}
    for name in ESTIMATORS:
        model = program(num_data, options.device)
        guide = bdl.guides.AutoMeanField(model).prototype(x, y)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-4}), elbo(name))

        def run(svi: SVI = svi) -> None:
            for _ in range(options.steps):
                svi.step(x, y)
            if options.device != "cpu":
                torch.cuda.synchronize()

        sides[name] = run
    found = harness.in_turns(sides, options.repeats)
    results = {f"step, {NAMES[n]}, ms": 1e3 * s / options.steps for n, s in found.items()}
    for name in ("local", "flipout"):
        results[f"step of {NAMES[name]} to plain, ratio"] = found[name] / found["plain"]
    return results


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="mnist.npz; synthetic images without it")
    parser.add_argument("--draws", type=int, default=300, help="gradients (default %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="steps per timed round")
    parser.add_argument("--train", type=int, default=0, help="steps before a second measurement")
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x, y = read(options.data, options.device)
    batch = x[:BATCH], y[:BATCH]
    model = program(len(x), options.device)
    guide = bdl.guides.AutoMeanField(model).prototype(*batch)
    results = variances(model, guide, *batch, options.draws, "at the start")
    if options.train:
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo("local"))
        for _ in range(options.train):
            rows = torch.randint(len(x), (BATCH,), device=x.device)
            svi.step(x[rows], y[rows])
        where = f"after {options.train} steps"
        results |= variances(model, guide, *batch, options.draws, where)
    results |= times(*batch, len(x), options)
    harness.show("gradient variance: 784-100-100-10, batch 128, mean-field", results, options.json)


if __name__ == "__main__":
    main()
