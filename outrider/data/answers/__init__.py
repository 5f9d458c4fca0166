"""The target's answers to prompts: made here or on servers, each written once."""
