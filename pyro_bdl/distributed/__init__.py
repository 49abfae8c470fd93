"""Training, curvature and draws on several processes."""

from pyro_bdl.distributed.data_parallel import DataParallel_ELBO, Shard, broadcast
from pyro_bdl.distributed.gathering import gather

__all__ = ["DataParallel_ELBO", "Shard", "broadcast", "gather"]
