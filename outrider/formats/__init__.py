"""What formats of other programs have in common, whatever the method: folders, keys, layouts."""
