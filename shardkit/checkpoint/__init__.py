"""Loading full state dicts into sharded models and optimizers.

Saving and loading sharded checkpoints, and gathering full ones, are torch's own functions
(`torch.distributed.checkpoint`, `get_model_state_dict`, `get_optimizer_state_dict`); they are right for every
layout of shardkit. Its loaders of full state dicts are not: `set_*_state_dict` here take their place.
"""

from shardkit.checkpoint.full_state import set_model_state_dict, set_optimizer_state_dict

__all__ = ["set_model_state_dict", "set_optimizer_state_dict"]
