"""How a training is doing, and where it goes on: metrics, held-out acceptance, checkpoints, resuming."""
