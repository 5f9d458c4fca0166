"""How much to speculate at which load, measured on servers that are started for it."""
