from tiny import folder, talker

__all__ = ["folder", "talker"]
