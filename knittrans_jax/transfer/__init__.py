"""How bytes move: storage units, plans laid out for the mesh, pulls by consumer, the loader, and versioned weights."""
