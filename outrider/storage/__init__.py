"""Files that survive a crash, a second process and a full disk."""
