"""Mean-field steps of other libraries on one network, each written as its users write it.

The network is 784-400-400-10, the likelihood categorical, the optimizer Adam, one draw of the
weights a step, batches of 128 images. Libraries that are not installed are left out; none of them
is needed by pyro_bdl. Only the time of a step is compared: bayesian-torch 0.5 averages the KL over
the weights of a layer and torch-uncertainty 0.13 over the layers, so that their objectives differ.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import harness
import pyro
import torch
from torch import Tensor, nn

import pyro_bdl as bdl

SIZES = (784, 400, 400, 10)
START = 0.05  # sd of every weight at the first step
Step = Callable[[Tensor, Tensor], object]


def network() -> nn.Sequential:
    first, second, third = (nn.Linear(i, o) for i, o in pairwise(SIZES))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)


def program(count: int) -> nn.Module:
    return bdl.models.Classification(
        bdl.bayesianize(network(), bdl.priors.Normal(1.0)), num_data=count
    )


def ours(elbo: Callable[..., Callable], count: int, x: Tensor, y: Tensor) -> Step:
    model = program(count)
    guide = bdl.guides.AutoMeanField(model, init_scale=START).prototype(x, y)
    loss = elbo()(model, guide)
    adam = torch.optim.Adam(guide.parameters(), lr=1e-3)
    return in_torch(adam, loss)


def in_torch(adam: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def step(x: Tensor, y: Tensor) -> None:
        adam.zero_grad()
        loss(x, y).backward()
        adam.step()

    return step


def pyro_alone(count: int, x: Tensor, y: Tensor) -> Step:
    """Pyro's own guide, ELBO and optimizer."""
    model = program(count)
    guide = pyro.infer.autoguide.AutoNormal(model, init_scale=START)
    svi = pyro.infer.SVI(
        model, guide, pyro.optim.Adam({"lr": 1e-3}), pyro.infer.TraceMeanField_ELBO()
    )
    return svi.step


def posteriors(count: int, x: Tensor, y: Tensor) -> Step:
    import posteriors
    import torchopt

    net = network()

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]):
        inputs, labels = batch
        output = torch.func.functional_call(net, params, inputs)
        log_likelihood = -nn.functional.cross_entropy(output, labels)
        return log_likelihood + posteriors.diag_normal_log_prob(params) / count, output

    adam = torchopt.adam(lr=1e-3)
    transform = posteriors.vi.diag.build(
        log_posterior, adam, temperature=1 / count, init_log_sds=math.log(START)
    )
    state = transform.init({name: p.detach() for name, p in net.named_parameters()})

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal state
        state, _ = transform.update(state, (x, y))

    return step


def bayesian_torch(kind: str, count: int, x: Tensor, y: Tensor) -> Step:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = network()
    start = {"posterior_mu_init": 0.0, "posterior_rho_init": math.log(math.expm1(START))}
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0}
    dnn_to_bnn(net, prior | start | {"type": kind, "moped_enable": False})

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x), y) + get_kl_loss(net) / count

    return in_torch(torch.optim.Adam(net.parameters(), lr=1e-3), loss)


def torch_uncertainty(count: int, x: Tensor, y: Tensor) -> Step:
    from torch_uncertainty.layers.bayesian import BayesLinear
    from torch_uncertainty.losses import ELBOLoss

    start = {"prior_sigma_1": 1.0, "sigma_init": math.log(math.expm1(START))}
    first, second, third = (BayesLinear(i, o, **start) for i, o in pairwise(SIZES))
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
    loss = ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=1 / count, num_samples=1)
    return in_torch(torch.optim.Adam(net.parameters(), lr=1e-3), loss)


def sides(count: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, Step]]:
    yield "pyro_bdl", ours(bdl.elbo.TemperedTraceMeanField_ELBO, count, x, y)
    yield "pyro_bdl, compiled", ours(bdl.elbo.CompiledELBO, count, x, y)
    yield "Pyro alone", pyro_alone(count, x, y)
    if importlib.util.find_spec("posteriors"):
        yield "posteriors", posteriors(count, x, y)
    if importlib.util.find_spec("bayesian_torch"):
        yield "bayesian-torch", bayesian_torch("Reparameterization", count, x, y)
        yield "bayesian-torch, flipout", bayesian_torch("Flipout", count, x, y)
    if importlib.util.find_spec("torch_uncertainty"):
        yield "torch-uncertainty", torch_uncertainty(count, x, y)


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="steps per timed round (30)")
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    harness.set_device(options.device)
    x, y = torch.rand(128, SIZES[0]), torch.randint(SIZES[-1], (128,))
    rounds = {}
    for name, step in sides(60_000, x, y):
        for _ in range(3):
            step(x, y)
        rounds[name] = harness.repeated(lambda step=step: step(x, y), options.steps)
    seconds = harness.in_turns(rounds, options.repeats)
    results = {f"{name}, ms/step": 1e3 * value / options.steps for name, value in seconds.items()}
    for name, value in seconds.items():
        if not name.startswith("pyro_bdl"):
            results[f"ratio of {name} to pyro_bdl"] = value / seconds["pyro_bdl"]
            results[f"ratio of {name} to pyro_bdl, compiled"] = (
                value / seconds["pyro_bdl, compiled"]
            )
    harness.show("mean-field steps of 784-400-400-10", results, options.json)


if __name__ == "__main__":
    main()
