"""Every image of a mini-batch is encoded once, and its summed cotangent goes back through the encoder once."""
