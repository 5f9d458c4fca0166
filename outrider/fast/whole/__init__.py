"""Steps as one call: verify, accept, commit, observe, propose, without the host in between."""
