"""Passes that a CUDA GPU records once and replays."""
