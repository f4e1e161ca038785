"""Model families, each a short file that declares its kinds, and how their weights are read."""
