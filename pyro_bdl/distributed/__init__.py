"""Training and curvature on several processes."""

from pyro_bdl.distributed.data_parallel import DataParallel_ELBO, Shard, broadcast

__all__ = ["DataParallel_ELBO", "Shard", "broadcast"]
