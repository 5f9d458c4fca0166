"""An OpenAI-compatible server: requests of many clients over the slots of one batch."""
