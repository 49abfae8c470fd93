"""``summarize``: what a posterior adds to a trained network, on test data.

Every row of the table is an ``Evaluation``, of the network alone, of the network at a temperature,
of posteriors around it, and of several networks. The answer is made of differences of their scores
at the same test points, with their errors.

Source: Guo et al. (2017), On calibration of modern neural networks (temperature scaling); Daxberger
et al. (2021), Laplace redux; Lakshminarayanan et al. (2017), Simple and scalable predictive
uncertainty estimation using deep ensembles.
"""

import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from pyro.nn import PyroModule
from torch import nn

from pyro_bdl import models, priors
from pyro_bdl.comparison import networks
from pyro_bdl.comparison.columns import Column, listed, to_text, with_error
from pyro_bdl.comparison.costs import Costs
from pyro_bdl.comparison.evaluate import Evaluation, evaluate_in
from pyro_bdl.comparison.judge import ABOVE, BELOW, Check, Finding, Row
from pyro_bdl.comparison.kind import Kind
from pyro_bdl.comparison.metric import CLASSES, PointScores
from pyro_bdl.comparison.networks import Members
from pyro_bdl.comparison.setting import Setting, arguments_of
from pyro_bdl.comparison.table import NAME, compare_evaluations
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.laplace import AutoLaplaceGGN
from pyro_bdl.guides.point import AutoMAP
from pyro_bdl.program.batches import Batches, leading_size
from pyro_bdl.utils.random_state import checked_seed
from pyro_bdl.utils.validation import whole_number

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = 100
_SECONDS = Column("seconds", "seconds", "", "To fit and predict, after the network's own training.")
_NUMBERS = ("accuracy", "rmse", "nlpd", "crps", "coverage", "ece", "auroc", "auroc_epistemic")
_LAPLACE: Mapping[str, Mapping[str, Any]] = {"Laplace": {}, "last layer": {"subset": "last-layer"}}
# Smaller differences (in nats, or in probabilities of AUROC) are no reason to choose.
_GAP = Check("gap", "{}", low=-1e-4, high=1e-4, below="lower", above="higher", undecided="open",
             within="equal")  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Result of ``summarize``; print it for the answer and the table.

    :param answer: whether a posterior is worth it, said only beyond the errors.
    :param table: a row for each method: numbers by key, and their standard errors under ``key_se``.
    :param columns: title and meaning of each number.
    :param posteriors: name of a row to its program and posterior, as ``compare`` takes them; those
        of an ensemble are several, and are left out.
    """

    answer: str
    table: "pd.DataFrame"
    columns: tuple[Column, ...]
    posteriors: Mapping[str, tuple[Callable, Any]]

    def __repr__(self) -> str:
        rows = [{"posterior": name, **row.to_dict()} for name, row in self.table.iterrows()]
        table = to_text(rows, [replace(NAME, title=""), *self.columns], _WIDTH)
        return f"{textwrap.fill(self.answer, _WIDTH, break_on_hyphens=False)}\n\n{table}"


def summarize(
    net_or_model: Any,
    train: Any,
    *,
    held_out: Any,
    test: Any,
    other: Any = None,
    ensemble: Sequence[Callable] = (),
    laplace: Mapping[str, Mapping[str, Any]] | None = None,
    weight_decay: float = 1e-4,
    num_samples: int = 100,
    seed: int = 0,
) -> Summary:
    """Compare a trained network's own predictions with those of posteriors around it.

    The rows are the network (softmax, or a Normal around its output), the same after temperature
    scaling on the held-out rows, Laplace approximations whose width the held-out rows choose, and
    an ensemble. Of a regression network the noise is the root mean square error on the held-out
    rows; for a posterior they choose noise and width together.

    Example::

        >>> x = torch.randn(300, 2)
        >>> y = (x[:, 0] > 0).long()
        >>> net = torch.nn.Linear(2, 2)  # trained
        >>> held_out, test = (x[100:200], y[100:200]), (x[200:], y[200:])
        >>> summary = bdl.summarize(net, (x[:100], y[:100]), held_out=held_out, test=test)
        >>> list(summary.table.index)
        ['softmax', 'temperature scaling', 'Laplace', 'last layer']

    :param net_or_model: a torch network of class logits (N, C) or of as many numbers as targets; or
        a program around one that observes classes or Normals, such as
        ``models.HeteroscedasticRegression(bdl.bayesianize(net))``.
    :param train: ``(x, y)`` or batches of them, to which the posteriors are fitted.
    :param held_out: ``(x, y)`` that the network was not trained on, some hundreds of rows, or
        batches of them, which are held in memory together; so may be ``test`` and ``other``.
    :param test: ``(x, y)``, the rows of the scores.
    :param other: inputs unlike the data, which uncertainty is to tell from the test inputs.
    :param ensemble: more networks, or programs, trained as the first from other starts.
    :param laplace: name to options of ``AutoLaplaceGGN``; by default all weights, the last layer.
    :param weight_decay: of a network's training, which is the prior; see
        ``priors.Normal.from_weight_decay``.
    :param num_samples: draws of each posterior.
    :raises ArgumentError: for a network that ends in softmax or sigmoid, or whose outputs do not
        say what is observed.
    :raises UnsupportedProgramError: for a program with latents beside a network's weights, with
        masks, or with other observations.
    :raises ValueError: for data that do not fit.
    """
    num_samples, seed = whole_number(num_samples, "num_samples", least=2), checked_seed(seed)
    batches = Batches(train)
    first_args, _ = batches.first()
    rows = sum(leading_size(batch) for batch in batches)
    whole = batches.whole is not None  # then the rows of a batch are all there are
    held_out = arguments_of("held_out", held_out, None, device=batches.device)
    is_network = isinstance(net_or_model, nn.Module) and not isinstance(net_or_model, PyroModule)
    noise = None

    def program(net: Any, noise: float | None = None) -> Any:
        if not is_network:
            return net
        prior = priors.Normal.from_weight_decay(weight_decay, rows)
        return networks.program_of(net, first_args, prior, noise, num_data=None if whole else rows)

    def at_point(model: Any) -> tuple[Callable, Any]:
        return model, AutoMAP(model).prototype(*first_args)

    evaluations: dict[str, Evaluation] = {}
    posteriors: dict[str, tuple[Callable, Any]] = {}
    evaluated = partial(_evaluated, draws=num_samples, seed=seed)

    def add(name: str, started: float, model: Any, posterior: Any) -> None:
        found, _ = evaluated(model, posterior, test, other)
        scores = {**found.scores, "seconds": time.perf_counter() - started}
        evaluations[name] = replace(found, scores=scores)

    if is_network and isinstance(program(net_or_model), models.Regression):
        noise = networks.held_out_error(net_or_model, held_out)
    started = time.perf_counter()
    model, _ = network = at_point(program(net_or_model, noise))
    found, kind = evaluated(model, Members([network]), held_out)
    name = "softmax" if kind.task == CLASSES else "network"
    posteriors[name] = network
    add(name, started, model, Members([network]))
    if noise is None:
        started = time.perf_counter()
        scaled = networks.at_temperature(model, found.scores["temperature"], kind.sites)
        posteriors["temperature scaling"] = at_T = at_point(scaled)
        add("temperature scaling", started, scaled, Members([at_T]))
    cheap = tuple(evaluations)
    for name, options in (_LAPLACE if laplace is None else laplace).items():
        started = time.perf_counter()
        own = program(net_or_model, noise)
        posterior = AutoLaplaceGGN(own, **options).laplace_approximation(
            train, held_out=held_out, progress=False
        )
        if noise is not None:
            networks.fit_noise(own, posterior, noise, held_out)
        posteriors[name] = own, posterior
        add(name, started, own, posterior)
    if ensemble:
        started = time.perf_counter()
        members = [network, *(at_point(program(member, noise)) for member in ensemble)]
        add(f"ensemble of {len(members)}", started, model, Members(members))
    table = compare_evaluations(evaluations).table
    columns = {column.key: column for column in (*table.attrs["columns"], *table.attrs["details"])}
    shown = [replace(columns[key], group="") for key in _NUMBERS if key in columns]
    keys = [key for column in shown for key in (column.key, column.error)]
    table = table.loc[list(evaluations), [*keys, "seconds"]]
    table.attrs = {}
    return Summary(answer_of(evaluations, cheap), table, (*shown, _SECONDS), posteriors)


def _evaluated(
    model: Callable, posterior: Any, data: tuple, other: Any = None, *, draws: int, seed: int
) -> tuple[Evaluation, Kind]:
    """The scores, and what the program observes.

    :raises UnsupportedProgramError: for a program of which no network is the whole.
    """
    first = posterior.members[0][1] if isinstance(posterior, Members) else posterior
    setting = Setting.read(
        model, first, test=data, train=None, ood=other, units=(1.0, 0.0), num_samples=draws,
        seed=seed, batch_norm_data=None, progress=False,
    )  # fmt: skip
    kind = setting.kind
    if not kind.has_rows_of_one or not (kind.task == CLASSES or kind.is_normal):
        raise UnsupportedProgramError(
            "summarize is for programs that observe one class, or Normal numbers, in each row, and "
            f"this one observes {', '.join(kind.sites.values())}: compare scores others"
        )
    if setting.seen is not None:
        raise UnsupportedProgramError(
            "masks leave out some of the targets: leave out these rows, or call compare"
        )
    if kind.named:
        raise UnsupportedProgramError(
            f"the program has latents that are no weights ({', '.join(map(repr, kind.named))}), "
            "which no trained network has values for: give them numbers or PyroParams, or fit a "
            "guide and call compare"
        )
    return evaluate_in(setting, posterior, Costs(), None), kind


# ---------------------------------------------------------------------------------- answer


def answer_of(evaluations: Mapping[str, Evaluation], cheap: Sequence[str]) -> str:
    """Sentences on each posterior, with what is beyond the errors.

    Each is compared with all of the network's own predictions, by errors so enlarged that of all
    the differences one is called so by chance in 5 % of the cases.
    """
    alone = [evaluations[name].points for name in cheap]
    others = {name: of.points for name, of in evaluations.items() if name not in cheap}
    has_other = "auroc" in alone[0]
    questions = max(1, len(others) * (1 + 2 * has_other))

    def gap(own: PointScores, rival: PointScores) -> Finding:
        value, error = own.difference(rival, of=questions)
        value = 0.0 if math.isnan(value) else value  # and so is its error, which leaves it open
        return cast(Finding, _GAP.of(Row(gap=value, gap_se=error)))

    better, worse, apart = [], [], []
    for name, points in others.items():
        gaps = [gap(points["nlpd"], rival["nlpd"]) for rival in alone]
        if all(found.says == BELOW for found in gaps):
            better.append(f"{name} (NLPD lower by {_least(gaps)})")
        elif gaps[0].says == ABOVE:
            worse.append(f"{name} (NLPD higher by {_least(gaps[:1])})")
        ways: dict[float, str] = {}
        for key in ("auroc", "auroc_epistemic") if has_other else ():
            if (own := points.get(key)) is None:
                continue
            chance = replace(own, number=0.5, over_points=0.0, influence=0 * own.influence)
            gaps = [gap(own, rival["auroc"]) for rival in alone]
            beyond = [*gaps, gap(own, replace(chance, groups=torch.zeros_like(own.groups)))]
            if all(found.says == ABOVE for found in beyond):
                by = ", by the disagreement of its draws" if key == "auroc_epistemic" else ""
                ways.setdefault(own.number, f"{name} (AUROC higher by {_least(gaps)}{by})")
        apart += [ways[max(ways)]] if ways else []
    what = "probabilities" if "accuracy" in alone[0] else "predictive densities"
    beside = listed([name.replace("network", "the network") for name in cheap])
    rows = evaluations[cheap[0]].rows
    who = _who(better, "has", "have")
    text = f"On {rows} test rows, beyond the errors, {who} better {what} than {beside}."
    if worse:
        text += f" {_who(worse, 'has', 'have')} worse ones than the network alone."
    if not has_other:
        return f"{text} Inputs unlike the data were not passed, and nothing is said of these."
    who = _who(apart, "separates", "separate")
    text += f" {who[0].upper()}{who[1:]} other inputs from test inputs better than the network."
    if not (better or apart):
        text += " These rows give no reason for more than the network."
    return text


def _least(gaps: Sequence[Finding]) -> str:
    """The smallest of several differences, without its sign."""
    value, error = min((abs(gap.value), gap.error) for gap in gaps)
    return with_error(value, error)


def _who(names: Sequence[str], one: str, several: str) -> str:
    """The subject of a sentence, with its verb."""
    if not names:
        return f"no posterior {one}"
    return f"{listed(names)} {one if len(names) == 1 else several}"
