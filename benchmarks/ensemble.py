"""Time to train an ensemble at once against one network, and against as many one after another."""

import harness
import pyro
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl.training import train


def network(width):
    net = nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    return bdl.models.Regression(bdl.bayesianize(net), num_data=1280)


def side(guide_of, count, options, x, y):
    """Training from the start, ``count`` times over."""

    def run():
        for _ in range(count):
            pyro.clear_param_store()
            model = network(options.width)
            train(
                model, guide_of(model), x, y,
                steps=options.steps, batch_size=128,
            )  # fmt: skip

    return run


def main() -> None:
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=10, help="networks (default 10)")
    parser.add_argument("--width", type=int, default=50, help="hidden units (default 50, 50)")
    parser.add_argument("--steps", type=int, default=300, help="steps per training")
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    harness.set_device(options.device)
    x = torch.randn(1280, 8)
    y = x[:, 0].sin() + 0.1 * torch.randn(1280)
    size = options.members

    def one(model):
        return bdl.guides.AutoLaplaceGGN(model)

    def ensemble(model):
        return bdl.guides.AutoEnsemble(model, size=size)

    sides = {
        "one": side(one, 1, options, x, y),
        "ensemble": side(ensemble, 1, options, x, y),
        "in turn": side(one, size, options, x, y),
    }
    seconds = harness.in_turns(sides, options.repeats)
    ms = {name: 1e3 * value / options.steps for name, value in seconds.items()}
    results = {
        "one network, ms/step": ms["one"],
        f"{size} networks at once, ms/step": ms["ensemble"],
        f"{size} networks one after another, ms/step": ms["in turn"],
        "at once to one: ratio": ms["ensemble"] / ms["one"],
        "one after another to at once: ratio": ms["in turn"] / ms["ensemble"],
    }
    title = f"ensemble: {size} of 8-{options.width}-{options.width}-1, batch 128"
    harness.show(title, results, options.json)


if __name__ == "__main__":
    main()
