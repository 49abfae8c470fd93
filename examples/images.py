"""A convolutional network on images: train, Laplace approximation, calibrated probabilities.

    python examples/images.py                                   # CPU, or one GPU if there is one
    torchrun --nproc_per_node=4 examples/images.py --data mnist.npz     # four GPUs

Copy this file and change ``load`` and ``network``. The file of ``--data`` holds x_train and x_test
(N, height, width) and y_train and y_test (N,); without it, scikit-learn's digits are taken.
"""

import argparse

import numpy as np
import pyro
import torch
import torch.distributed as distributed
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import metrics


def load(path):
    """Training and test images (N, 1, height, width) between 0 and 1, and their classes."""
    if path is None:
        from sklearn.datasets import load_digits

        images, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(y))
        x, y = images[order].reshape(-1, 8, 8) / 16, y[order]
        parts = (x[:1400], y[:1400]), (x[1400:], y[1400:])
    else:
        data = np.load(path)
        parts = tuple((data[f"x_{part}"] / 255, data[f"y_{part}"]) for part in ("train", "test"))
    return [(torch.tensor(x).float()[:, None], torch.tensor(y).long()) for x, y in parts]


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(128, classes),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a file .npz")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="of each process")
    parser.add_argument("--rows", type=int, help="use only so many training images")
    options = parser.parse_args()

    several = distributed.is_torchelastic_launched()  # by torchrun
    if several:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, count = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    (x, y), (x_test, y_test) = load(options.data)
    x, y = x[: options.rows], y[: options.rows]
    total, classes = len(x), int(y.max()) + 1
    rows = total // count  # the same number for every process
    mine = slice(rank * rows, (rank + 1) * rows)
    x, y, x_test, y_test = (each.to(device) for each in (x[mine], y[mine], x_test, y_test))

    pyro.set_rng_seed(0)  # all processes start from the same weights
    net = network(classes).to(device)
    bnn = bdl.bayesianize(net, prior=bdl.priors.FanIn(1.4))
    model = bdl.models.Classification(bnn, num_data=rows * count)
    guide = bdl.guides.AutoLaplaceGGN(model, structure="kron").prototype(x[:2], y[:2])
    elbo = bdl.elbo.TemperedTrace_ELBO()
    svi = pyro.infer.SVI(
        model, guide, pyro.optim.Adam({"lr": 0.002}),
        bdl.distributed.DataParallel_ELBO(elbo) if several else elbo,
    )  # fmt: skip
    for epoch in range(options.epochs):
        order = torch.randperm(rows, device=device)
        loss = 0.0
        for chosen in order.split(options.batch_size):
            loss = svi.step(x[chosen], y[chosen])
        if rank == 0:
            print(f"epoch {epoch + 1}: last loss per image {loss / (rows * count):.3f}")

    batches = [(x[part], y[part]) for part in torch.arange(rows, device=device).split(256)]
    data = bdl.distributed.Shard(batches) if several else batches
    posterior = guide.laplace_approximation(data)  # the same on all processes
    if rank == 0:
        p = {
            "MAP": bdl.Predictive(model, guide, 1).mean(x_test)["y"][0],
            "Laplace": bdl.LinearizedPredictive(model, posterior).probabilities(x_test)["y"],
        }
        for name, values in p.items():
            nlpd = -values.gather(1, y_test[:, None]).log().mean()
            error = metrics.expected_calibration_error(values, y_test)
            accuracy = metrics.accuracy(values, y_test)
            print(f"{name:8} accuracy {accuracy:.1%}, NLPD {nlpd:.3f}, ECE {error:.1%}")
    if several:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
