"""Code that the formats of other programs share, whatever the method: folders, keys, layouts."""
