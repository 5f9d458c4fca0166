"""The target's answers to prompts: generated locally or on servers, each written once."""
