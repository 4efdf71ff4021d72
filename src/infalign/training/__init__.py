"""Training: loops come from TRL and transformers; ours is the loss or the reward."""
