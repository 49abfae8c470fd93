"""Torch networks as Pyro programs: priors on weights, adapters and rank-one factors."""

from pyro_bdl.adapters import lora, merged
from pyro_bdl.nn.bayesian import BayesianModule as BayesianModule
from pyro_bdl.nn.bayesian import bayesianize as bayesianize
from pyro_bdl.nn.bayesian import with_prior
from pyro_bdl.nn.rank_one import rank_one
from pyro_bdl.program.checkpointing import checkpoint
from pyro_bdl.program.network_sites import each

__all__ = ["checkpoint", "each", "lora", "merged", "rank_one", "with_prior"]
