"""Work in a process of its own: for libraries that run code which a model wrote."""
