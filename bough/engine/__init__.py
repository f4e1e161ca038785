"""What runs requests: scheduling, sampling, text, and the engine that ties them to a model."""
