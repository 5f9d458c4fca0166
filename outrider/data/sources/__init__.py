"""Where conversations come from: files and data sets of any layout, mixed, and without duplicates."""
