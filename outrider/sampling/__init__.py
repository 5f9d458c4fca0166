"""What a request asks of the distribution: settings, penalties, grammar, text, and the judge that obeys them."""
