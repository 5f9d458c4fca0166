"""Parts that draft models share."""
