"""Results of an evaluation: a file, a table, a page, and comparisons of reports.  No torch."""
