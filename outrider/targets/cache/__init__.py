"""The caches of targets: keys and values in slots, states of recurrent layers, attention masks, and their memory."""
