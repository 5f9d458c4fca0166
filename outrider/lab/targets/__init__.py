"""One module per kind of target.  `targets.load` imports all of them before it reads a config, so that models register
themselves with transformers.  A kind with its own folder format also defines `described(name)`, its description or
None, `load(name, description, load_target, **options)`, and `first(description)`, the target that drafters read.
"""
