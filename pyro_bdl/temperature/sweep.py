"""``sweep``: one guide trained at many temperatures and widths, and scored on test data."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pyro_bdl.comparison.compare import compare
from pyro_bdl.elbo.tempered import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.laplace import AutoLaplaceGGN
from pyro_bdl.guides.mean_field import AutoMeanField
from pyro_bdl.guides.swag import AutoMultiSWAG, AutoSWAG
from pyro_bdl.handlers import temper
from pyro_bdl.program.batches import leading_size, taken
from pyro_bdl.program.validation import check_finite
from pyro_bdl.temperature.overparameterized import size_of
from pyro_bdl.temperature.result import Sweep
from pyro_bdl.training.descent import rows_per_step
from pyro_bdl.training.minibatches import minibatches
from pyro_bdl.training.parallel_guides import AtTemperatures
from pyro_bdl.utils.random_state import seeded
from pyro_bdl.utils.validation import check_temperature, whole_number

_FEW = 8  # rows that a program's neurons are counted with


def sweep(
    model: Callable,
    guide: Callable[[Any], Guide] = AutoMeanField,
    train: tuple[Any, Any] | None = None,
    test: tuple[Any, Any] | None = None,
    *,
    taus: Iterable[float] = (),
    etas: Iterable[float] = (),
    widths: Iterable[int] | None = None,
    ood: Any = None,
    steps: int = 2000,
    learning_rate: float = 0.01,
    batch_size: int | None = None,
    num_particles: int = 1,
    estimator: str | None = None,
    num_samples: int = 100,
    seed: int = 0,
    progress: bool | None = None,
) -> Sweep:
    """Train a guide at each temperature and width, and score it on test data.

    All temperatures of one width are trained at once, by ``vmap`` over the guide's parameters, from
    the same start and with the same minibatches. The numbers of data p and neurons N are read from
    the program (:func:`pyro_bdl.temperature.size_of`).

    :param model: a program ``model(x, y)``; with ``widths`` a function ``width -> program``. The
        program's own parameters are not trained: give the noise a prior or a value.
    :param guide: a function ``program -> guide``, such as a class of guides that are trained by
        their ELBO. Guides of the family of ``AutoLaplaceGGN`` train the mode of the tempered
        posterior, and their Laplace approximation there is scored.
    :param train: the training inputs and targets, ``(N, ...)`` each.
    :param test: the test inputs and targets.
    :param taus: temperatures per neuron and datum; eta = tau p / N.
    :param etas: temperatures eta, besides or in the place of ``taus``.
    :param widths: the sizes of the networks; None for the one program.
    :param ood: inputs from elsewhere, for the entropy of the predictive distribution there.
    :param steps: gradient steps at each width.
    :param learning_rate: Adam's initial learning rate, which falls to zero along half a cosine.
    :param batch_size: rows in each step; see :func:`pyro_bdl.training.train`.
    :param num_particles: draws per step and temperature; an ensemble has one for each member.
    :param estimator: see :class:`pyro_bdl.elbo.TemperedTrace_ELBO`.
    :param num_samples: draws of each guide for the predictions.
    :param seed: seed of all random numbers.
    :param progress: show bars; by default in terminals and notebooks.
    :raises ValueError: without temperatures or widths, or for one that is not positive; for data
        that are missing or not finite.
    :raises TypeError: for a program or function of the width in the place of the other, or a guide
        in the place of a function that makes one.
    :raises UnsupportedProgramError: for a program without hidden neurons, or with running
        statistics of batches.
    """
    if train is None or test is None:
        raise ValueError("sweep needs train=(x, y) and test=(x, y)")
    per_datum = [check_temperature(tau, "tau") for tau in taus]
    direct = [check_temperature(eta, "eta") for eta in etas]
    if not per_datum and not direct:
        raise ValueError("sweep needs temperatures: give taus=... or etas=...")
    x, y = train
    steps, count = whole_number(steps, "steps"), leading_size(x)
    if isinstance(guide, AutoGuide):
        raise TypeError(
            f"guide is a {type(guide).__name__}: give a function program -> guide, such as "
            f"guide={type(guide).__name__} or lambda model: {type(guide).__name__}(model, ...)"
        )
    rows: list[dict[str, Any]] = []
    guides: dict[tuple[int, float], Guide] = {}
    task = ""
    for program in _programs(model, widths, train):
        check_finite(program, (x, y), {})
        size = rows_per_step(program, count, batch_size)
        _, neurons = size_of(program, taken(x, slice(0, _FEW)), taken(y, slice(0, _FEW)))
        temperatures = _distinct([*direct, *(tau * count / neurons for tau in per_datum)])
        with seeded(seed):
            start = guide(program)
            if not isinstance(start, Guide) or isinstance(start, AutoSWAG | AutoMultiSWAG):
                raise TypeError(
                    f"guide makes a {type(start).__name__}: a sweep needs a guide of pyro_bdl that "
                    "is trained by its ELBO, such as AutoMeanField, or AutoLaplaceGGN"
                )
            start.prototype(x, y)
            copies = AtTemperatures(program, start, temperatures)
            copies.train(
                minibatches(x, y, size, steps),
                steps=steps,
                learning_rate=learning_rate,
                num_particles=max(num_particles, start.num_members),
                estimator=estimator,
                progress=progress,
            )
        for index, eta in enumerate(temperatures):
            laplace = isinstance(start, AutoLaplaceGGN)
            trained = guide(temper(program, eta) if laplace else program).prototype(x, y)
            copies.put(index, trained)
            if isinstance(trained, AutoLaplaceGGN):
                trained = trained.laplace_approximation((x, y), progress=progress)
            guides[neurons, eta] = trained
            with seeded(seed):
                likelihood, kl = _terms(program, trained, x, y, size)
            found = compare(
                program,
                {"": trained},
                *test,
                reference=None,
                ood=ood,
                num_samples=num_samples,
                seed=seed,
            )
            task = found.task
            rows.append(
                {
                    "neurons": neurons,
                    "eta": eta,
                    "tau": eta * neurons / count,
                    "kl": kl,
                    "kl_per_neuron": kl / neurons,
                    "likelihood": likelihood / count,
                }
                | dict(found.rows[0])
            )
    return Sweep(task, count, tuple(rows), guides)


def _programs(
    model: Callable, widths: Iterable[int] | None, train: tuple[Any, Any]
) -> Iterator[Callable]:
    """The programs of all widths, or the one program.

    :raises TypeError: for a program in the place of a function of the width, or the reverse.
    """
    of_width = "with widths=... model is a function width -> program, without it a program (x, y)"
    if widths is not None:
        sizes = [whole_number(width, "widths") for width in widths]
        if not sizes:
            raise ValueError("sweep needs widths: give widths=[50, 200], or leave them out")
        if isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: {of_width}")
    else:
        try:
            inspect.signature(model).bind(*train)
        except TypeError as error:
            raise TypeError(f"model does not take (x, y) ({error}): {of_width}") from None
    for program in [model] if widths is None else map(model, sizes):
        if not callable(program):
            raise TypeError(f"model returned a {type(program).__name__}: {of_width}")
        for name, module in program.named_modules() if isinstance(program, nn.Module) else ():
            if isinstance(module, _NormBase) and module.track_running_stats and module.training:
                raise UnsupportedProgramError(
                    f"'{name}' is a {type(module).__name__} with running statistics, and every "
                    "temperature would need its own: give it track_running_stats=False, or use "
                    "LayerNorm or GroupNorm"
                )
        yield program


def _distinct(temperatures: list[float]) -> list[float]:
    """The temperatures in order, those that differ by rounding once."""
    found: list[float] = []
    for eta in sorted(temperatures):
        if not found or eta > found[-1] * (1 + 1e-9):
            found.append(eta)
    return found


@torch.no_grad()
def _terms(
    model: Callable, guide: Guide, x: Any, y: Any, size: int, passes: int = 8
) -> tuple[float, float]:
    """E_q[log p(y | w)] and KL(q || p) in nats, the first from minibatches of the training data."""
    elbo = TemperedTraceMeanField_ELBO()
    found: list[Tensor] = []
    for part in minibatches(x, y, size, passes):
        elbo.loss(model, guide, *part)
        assert elbo.expected_log_likelihood is not None and elbo.kl is not None
        found.append(torch.stack([elbo.expected_log_likelihood, elbo.kl]))
    likelihood, kl = torch.stack(found).double().mean(0).tolist()
    return likelihood, kl
