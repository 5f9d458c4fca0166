"""One file per sort of target.  `targets.load` imports all of them before it reads a config, so that a model registers
itself with transformers; a sort with folders of its own also offers `described(name)`, what such a folder says or None,
`load(name, found, load_target, **options)`, and `first(found)`, the name of the target that drafters read.
"""
