"""The sources of conversations: files and data sets of any layout, mixed and deduplicated."""
