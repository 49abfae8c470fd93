"""Posterior predictive distributions: sampled, linearized, in closed form.

The linearized predictive stands in four files: ``linearized.py`` the class that users call, with
its averages over a mixture's members; ``linearized_component.py`` one member, part by part of the
data; ``closed_forms.py`` densities and class probabilities under Gaussian outputs; and
``curvature/linear_outputs.py`` the outputs as linear functions of the latents, which the evidence
uses too. Behind that, ``program/unconstrained_parameters.py`` holds the scales on which
observations are linear.
"""

from pyro_bdl.predictive.linearized import LinearizedMixture, LinearizedPredictive
from pyro_bdl.predictive.sampled import Predictive, PredictiveMoments

__all__ = ["LinearizedMixture", "LinearizedPredictive", "Predictive", "PredictiveMoments"]
