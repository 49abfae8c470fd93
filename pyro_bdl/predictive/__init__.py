"""Posterior predictive distributions: sampled, linearized, in closed form."""

from pyro_bdl.predictive.linearized import LinearizedPredictive
from pyro_bdl.predictive.linearized_mixture import LinearizedMixture
from pyro_bdl.predictive.sampled import Predictive, PredictiveMoments

__all__ = ["LinearizedMixture", "LinearizedPredictive", "Predictive", "PredictiveMoments"]
