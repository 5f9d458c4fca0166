"""Does an engine accept the drafts that Outrider accepts?  Our own readers of exported drafts, and the engines
themselves."""
