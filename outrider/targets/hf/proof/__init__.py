"""Proves that a family of models decodes correctly here: a self-test on a miniature, with its verdict stored on
disk."""
