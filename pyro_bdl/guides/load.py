"""Posteriors from files."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bdl.guides.base import Guide, restored
from pyro_bdl.guides.saved import SAVED_KIND, log_densities
from pyro_bdl.samples import SUFFIXES, Samples
from pyro_bdl.utils.tensor_file import kind_of_file, load_tree
from pyro_bdl.utils.trees import tree_map_only

_SLACK = 1e-2  # of log densities, which differ by rounding between devices


def load_posterior(path: str | Path, model: Callable) -> Guide | Samples:
    """Read a posterior that ``guide.save(path)`` or ``samples.save(path)`` wrote.

    A guide is made for ``model``, on the device of its tensors. The program's own parameters and
    buffers, such as a learned noise or the statistics of BatchNorm layers, are set to those of the
    file. Nothing in the file is run as code.

    :param path: the file.
    :param model: the program that the posterior belongs to, made as when it was saved.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: for a file that holds no posterior, or is damaged.
    :raises RuntimeError: for a posterior of another program, such as one with another prior or
        noise, which stays as it was.
    """
    path = Path(path)
    if path.suffix in SUFFIXES and path.is_file() and kind_of_file(path) is None:
        return Samples.load(path)
    tree = load_tree(path, kind=SAVED_KIND)
    before: Any = None
    device = torch.device("cpu")
    if isinstance(model, nn.Module):
        before = copy.deepcopy(model.state_dict())
        device = next((v.device for v in before.values() if isinstance(v, Tensor)), device)
    batch = tree_map_only(Tensor, lambda value: value.to(device), tree["batch"])
    try:
        if tree["program"] is not None and isinstance(model, nn.Module):
            model.load_state_dict(tree["program"])
        guide = restored(model, tree["guide"], batch)
        _check_same(tree["densities"], log_densities(guide))
        return guide
    except Exception:
        if isinstance(model, nn.Module):
            model.load_state_dict(before)
        raise


def _check_same(saved: dict[str, float], now: dict[str, float]) -> None:
    for site, value in saved.items():
        here = now.get(site, math.nan)
        if not math.isclose(value, here, rel_tol=_SLACK, abs_tol=_SLACK) and value == value:
            raise RuntimeError(
                f"the posterior is of another program: at the same weights and data the log "
                f"density of the site '{site}' was {value:.6g} and is {here:.6g} here: load it "
                "with the prior, the noise and the num_data of the program that it was saved from"
            )
