"""Ready-made programs: a network of ``bayesianize`` with an observation model.

Each program is ``model(x, y=None)``. It observes the site ``y`` inside the plate ``data`` and
records the network's output f(x) as the deterministic site ``f``. Outputs and targets with a single
column (N, 1) are treated as (N,).

A network that takes keywords gets them as a dict in the place of x, or as keywords of the call::

    model({"input_ids": ids, "attention_mask": mask}, y)
    model(input_ids=ids, attention_mask=mask, y=y)

Of a network whose output is no tensor ``output`` says which tensor is f(x); by default it is the
output's ``logits``, as in networks of the Hugging Face kind.

Where some targets were not observed they are NaN (of classes too, as floats), and
``Regression(bnn, missing_targets=True)`` leaves them out of the likelihood; so do the other
programs and the heads of ``MultiOutput``.

``MultiOutput`` observes several outputs of one network, each with a program of its own kind::

    heads = {"price": Regression(noise=0.1), "sold": BinaryClassification()}
    model = MultiOutput(network, heads, num_data=N)
    model(x, {"price": prices, "sold": sold})
"""

from pyro_bdl.models.base import ObservationModel
from pyro_bdl.models.censored import CensoredRegression
from pyro_bdl.models.classes import BinaryClassification, Classification, OrdinalRegression
from pyro_bdl.models.counts import NegativeBinomialRegression, PoissonRegression
from pyro_bdl.models.real_numbers import (
    BetaRegression,
    HeteroscedasticRegression,
    Regression,
    StudentTRegression,
)
from pyro_bdl.models.several_outputs import MultiOutput

__all__ = [
    "BetaRegression",
    "BinaryClassification",
    "CensoredRegression",
    "Classification",
    "HeteroscedasticRegression",
    "MultiOutput",
    "NegativeBinomialRegression",
    "ObservationModel",
    "OrdinalRegression",
    "PoissonRegression",
    "Regression",
    "StudentTRegression",
]
