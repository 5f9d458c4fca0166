"""What targets store of texts: keys and values in slots, states of recurrent layers, masks over them, and memory."""
