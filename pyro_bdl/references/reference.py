"""``Reference``: data, program and NUTS draws of one problem, in one file of the package."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from pyro_bdl.comparison.observe import PredictiveDraws
from pyro_bdl.data.dataset import Dataset
from pyro_bdl.data.programs import program
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.utils.validation import as_path

_SUFFIX = ".safetensors"
_PARTS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Reference:
    """A reference posterior: draws of a long NUTS run on one problem.

    :param name: name of the problem.
    :param dataset: training and test data, standardized as the program sees them.
    :param architecture: ``hidden``, the numbers of units, ``activation`` and ``gain`` of the prior;
        empty where the program is none of this package.
    :param function: ``(S, N)``, draws of f at the test inputs; for classes their probabilities
        ``(S, N, C)``. Chain after chain.
    :param noise: ``(S,)``, the noise's sd at the same draws, in the units of ``dataset.y_test``;
        None for classes.
    :param chains: number of chains of equal length; 0 where ``function`` is the mean of all draws.
    :param info: how the draws were made and checked: seed, kernel, settings, versions, R-hat and
        ESS in function space over all draws of the run, divergences, seconds; JSON types.
    """

    name: str
    dataset: Dataset
    architecture: Mapping[str, Any]
    function: Tensor
    noise: Tensor | None
    chains: int
    info: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        draws = f"{len(self.function)} draws of {self.chains} chains" if self.chains else "the mean"
        return (
            f"<Reference {self.name!r}: {draws} at {len(self.dataset.x_test)} test points, "
            f"{self.dataset.task}>"
        )

    @property
    def seconds(self) -> float:
        """Wall-clock time of the whole NUTS run."""
        return float(self.info["seconds"])

    def program(self) -> nn.Module:
        """A new Pyro program of the problem, whose posterior the draws belong to.

        Its network has a fresh initialization, drawn from torch's random state.

        :raises UnsupportedProgramError: for published predictions of a program that is not here.
        """
        if not self.architecture:
            raise UnsupportedProgramError(
                f"the program of {self.name!r} is not in this package: take your own, of the same "
                "network and prior"
            )
        return program(self.dataset, **self.architecture)[0]

    def draws(self, *, seed: int = 0) -> PredictiveDraws:
        """The draws as a posterior of ``compare``.

        :param seed: seed of the noise of a regression's predictive draws.
        :raises UnsupportedProgramError: where the mean of the draws alone is known.
        """
        if not self.chains:
            raise UnsupportedProgramError(
                f"of {self.name!r} the mean of the draws alone is known, which is no posterior: "
                "give its function to metrics.agreement and metrics.total_variation"
            )
        if self.noise is None:
            return PredictiveDraws(self.function, chains=self.chains)
        noise, y = self.noise[:, None], self.dataset.y_test
        generator = torch.Generator(device="cpu").manual_seed(seed)
        standard = torch.randn(self.function.shape, generator=generator, device="cpu")
        return PredictiveDraws(
            self.function,
            targets=self.function + noise * standard,
            log_likelihood=torch.distributions.Normal(self.function, noise).log_prob(y),
            chains=self.chains,
        )

    @classmethod
    def read(cls, path: str | Path) -> "Reference":
        """Read a file that ``benchmarks/references.py`` wrote."""
        with safe_open(str(as_path(path)), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        about = json.loads(header["dataset"])
        function = tensors["function"]
        if about["task"] == "classification":
            first = (1 - function.sum(-1, keepdim=True)).clamp_min(0)
            function = torch.cat([first, function], -1)
        about["source"] = f"reference posterior {header['name']} of pyro_bdl"
        about |= {name: tuple(about[name]) for name in ("feature_names", "class_names")}
        return cls(
            name=header["name"],
            dataset=Dataset(**{name: tensors[name] for name in _PARTS}, **about),
            function=function,
            noise=tensors.get("noise"),
            **{name: json.loads(header[name]) for name in ("architecture", "chains", "info")},
        )


def names() -> tuple[str, ...]:
    """Names of the reference posteriors that the package holds."""
    files = (file.name for file in _folder().iterdir())
    return tuple(sorted(n.removesuffix(_SUFFIX) for n in files if n.endswith(_SUFFIX)))


def load(name: str, path: str | Path | None = None) -> Reference:
    """A reference posterior by name; nothing is downloaded.

    :param name: one of ``names()``, or "cifar10-hmc", the published mean of HMC on CIFAR-10.
    :param path: the file of that one, see :func:`pyro_bdl.references.published.cifar10_hmc`.
    :raises ValueError: for another name, or without that file.
    """
    if name == "cifar10-hmc":
        from pyro_bdl.references.published import cifar10_hmc

        if path is None:
            raise ValueError(
                "the file of 'cifar10-hmc' does not come with the package: name it, path=..., see "
                "help(pyro_bdl.references.published.cifar10_hmc)"
            )
        return cifar10_hmc(path)
    if path is not None:
        raise ValueError(f"{name!r} comes with the package and takes no path")
    if name not in names():
        raise ValueError(f"there is no reference {name!r}; there are: {', '.join(names())}")
    with resources.as_file(_folder() / f"{name}{_SUFFIX}") as path:
        return Reference.read(path)


def _folder() -> Any:
    return resources.files("pyro_bdl.references") / "data"
