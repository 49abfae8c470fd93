"""The Laplace approximation: a guide that trains the MAP, and then a Gaussian around it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.structures import structure_of
from pyro_bdl.curvature.structures.base import Structure
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides.base import Guide
from pyro_bdl.guides.gaussian import LaplaceGuide, approximate, refuse_subsampled
from pyro_bdl.guides.held_out import check_held_out
from pyro_bdl.guides.point import UnconstrainedMAP
from pyro_bdl.program.batches import Batches
from pyro_bdl.program.check import check_finite, refuse_sparse
from pyro_bdl.program.linear_ops.last_layer import LastLayer
from pyro_bdl.program.rows import rows_of
from pyro_bdl.program.subset import Subset, select
from pyro_bdl.program.trace import placeholder_for_observed, record
from pyro_bdl.utils import bibliography
from pyro_bdl.utils.module_state import evaluation_mode, uncompiled, vmappable


class AutoLaplaceGGN(UnconstrainedMAP):
    """A guide that trains the MAP; ``laplace_approximation(data)`` returns a Gaussian guide around
    it.

    The MAP u* maximizes the density of the unconstrained vector, log p(T(u), y) + log |det dT/du|.
    The Gaussian is N(u*, (sum_n J_n' F_n J_n + prior precision)^-1), with J_n the Jacobian of the
    observation distribution's parameters and F_n their Fisher information (MacKay 1992; Martens &
    Grosse 2015; Immer et al. 2021, section 3).

    Example::

        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-2, 2, 20)
        >>> model = bdl.models.Regression(bdl.bayesianize(torch.nn.Linear(1, 1)), noise=0.1)
        >>> guide = bdl.guides.AutoLaplaceGGN(model, structure="full")
        >>> training = bdl.training.train(model, guide, x, y, steps=100, learning_rate=0.1)
        >>> guide.laplace_approximation((x, y))
        LaplaceGuide(2 latent numbers, 2 sites, structure=Full())

    :param model: a Pyro program with continuous latents.
    :param structure: one of ``bdl.curvature``, such as ``Kron(reduce=True)``, or its name: "auto"
        (the default), "kron" (KFAC), "ekfac", "full", "diag", "low_rank", "kernel" or "samples".
        "auto" is "full" for up to 2000 latents, "kernel" if N K is below p and at most 4096 for N
        data with K outputs, if they fit in memory, and else "kron"; the printed approximation names
        it.
    :param curvature: "ggn"; "ggn-mc", from ``num_draws`` drawn observations per datum;
        "empirical-fisher"; or "hessian" (for "full" only).
    :param subset: the latents with a covariance; the others stay at the MAP. Possible are names or
        patterns, modules of the network, a predicate ``(name, latent) -> bool``, positions in the
        flat vector, or "last-layer" ("last_layer" too); None for all.
    :param num_draws: observations drawn per datum, by default 1 for "ggn-mc". For "ggn", 512 by
        default, used only if the Fisher information has no closed form and is estimated
        (``curvature.fisher.cell_roots`` lists the closed forms). The relative error of the estimate
        falls with the square root of draws times data.
    :param rows: "together" for a program whose rows of data depend on each other (group means,
        graphs, statistics of a batch): whole batches run, for "full", "diag" and "hessian". A
        program may say so for all methods, ``model.rows = "together"``. By default each row runs
        alone, and a batch in which that gives another result is refused.
    :param options: ``init_loc_fn``, where the guide starts, and ``create_plates``, see ``Guide``.
    :raises ValueError: for an unknown structure or curvature.
    """

    papers: ClassVar[tuple[str, ...]] = (bibliography.LAPLACE, bibliography.LINEARIZED)

    def __init__(
        self,
        model: Callable,
        *,
        structure: str | Structure = "auto",
        curvature: str = "ggn",
        subset: Any = None,
        num_draws: int | None = None,
        rows: str = "alone",
        **options: Any,
    ) -> None:
        rows = rows_of(model) if rows == "alone" else rows
        config = CurvatureConfig(structure_of(structure), curvature, num_draws, rows)
        super().__init__(model, **options)
        self.config = config
        self._selection = (subset,)  # in a tuple: a module in it is the program's own

    @property
    def subset(self) -> Any:
        """The latents that get a covariance, as the user named them."""
        return self._selection[0]

    def options(self) -> dict[str, Any]:
        return {**asdict(self.config), "subset": self.subset}

    def _shared_on_copy(self) -> tuple[str, ...]:
        return (*super()._shared_on_copy(), "_selection")

    def laplace_approximation(
        self,
        data: Any = None,
        *,
        held_out: Any = None,
        progress: bool | None = None,
        **changes: Any,
    ) -> LaplaceGuide:
        """The Gaussian posterior around the current MAP; nothing of the model is changed.

        A network that was trained elsewhere needs no training here: the guide starts at its
        weights. Pass ``held_out`` then, see ``LaplaceGuide.fit_width``.

        The program runs in evaluation mode, and its mode is restored afterwards. Dropout layers
        drop nothing. BatchNorm layers use their running statistics, because statistics of a batch
        would make its data depend on each other; a layer without running statistics
        (``track_running_stats=False``) needs ``rows="together"``.

        :param data: the program's arguments ``(x, y)``, or an iterable of batches of them; each
            datum counts once. A program without arguments needs none.
        :param held_out: the same for rows that the weights were not trained on, some hundreds.
        :param progress: show a bar over batches; by default in terminals and notebooks.
        :param changes: ``structure``, ``curvature``, ``subset``, ``num_draws`` or ``rows`` for
            this approximation alone.
        :raises MemoryError: if the structure does not fit in memory.
        :raises UnsupportedProgramError: if latents are in subsampled plates.
        :raises ValueError: for an empty iterable, a missing target, a target outside its support
            (the error counts rows over all batches), a singular precision.
        :raises TypeError: for data that are not tensors, or of another dtype than the weights.
        """
        subset = changes.pop("subset", self.subset)
        config = replace(self.config, **changes)
        batches = self.batches(data)
        if held_out is not None:  # before the fit, which they come after
            held_out = self.batches(held_out)
            check_held_out(self.program_model, held_out)
        batches.on_all_ranks(lambda: self._begin(config.rows, *batches.first()))
        with uncompiled(self.program_modules):
            chosen = subset_of(self, subset, *batches.first())
            posterior = self._approximate(
                config, chosen, batches, check=held_out is None, progress=progress
            )
        return posterior if held_out is None else posterior.fit_width(held_out)

    def _approximate(
        self, config: CurvatureConfig, subset: Subset, batches: Batches, **options: Any
    ) -> LaplaceGuide:
        return approximate(self, config, subset, batches, **options)

    def _begin(self, rows: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the program and the first of the data."""
        model = self.program_model
        for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise UnsupportedProgramError(
                    f"the embedding '{name}' has sparse gradients, which no curvature is made of: "
                    "set its attribute sparse to False"
                )
        if rows == "alone":
            refuse_sparse(model, args, kwargs)
        check_finite(model, args, kwargs)
        self.prototype(*args, **kwargs)
        refuse_subsampled(self)


def subset_of(guide: Guide, selection: Any, args: tuple, kwargs: Any) -> Subset:
    """The subset for a user's selection, "last-layer" included, of a trained guide's latents."""
    model, layout = guide.program_model, guide.require_layout()
    is_name = isinstance(selection, str) and selection not in layout.latents
    if is_name and selection in ("last-layer", "last_layer"):
        values = layout.constrain(guide.location().detach())[0]
        selection = last_layer(model, values, args, kwargs)
    return select(layout, selection, model=model)


def last_layer(
    model: Callable, values: Mapping[str, Tensor], args: tuple, kwargs: Any
) -> list[str]:
    """The names of the weights and biases of a program's last linear operation.

    It is the last product with a weight matrix or a vector of weights, or the last convolution,
    with the biases that are added to its output.

    :param values: those of the latents.
    :raises ValueError: if no latent enters a linear operation.
    """
    with torch.no_grad(), evaluation_mode(model), vmappable(), LastLayer(values) as seen:
        record(model, values, args, kwargs, draw=placeholder_for_observed)
    if not seen.layers:
        raise ValueError(
            'subset="last-layer" needs a program in which a latent is a weight matrix, or a vector '
            "of weights in a product (inputs @ weights): name the sites of the last layer instead, "
            "as in subset=['weights']"
        )
    return list(seen.layers[-1].sites)
