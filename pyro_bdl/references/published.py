"""Published predictions of HMC on CIFAR-10, as a reference whose file the user gives."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bdl.data.dataset import Dataset
from pyro_bdl.references.reference import Reference
from pyro_bdl.utils.validation import as_path

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


def cifar10_hmc(path: str | Path) -> Reference:
    """The mean class probabilities of three chains of HMC at test images of CIFAR-10.

    :param path: an .npz file with ``jpeg`` (the bytes of all images), ``offsets`` (where each
        begins, and the end), ``labels`` and ``hmc_probs`` (N, 10) of the first N images, in the
        order of the test set.
    :raises ValueError: for a file without one of these.

    Source: Izmailov et al. (2021), What are Bayesian neural network posteriors really like?;
    ResNet-20 with filter response normalization, prior N(0, 1/5), 240 draws of each chain.
    """
    with np.load(as_path(path)) as file:
        missing = {"jpeg", "offsets", "labels", "hmc_probs"} - set(file.files)
        if missing:
            raise ValueError(f"'{path}' has no {', '.join(sorted(missing))}")
        probabilities = torch.from_numpy(file["hmc_probs"])
        x, y = images(file, range(len(probabilities)))
    dataset = Dataset(
        x_train=x[:0], y_train=y[:0], x_test=x, y_test=y, feature_names=(), target_name="class",
        task="classification", class_names=CLASSES, source="CIFAR-10", split="its test images",
    )  # fmt: skip
    info = {"kernel": "HMC", "draws": 720, "source": "Izmailov et al. (2021), arXiv 2104.14421"}
    return Reference("cifar10-hmc", dataset, {}, probabilities[None], None, chains=0, info=info)


def images(file: Any, rows: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) with pixels from 0 to 1, and their labels (N,).

    :param file: an open .npz file with ``jpeg``, ``offsets`` and ``labels``.
    :param rows: the images to decode.
    """
    from PIL import Image

    jpeg, offsets, rows = file["jpeg"], file["offsets"], np.asarray(rows)
    pixels = np.stack([
        np.asarray(Image.open(io.BytesIO(jpeg[offsets[i] : offsets[i + 1]].tobytes())))
        for i in rows
    ])  # fmt: skip
    labels = file["labels"][rows].astype(np.int64)
    # Channels first in memory too: torch 2.13's convolutions of few channels write beyond their
    # memory in the backward pass of images with channels last.
    x = torch.from_numpy(pixels).float().movedim(-1, 1).contiguous() / 255
    return x, torch.from_numpy(labels)
