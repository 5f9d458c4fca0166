"""Progress of a training run: metrics, held-out acceptance, checkpoints, resuming."""
