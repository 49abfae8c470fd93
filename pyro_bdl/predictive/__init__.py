"""Posterior predictive distributions: sampled, linearized, in closed form.

The linearized predictive has four files. ``linearized.py`` holds the public class, with averages
over a mixture's members. ``linearized_component.py`` treats one member, batch by batch.
``closed_forms.py`` holds densities and class probabilities for Gaussian outputs; ``covariances.py``
the law of total covariance, which ``sampled.py`` uses too.
``curvature/linear_outputs.py`` holds the outputs as linear functions of the latents, which the
evidence uses too. It uses the unconstrained parameters of ``program/unconstrained_parameters.py``.
"""

from pyro_bdl.predictive.covariances import PredictiveCovariance
from pyro_bdl.predictive.linearized import LinearizedPredictive
from pyro_bdl.predictive.sampled import Predictive, PredictiveMoments

__all__ = [
    "LinearizedPredictive",
    "Predictive",
    "PredictiveCovariance",
    "PredictiveMoments",
]
