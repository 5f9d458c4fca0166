"""From bodies to requests and from outputs to answers; what is wrong is refused by name."""
