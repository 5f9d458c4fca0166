"""Does an engine accept what we accept?  Readers of exported drafts of our own, and the engines themselves."""
