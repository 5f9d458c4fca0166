"""A drafter that learns from the texts it drafts for, while it serves."""
