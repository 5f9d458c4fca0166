"""One file per method, as in `outrider.drafters`, whose registry finds them here too."""
