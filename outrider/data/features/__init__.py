"""The target's states of its answers: computed on demand, cached on disk, or sent by other processes."""
