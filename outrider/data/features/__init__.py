"""The target's states of its answers: computed as they are needed, kept on disk, or sent by other processes."""
