"""How much to speculate at each load, measured on servers that are started for it."""
