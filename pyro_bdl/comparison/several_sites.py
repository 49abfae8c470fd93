"""Several observed sites of a program, compared as one observation of all their numbers.

If all sites stand in one plate whose cells are the rows of the data, a datum is a row: its log
density is the sum over the sites, and its numbers follow each other, ``(N, D)``. Otherwise all
numbers are in one vector ``(M,)``, and all data are passed to the program at once. Sites in a
common plate have one log density for each of its cells, as for the sequences of a hidden Markov
chain. Without a common plate each site has its own terms; if discrete sites that are summed out tie
the data to each other, there is a single joint density.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_bdl.comparison.held_out import Observation, Test
from pyro_bdl.distributions.take_apart import observation_kind, observation_mean
from pyro_bdl.predictive.sampled import PredictiveMoments
from pyro_bdl.program.batches import has_rows, leading_size
from pyro_bdl.program.trace import Run, Site
from pyro_bdl.program.unconstrained_parameters import are_known

ALL = "all observed sites"  # stands for the name of a site
_BY_CLASS = ("Categorical", "OrderedLogistic")  # a probability for each class


@dataclass(frozen=True)
class SeveralSites:
    """The observed sites of a program.

    :param kinds: site to the name of its distribution.
    :param plates: the plates that all sites stand in, each with the dimension, counted from the
        right, that it has in the log density of each site.
    :param by_rows: whether the cells of these plates are the rows of the data.
    :param observation: all sites as one.
    """

    kinds: Mapping[str, str]
    plates: Mapping[str, Mapping[str, int]]
    by_rows: bool
    observation: Observation

    @classmethod
    def of(cls, run: Run, args: tuple, again: Callable[[slice], Run | None]) -> "SeveralSites":
        """The sites of a run.

        :param args: its arguments.
        :param again: runs the program on some rows of them; None where it cannot.
        """
        sites = run.observed
        kinds = {name: observation_kind(site.distribution) for name, site in sites.items()}
        plates = _common_plates(sites)
        is_tied = run.one_step_ahead() is not None or run.coupled_data() is not None
        classes = {_number_of_classes(kinds[name], site) for name, site in sites.items()}
        alike = len(classes) == 1 and None not in classes
        observation = Observation(
            ALL,
            "Categorical" if alike else " and ".join(sorted(set(kinds.values()))),
            are_known(sites.values()),
            tied=is_tied and not plates,
            mixed=len(classes) > 1,
        )
        return cls(kinds, plates, _are_rows(run, args, plates, again), observation)

    def data(self, test: Test, run: Run) -> Test:
        """The data of a run of the program on them, with the numbers of all sites as the target."""
        given = test.given()
        values: dict[str, Tensor] = {name: run.observed[name].value for name in self.kinds}
        for name, kind in self.kinds.items():
            if self.observation.is_class and kind == "OneHotCategorical":
                values[name] = values[name].argmax(-1)
            if self.observation.mixed and kind in _BY_CLASS:
                classes = observation_mean(run.observed[name].distribution).shape[-1]
                values[name] = one_hot(values[name].long(), classes)
        if self.by_rows:
            return Test(test.inputs, self._together(values, leading_size(given)), given)
        return Test((), self._together(values), given, whole=True)

    def draws(self, values: Mapping[str, Tensor]) -> Tensor:
        """Numbers of each site and draw ``(S, ...)`` as ``(S, N, D)`` or ``(S, M)``."""
        shape = values[next(iter(self.kinds))].shape
        return self._together(values, *shape[: 2 if self.by_rows else 1])

    def probabilities(self, means: Mapping[str, Tensor]) -> Tensor:
        """Class probabilities ``(S, N D, C)`` or ``(S, M, C)`` from the mean of each site."""
        shape = means[next(iter(self.kinds))].shape
        found = {n: Observation(n, kind).probabilities(means[n]) for n, kind in self.kinds.items()}
        classes = next(iter(found.values())).shape[-1]
        together = self._together(found, *shape[: 2 if self.by_rows else 1])
        return together.reshape(len(together), -1, classes)

    def densities(self, values: Mapping[str, Tensor]) -> Tensor:
        """Log densities of each site ``(S, *batch)`` as those of the data, ``(S, K)``."""
        if not self.plates:
            found = self._together(values, len(next(iter(values.values()))))
            return found.sum(1, keepdim=True) if self.observation.tied else found
        terms = []
        for name in self.kinds:
            dims = [dims[name] for dims in self.plates.values()]
            moved = values[name].movedim(dims, list(range(1, 1 + len(dims))))
            terms.append(moved.reshape(*moved.shape[: 1 + len(dims)], -1).sum(-1).flatten(1))
        return torch.stack(terms).sum(0)

    def _together(self, values: Mapping[str, Tensor], *leading: int) -> Tensor:
        return torch.cat([values[name].reshape(*leading, -1) for name in self.kinds], -1)


class Together:
    """The methods of a ``Predictive`` for all observed sites as one, of the name ``ALL``.

    :param predictive: a ``Predictive`` or ``LinearizedPredictive``.
    :param several: the sites.
    """

    def __init__(self, predictive: Any, several: SeveralSites) -> None:
        self.predictive, self.several = predictive, several

    def __getattr__(self, name: str) -> Any:
        return getattr(self.predictive, name)

    def __call__(self, *args: Any) -> dict[str, Tensor]:
        return {ALL: self.several.draws(self.predictive(*args))}

    def mean(self, *args: Any) -> dict[str, Tensor]:
        found = self.predictive.mean(*args)
        is_class = self.several.observation.is_class
        return {ALL: self.several.probabilities(found) if is_class else self.several.draws(found)}

    def draw_moments(self, *args: Any) -> dict[str, PredictiveMoments]:
        found = self.predictive.draw_moments(*args)
        parts = ({n: moments[i] for n, moments in found.items()} for i in (0, 1))
        return {ALL: PredictiveMoments(*map(self.several.draws, parts))}

    def log_likelihood(self, *args: Any) -> dict[str, Tensor]:
        return {ALL: self.several.densities(self.predictive.log_likelihood(*args))}


def _number_of_classes(kind: str, site: Site) -> int | None:
    """The number of classes of a site's targets; None for other numbers."""
    observation = Observation("", kind)
    if not observation.is_class:
        return None
    return observation.probabilities(observation_mean(site.distribution)[None]).shape[-1]


def _common_plates(sites: Mapping[str, Site]) -> dict[str, dict[str, int]]:
    """The plates of all sites, each with its dimension at every site."""
    shapes = {name: site.distribution.batch_shape for name, site in sites.items()}
    found: dict[str, dict[str, int]] = {}
    for plate, _ in next(iter(sites.values())).plates:
        dims = {n: dict(site.plates).get(plate, -1 - len(shapes[n])) for n, site in sites.items()}
        inside = all(-dim <= len(shapes[name]) for name, dim in dims.items())
        if inside and len({shapes[name][dim] for name, dim in dims.items()}) == 1:
            found[plate] = dims
    return found


def _are_rows(
    run: Run,
    args: tuple,
    plates: Mapping[str, Mapping[str, int]],
    again: Callable[[slice], Run | None],
) -> bool:
    """Return whether the cells of the plates are the rows of the arguments, also with one less."""
    count = leading_size(args)
    if len(plates) != 1 or count < 2 or not has_rows((args, {}), count):
        return False
    (dims,) = plates.values()

    def fits(sites: Mapping[str, Site], rows: int) -> bool:
        return sites.keys() == dims.keys() and all(
            site.value.shape[:1] == (rows,) and site.distribution.batch_shape[dims[name]] == rows
            for name, site in sites.items()
        )

    if not fits(run.observed, count):
        return False
    fewer = again(slice(0, count - 1))
    return fewer is not None and fits(fewer.observed, count - 1)
