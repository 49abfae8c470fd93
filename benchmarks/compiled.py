"""Training steps of mean-field VI: the plain ELBO, the compiled ELBO, torch written by hand.

All sides take the same step, in torch's loop with one Adam over two flat vectors, location and
scale: a draw of the weights, a network's forward pass, its log likelihood, a closed-form KL to
Normal(0, 1) priors, and backward. The side written by hand does it with slices of the vectors and
``torch.nn.functional``; it draws the logarithm of the noise scale with the weights, as the guide
does. The plain ELBO and the compiled one are also trained by ``pyro.infer.SVI``.
"""

import math
from itertools import pairwise

import harness
import pyro
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import softplus

import pyro_bdl as bdl


def mlp(*sizes, activation=nn.Tanh):
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(784, 10),
    )  # fmt: skip


def forward_by_hand(net, weights, x):
    """The network at weights in order, by functions of torch."""
    left = iter(weights)
    for layer in net:
        if isinstance(layer, nn.Linear):
            x = F.linear(x, next(left), next(left))
        elif isinstance(layer, nn.Conv2d):
            x = F.conv2d(x, next(left), next(left), padding=1)
        else:
            x = layer(x)
    return x


class ByHand:
    """Mean-field VI over flat vectors, in torch alone."""

    def __init__(self, net, regression):
        self.net, self.regression = net, regression
        self.shapes = [p.shape for p in net.parameters()]
        self.sizes = [shape.numel() for shape in self.shapes]
        start = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        if regression:  # the logarithm of the noise scale
            start = torch.cat([start, torch.zeros(1)])
        self.loc = start.clone().requires_grad_()
        self.free = torch.full_like(start, math.log(math.expm1(0.05))).requires_grad_()

    def loss(self, x, y):
        scale = softplus(self.free)
        draw = torch.addcmul(self.loc, scale, torch.randn_like(scale))
        sizes = self.sizes + ([1] if self.regression else [])
        parts = draw.split(sizes)
        weights = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=False)]
        output = forward_by_hand(self.net, weights, x)
        kl = 0.5 * (scale.square() + self.loc.square() - 1.0).sum() - scale.log().sum()
        if not self.regression:
            return kl + F.cross_entropy(output, y, reduction="sum")
        noise = parts[-1].exp()
        error = (y - output.squeeze(-1)) / noise
        constant = len(y) * (noise.log() + 0.5 * math.log(2 * math.pi))
        return kl + (0.5 * error.square().sum() + constant).squeeze()


def by_hand(net, regression, x, y):
    vectors = ByHand(net, regression)
    adam = torch.optim.Adam([vectors.loc, vectors.free], lr=1e-3)

    def step():
        adam.zero_grad()
        vectors.loss(x, y).backward()
        adam.step()

    return step


def program(net, regression):
    kind = bdl.models.Regression if regression else bdl.models.Classification
    return kind(bdl.bayesianize(net, bdl.priors.Normal(1.0)))


def in_torch(elbo, net, regression, x, y):
    model = program(net, regression)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    pair = elbo(model, guide)
    adam = torch.optim.Adam(guide.parameters(), lr=1e-3)

    def step():
        adam.zero_grad()
        pair(x, y).backward()
        adam.step()

    return step


def in_svi(elbo, net, regression, x, y):
    model = program(net, regression)
    guide = bdl.guides.AutoMeanField(model).prototype(x, y)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), elbo)
    return lambda: svi.step(x, y)


def cases():
    """Name -> network, whether it is regression, inputs and targets."""
    x = torch.randn(128, 8)
    images = torch.rand(128, 784)
    labels = torch.randint(10, (128,))
    relu = {"activation": nn.ReLU}
    return {
        "8-50-50-1": (mlp(8, 50, 50, 1), True, x, x[:, 0].sin()),
        "784-100-100-10": (mlp(784, 100, 100, 10, **relu), False, images, labels),
        "CNN": (cnn(), False, images.view(-1, 1, 28, 28), labels),
    }


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps per timed round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", default=["8-50-50-1", "784-100-100-10", "CNN"])
    parser.add_argument("--inductor", action="store_true", help="also that backend (minutes)")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    harness.set_device(options.device)
    plain, compiled = bdl.elbo.TemperedTraceMeanField_ELBO, bdl.elbo.CompiledELBO
    results = {}
    every = cases()
    for name in options.cases:
        case = every[name]
        sides = {
            "by hand": by_hand(*case),
            "plain": in_torch(plain(), *case),
            "compiled": in_torch(compiled(), *case),
            "plain in SVI": in_svi(plain(), *case),
            "compiled in SVI": in_svi(compiled(), *case),
        }
        if options.inductor:
            sides["inductor"] = in_torch(compiled(backend="inductor"), *case)
        for step in sides.values():
            for _ in range(3):  # the trace, the comparison, and one step of the graph
                step()
        rounds = {side: harness.repeated(step, options.steps) for side, step in sides.items()}
        seconds = harness.in_turns(rounds, options.repeats)
        for side, value in seconds.items():
            results[f"{name}: {side}, ms/step"] = 1e3 * value / options.steps
        results[f"{name}: ratio plain to compiled"] = seconds["plain"] / seconds["compiled"]
        results[f"{name}: ratio plain to compiled, in SVI"] = (
            seconds["plain in SVI"] / seconds["compiled in SVI"]
        )
        results[f"{name}: ratio by hand to compiled"] = seconds["by hand"] / seconds["compiled"]
        if options.inductor:
            inductor = seconds["inductor"]
            results[f"{name}: ratio plain to inductor"] = seconds["plain"] / inductor
            results[f"{name}: ratio by hand to inductor"] = seconds["by hand"] / inductor
    harness.show("compiled: one mean-field step, batch 128", results, options.json)


if __name__ == "__main__":
    main()
