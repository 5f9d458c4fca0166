"""What an evaluation found: a file to keep, a table, a page, and one report against another.  Knows no torch."""
