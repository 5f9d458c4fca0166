"""Predicts whether speculative decoding will pay, with which method and depth, and what it costs."""
