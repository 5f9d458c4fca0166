"""Costs on paper: from the config of a model and the data sheet of a device."""
