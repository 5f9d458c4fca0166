"""transformers' causal LMs as targets: what a family needs is read from its modules and tested on text."""
