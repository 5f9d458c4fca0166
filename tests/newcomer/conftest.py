from tiny import folder

__all__ = ["folder"]
